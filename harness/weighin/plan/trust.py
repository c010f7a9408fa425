"""Find foreign code in a run's plan, so that weighin runs the code only if the user trusts it.

A plan that somebody else wrote may name any code. weighin imports the plan's builders (functions
that return models), and runs the plan's strategies with the user's rights. Code of weighin and of
installed packages is not foreign.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from shlex import join
from typing import Final

from weighin.cell import SYNTHESISED, Cell
from weighin.errors import ConfigError
from weighin.files import read_bytes
from weighin.formats.adapters import adapter_of
from weighin.formats.pretrained_folder import code_of
from weighin.settings.definition import Settings, read_model
from weighin.suite import registry, user_code
from weighin.text import one_line, printable

_KWARGS_LENGTH: Final = 120
_NO_CODE: Final = (
    "MALLOC_ARENA_MAX", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_",
    "MALLOC_CONF", "OMP_NUM_THREADS", "MKL_NUM_THREADS",
)  # fmt: skip


def check(
    foreign_code: Iterable[str], *, place: Path, again: str, repair: str = "or start a new run"
) -> None:
    """Raise ConfigError if there is foreign code; the error suggests the command ``again --trust``."""
    if listed := "; ".join(foreign_code):
        raise ConfigError(
            f"{place} names code that is not part of weighin and would run here: {listed}",
            f"read that code; if you trust it: {again} --trust; {repair}",
        )


def foreign(cells: Sequence[Cell], settings: Settings) -> list[str]:
    """Return one line for each entry of a plan that names code that is neither part of weighin nor
    installed; run none of it.

    Code can come from builders, strategies, uses, Hugging Face folders, mounts, environment variables
    and the address of a Ray cluster; a command is always foreign.
    """
    # Ray unpickles what a cluster sends, and so runs its code.
    address = settings.engine.get("address")
    clusters = [f"Ray cluster {one_line(str(address))}"] if address not in (None, "auto") else []
    if settings.commands:
        place = f"{settings.cwd}, image {settings.image}" if settings.image else settings.cwd
        commands = [printable(f"command {join(cell.command)} in {place}") for cell in cells]
        mounts = [printable(f"mount {path}") for path in settings.mounts]
        return list(dict.fromkeys([*clusters, *commands, *mounts]))
    ours = {read_model(path).builder for path in registry.models().values()} | {SYNTHESISED}
    lines: dict[str, None] = dict.fromkeys(clusters)
    for cell in cells:
        if (builder := cell.model.builder) not in ours:
            kwargs = one_line(json.dumps(cell.model.kwargs, default=str), _KWARGS_LENGTH)
            file = user_code.file_of(builder, settings.python_path)
            place = f" in {one_line(str(file))}" if file else ""
            lines[f"builder {one_line(builder)}{place} with {kwargs}"] = None
        if code := code_of(cell.model):
            place = f"{one_line(code['folder'])} (sha256 {one_line(code['sha256'][:16])})"
            lines[f"code of the Hugging Face folder {place}"] = None
        # LD_PRELOAD, LD_LIBRARY_PATH, PYTHONHOME and other variables make a process load code.
        for name, value in cell.environment.items():
            if name not in _NO_CODE:
                lines[f"environment {one_line(f'{name}={value}', _KWARGS_LENGTH)}"] = None
    known = {
        info.path
        for operation in {cell.operation for cell in cells}
        for info in registry.strategies(operation).values()
    }
    for path in map(Path, settings.strategy_paths.values()):
        if path.resolve() not in known:
            lines[f"strategy {one_line(str(path))} ({_hash(path)})"] = None
    for path in map(Path, settings.use_paths.values()):
        lines[f"use {one_line(str(path))} ({_hash(path)})"] = None
    listed = {code["folder"] for cell in cells if (code := code_of(cell.model))}
    listed |= {str(adapter) for cell in cells if (adapter := adapter_of(cell.model))}
    lines |= {f"mount {one_line(path)}": None for path in settings.mounts if path not in listed}
    return list(lines)


def _hash(path: Path) -> str:
    try:
        return f"sha256 {hashlib.sha256(read_bytes(path)).hexdigest()[:16]}"
    except FileNotFoundError:
        return "no such file"
    except PermissionError as error:
        return f"cannot be read: {error.strerror}"
    except OSError:  # a folder, a pipe, or too long
        return "not a strategy"
