"""The folder of the cache, and temporary folders that go even if the process that made them was killed.

Each process locks the temporary folder that it made. The kernel releases the lock when the process
ends, so that a folder without a lock is a leftover, which the next process removes.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path
from typing import Final
from uuid import uuid4

from weighin.errors import ConfigError
from weighin.files import try_lock
from weighin.units import format_bytes

ENVIRONMENTS: Final = "environments"  # with other releases of packages (``weighin.run.releases``)


def folder() -> Path:
    """Return the cache's folder: $WEIGHIN_CACHE, or a folder in the user's cache directory."""
    chosen = os.environ.get("WEIGHIN_CACHE")
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(chosen or f"{caches}/weighin").expanduser().absolute()
    except RuntimeError as error:  # such as a user who is not in /etc/passwd, without HOME
        raise ConfigError(
            f"weighin has no folder for its cache: {str(error).rstrip('.').lower()}",
            "name a folder for it: WEIGHIN_CACHE=/path weighin ...",
        ) from None


def slow_disks() -> Path:
    return folder() / "disks"


@contextmanager
def used(chosen: Path) -> Iterator[None]:
    """Make ``chosen`` the cache's folder within the context, also of processes that start in it."""
    before = os.environ.get("WEIGHIN_CACHE")
    os.environ["WEIGHIN_CACHE"] = str(chosen.expanduser().absolute())
    try:
        yield
    finally:
        del os.environ["WEIGHIN_CACHE"]
        if before is not None:
            os.environ["WEIGHIN_CACHE"] = before


def check_space(folder: Path, what: str, needed_bytes: int, repair: str) -> None:
    """Raise ConfigError ("WHAT needs ..., but only ... are free") if the folder's disk lacks space."""
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        needed, free = format_bytes(needed_bytes), format_bytes(free_bytes)
        raise ConfigError(f"{what} needs {needed}, but only {free} are free in {folder}", repair)


@contextmanager
def own_folder(root: Path, prefix: str = "") -> Iterator[Path]:
    """Remove killed processes' folders in ``root``, yield a new one, and remove it at the end."""
    root.mkdir(parents=True, exist_ok=True)
    remove_orphans(root, prefix)
    descriptor = None
    while descriptor is None:  # until no other process removes the folder before it is locked
        folder = root / f"{prefix}{uuid4().hex}"
        folder.mkdir(mode=0o700)
        descriptor = _lock(folder)
    try:
        yield folder
    finally:
        _remove(folder, descriptor)


def remove_orphans(root: Path, prefix: str = "") -> list[Path]:
    """Remove the folders with this prefix whose processes were killed, and return their paths."""
    removed = []
    for leftover in sorted(root.glob(f"{escape(prefix)}*")):
        with suppress(OSError):  # another user's
            if (descriptor := _lock(leftover)) is not None:
                _remove(leftover, descriptor)
                removed.append(leftover)
    return removed


def _lock(folder: Path) -> int | None:
    """Return the open folder, locked; None if another process has locked or removed it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    if try_lock(descriptor) and _is_at(folder, descriptor):
        return descriptor
    os.close(descriptor)
    return None


def _remove(folder: Path, descriptor: int) -> None:
    try:
        if _is_at(folder, descriptor):  # not if it was renamed, or replaced by another process
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _is_at(folder: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False
