"""Create a folder in weighin's cache for each save, and remove the folder after the cell."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from weighin.checkpoint import cache, staging
from weighin.errors import ConfigError
from weighin.probes import page_cache
from weighin.units import MIB, format_bytes

_SPARE_BYTES = 64 * MIB  # for headers, indexes and the rounding to file system blocks


@contextmanager
def target(model_bytes: int) -> Iterator[Path]:
    """Create an empty folder for one save, and remove the folder after the block.

    Raises:
        ConfigError: the disk has no room for the model.
    """
    root = _root()
    root.mkdir(parents=True, exist_ok=True)
    needed, free = model_bytes + _SPARE_BYTES, shutil.disk_usage(root).free
    if free < needed:
        raise ConfigError(
            f"a save needs {format_bytes(needed)} in {root}, but only {format_bytes(free)} are free",
            "put the cache on another disk: WEIGHIN_CACHE=/path weighin ...",
        )
    with staging.own_folder(root) as folder:
        yield folder


def remove_leftovers() -> list[str]:
    """Remove the target folders of killed runs; return one line for each folder."""
    return [f"files of a save in {folder}" for folder in staging.remove_orphans(_root())]


def doubts(folder: Path) -> list[str]:
    """Return a warning if the files of a save stay in the page cache, as on a tmpfs."""
    kept = page_cache.drop(path for path in folder.rglob("*") if path.is_file())
    if not kept:
        return []
    return [
        f"{format_bytes(kept)} of the written files could not be dropped from the page cache: on a"
        " tmpfs, files take up memory; put weighin's cache on a disk: WEIGHIN_CACHE=/path"
    ]


def _root() -> Path:
    return cache.folder() / "saving"
