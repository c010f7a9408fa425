"""A hidden folder beside a file or folder that is being made, until it is whole and renamed.

There is one for each target, locked by the process that works in it; the kernel gives the lock back
when that process dies, so that leftovers are told from work. The parent uses this too: no torch.
"""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from glob import escape
from hashlib import sha256
from pathlib import Path
from typing import Final

from weighin.errors import ConfigError

_LONGEST_NAME: Final = 100  # of a target, in the name of its folder: file systems take 255 bytes


@contextmanager
def growing_beside(target: Path) -> Iterator[Path]:
    """Give an empty folder beside the target, on the same disk; it is removed at the end.

    Raises:
        ConfigError: another conversion to the same target is alive.
    """
    remove_dead(target)
    temporary = target.with_name(f"{_prefix(target)}new")
    descriptor = _locked(temporary, target)
    try:
        yield temporary
    finally:
        if _is_at(temporary, descriptor):  # else it was renamed, and this may be another's
            shutil.rmtree(temporary, ignore_errors=True)  # before the lock goes
        os.close(descriptor)


def remove_dead(target: Path) -> None:
    """Remove what killed conversions to ``target`` left.

    Raises:
        ConfigError: one is alive.
    """
    for leftover in sorted(target.parent.glob(f"{escape(_prefix(target))}*")):
        with suppress(FileNotFoundError):  # its owner has just removed it
            _remove_if_dead(leftover, target)


def _prefix(target: Path) -> str:
    name = target.name
    if len(name) > _LONGEST_NAME:
        name = f"{name[:_LONGEST_NAME]}-{sha256(os.fsencode(name)).hexdigest()[:16]}"
    return f".{name}.weighin-"


def _locked(folder: Path, target: Path) -> int:
    """Make a folder, or take one that is nobody's, and lock it; return its open descriptor."""
    while True:
        with suppress(FileExistsError):  # exist_ok would raise it where the folder has just gone
            folder.mkdir(mode=0o700)
        try:
            descriptor = _lock(folder, target)
        except FileNotFoundError:  # removed by its owner since
            continue
        if _is_at(folder, descriptor):
            for left in folder.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            return descriptor
        os.close(descriptor)  # locked, but removed before: another has, or will make, a new one


def _lock(folder: Path, target: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ConfigError(
            f"another weighin is writing {target}", "wait until it has ended, or name another"
        ) from None
    return descriptor


def _remove_if_dead(leftover: Path, target: Path) -> None:
    descriptor = _lock(leftover, target)
    try:
        if _is_at(leftover, descriptor):  # else its owner removed it, and this is another's
            shutil.rmtree(leftover, ignore_errors=True)
    finally:
        os.close(descriptor)


def _is_at(folder: Path, descriptor: int) -> bool:
    """Tell whether an open folder is the one of that name: a lock may be of one that is gone."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False
