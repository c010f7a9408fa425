"""Code that a run's files name: ours needs no trust, all else runs only where the user says so.

A plan is a file that anybody can write. Its builders are imported and its strategies are run, some
of them on this machine with the user's own rights.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from weighin.cell import Cell
from weighin.errors import ConfigError
from weighin.suite import registry
from weighin.suite.config import read_model
from weighin.text import one_line

_LARGEST_FILE_BYTES: Final = 16 * 1024 * 1024
_KWARGS_LENGTH: Final = 120


def check(
    found: Iterable[str], *, place: Path, again: str, repair: str = "or start a new run"
) -> None:
    """Raise ConfigError where anything was found; ``again`` is the command that trusts it."""
    if listed := "; ".join(found):
        raise ConfigError(
            f"{place} names code that is not weighin's own, and it would run here: {listed}",
            f"read it; if you trust it: {again} --trust; {repair}",
        )


def foreign(
    cells: Iterable[Cell], paths: Mapping[str, str], base_image: str | None = None
) -> list[str]:
    """Return what is neither ours nor of an installed package, one line each: what would run.

    ``paths`` are the strategies' files by name. Nothing of it is imported or run.
    """
    cells = list(cells)
    ours = {read_model(path).builder for path in registry.models().values()}
    found: dict[str, None] = {}
    for cell in cells:
        if (builder := cell.model.builder) not in ours:
            kwargs = one_line(json.dumps(cell.model.kwargs, default=str), _KWARGS_LENGTH)
            found[f"builder {one_line(builder)} with {kwargs}"] = None
    known = {
        info.path
        for operation in {cell.operation for cell in cells}
        for info in registry.strategies(operation).values()
    }
    for path in map(Path, paths.values()):
        if path.resolve() not in known:
            found[f"strategy {one_line(str(path))} ({_hash(path)})"] = None
    if base_image and any(cell.isolation == "docker" for cell in cells):
        from weighin.isolation.docker.image import BASE_VARIABLE
        from weighin.isolation.docker.image_build import DEFAULT_BASE  # these import the SDK

        if base_image not in (DEFAULT_BASE, os.environ.get(BASE_VARIABLE)):
            found[f"base image {one_line(base_image)}"] = None
    return list(found)


def _hash(path: Path) -> str:
    try:
        if not path.is_file() or path.stat().st_size > _LARGEST_FILE_BYTES:
            return "no such file" if not path.exists() else "no strategy"
        return f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
