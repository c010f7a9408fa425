"""The folders that saves are measured into: on the cache's disk, one a cell, removed after it."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from weighin.checkpoint import cache
from weighin.errors import ConfigError
from weighin.probes import page_cache
from weighin.record import Result
from weighin.units import MIB, format_bytes

_SPARE_BYTES = 64 * MIB  # names, indexes, and what a file system rounds up


@contextmanager
def target(model_bytes: int) -> Iterator[Path]:
    """Make an empty folder for one save, and remove it with all that is in it.

    Raises:
        ConfigError: the disk has no room for the model.
    """
    root = _root()
    root.mkdir(parents=True, exist_ok=True)
    needed, free = model_bytes + _SPARE_BYTES, shutil.disk_usage(root).free
    if free < needed:
        raise ConfigError(
            f"a save needs {format_bytes(needed)} in {root}, where {format_bytes(free)} are free",
            "put the cache on another disk: WEIGHIN_CACHE=/path weighin ...",
        )
    folder = Path(tempfile.mkdtemp(dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_leftovers() -> list[str]:
    """Remove what killed runs left; the caller holds the lock of the one run that measures."""
    removed = []
    for folder in sorted(_root().glob("*")):
        shutil.rmtree(folder, ignore_errors=True)
        removed.append(f"files of a save in {folder}")
    return removed


def with_warnings(result: Result, folder: Path) -> Result:
    """Return the result of a save, warned of a folder whose files are memory."""
    kept = page_cache.drop(path for path in folder.rglob("*") if path.is_file())
    if not kept:
        return result
    warning = (
        f"{format_bytes(kept)} of what was written could not be dropped from the page cache: on a"
        " tmpfs, files are memory of the cell; put the cache on a disk: WEIGHIN_CACHE=/path"
    )
    return replace(result, warnings=(*result.warnings, warning))


def _root() -> Path:
    return cache.folder() / "saving"
