"""The folder of the cache, and temporary folders that go even if the process that made them was killed.

Each process locks the temporary folder that it made. The kernel releases the lock when the process
ends, so that a folder without a lock is a leftover. ``growing_beside`` makes a hidden folder next
to a target: a conversion writes the target there, and then renames it. ``own_folder`` makes a new
folder at each call.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from hashlib import sha256
from pathlib import Path
from typing import Final
from uuid import uuid4

from weighin.errors import ConfigError
from weighin.files import try_lock
from weighin.units import format_bytes

_LONGEST_NAME: Final = 100  # characters of the target's name; file systems allow 255 bytes


def folder() -> Path:
    """Return the cache's folder: $WEIGHIN_CACHE, or a folder in the user's cache directory."""
    chosen = os.environ.get("WEIGHIN_CACHE")
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(chosen or f"{caches}/weighin").expanduser().absolute()
    except RuntimeError as error:  # such as a user who is not in /etc/passwd, without HOME
        raise ConfigError(
            f"there is no folder for weighin's cache: {str(error).rstrip('.').lower()}",
            "name a folder: WEIGHIN_CACHE=/path weighin ...",
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
def growing_beside(target: Path) -> Iterator[Path]:
    """Yield an empty folder next to the target, on the same disk; remove the folder at the end."""
    remove_dead(target)
    with _held(target.with_name(f"{_prefix(target)}new"), target) as temporary:
        yield temporary


@contextmanager
def own_folder(root: Path, prefix: str = "") -> Iterator[Path]:
    """Yield a new folder in ``root``, and remove it at the end; before that, those of killed processes."""
    root.mkdir(parents=True, exist_ok=True)
    remove_orphans(root, prefix)
    folder = root / f"{prefix}{uuid4().hex}"
    with _held(folder, folder):
        yield folder


def remove_orphans(root: Path, prefix: str = "") -> list[Path]:
    """Remove the folders with this prefix whose processes were killed, and return their paths."""
    removed = []
    for leftover in sorted(root.glob(f"{prefix}*")):
        # Its process runs, or another user owns the folder.
        with suppress(ConfigError, OSError):
            _remove(leftover, _lock(leftover, leftover))
            removed.append(leftover)
    return removed


def remove_dead(target: Path) -> None:
    """Remove the folders of killed conversions to ``target``; ConfigError if one is running."""
    for leftover in sorted(target.parent.glob(f"{escape(_prefix(target))}*")):
        with suppress(FileNotFoundError):  # the folder's process removed it just now
            _remove(leftover, _lock(leftover, target))


def _prefix(target: Path) -> str:
    name = target.name
    if len(name) > _LONGEST_NAME:
        name = f"{name[:_LONGEST_NAME]}-{sha256(os.fsencode(name)).hexdigest()[:16]}"
    return f".{name}.weighin-"


@contextmanager
def _held(folder: Path, target: Path) -> Iterator[Path]:
    """Create a folder or empty an unlocked one; yield it locked, and remove it at the end."""
    descriptor = None
    while descriptor is None:  # until no other process removes the folder before the lock
        with suppress(FileExistsError):  # in a race, exist_ok=True does not prevent this error
            folder.mkdir(mode=0o700)
        with suppress(FileNotFoundError):
            descriptor = _lock(folder, target)
            if not _is_at(folder, descriptor):
                os.close(descriptor)
                descriptor = None
    try:
        for left in folder.iterdir():
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        yield folder
    finally:
        _remove(folder, descriptor)


def _lock(folder: Path, target: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if not try_lock(descriptor):
        os.close(descriptor)
        raise ConfigError(
            f"another weighin process is writing {target}",
            "wait for that process to end, or name another target",
        )
    return descriptor


def _remove(folder: Path, descriptor: int) -> None:
    try:
        if _is_at(folder, descriptor):  # not if it was renamed, or replaced by another process
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _is_at(folder: Path, descriptor: int) -> bool:
    """Tell whether the open folder is still at its path; another process may have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False
