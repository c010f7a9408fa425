"""Provide folders that no killed process leaves for good: locked by the process that writes to them.

``growing_beside`` gives a hidden folder next to a target, in which the target is written before it is
renamed; there is one such folder for each target. ``own_folder`` gives a new one. The kernel releases the lock
when that process ends, so that a folder without a lock is a leftover. This module does not import
torch, because the parent process uses it too.
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
from weighin.locks import try_lock

_LONGEST_NAME: Final = 100  # of the target in the folder's name; file systems allow 255 bytes


@contextmanager
def growing_beside(target: Path) -> Iterator[Path]:
    """Yield an empty folder next to the target, on the same disk; remove the folder at the end.

    If several conversions to one target run at once, all except one raise ConfigError.

    Raises:
        ConfigError: another process is writing the same target.
    """
    remove_dead(target)
    with _held(target.with_name(f"{_prefix(target)}new"), target) as temporary:
        yield temporary


@contextmanager
def own_folder(root: Path, prefix: str = "") -> Iterator[Path]:
    """Yield a new folder in ``root``, and remove it at the end.

    Folders with the same prefix whose processes were killed are removed first.
    """
    root.mkdir(parents=True, exist_ok=True)
    remove_orphans(root, prefix)
    folder = root / f"{prefix}{uuid4().hex}"
    with _held(folder, folder):
        yield folder


def remove_orphans(root: Path, prefix: str = "") -> list[Path]:
    """Remove the folders of ``own_folder`` whose processes were killed, and return their paths."""
    removed = []
    for leftover in sorted(root.glob(f"{prefix}*")):
        with suppress(ConfigError, OSError):  # its process runs, or it belongs to another user
            _remove(leftover, _lock(leftover, leftover))
            removed.append(leftover)
    return removed


def remove_dead(target: Path) -> None:
    """Remove the folders of killed conversions to ``target``.

    Raises:
        ConfigError: a conversion to ``target`` is running.
    """
    for leftover in sorted(target.parent.glob(f"{escape(_prefix(target))}*")):
        with suppress(FileNotFoundError):  # its owner removed the folder just now
            _remove(leftover, _lock(leftover, target))


def _prefix(target: Path) -> str:
    name = target.name
    if len(name) > _LONGEST_NAME:
        name = f"{name[:_LONGEST_NAME]}-{sha256(os.fsencode(name)).hexdigest()[:16]}"
    return f".{name}.weighin-"


@contextmanager
def _held(folder: Path, target: Path) -> Iterator[Path]:
    descriptor = _locked(folder, target)
    try:
        yield folder
    finally:
        _remove(folder, descriptor)


def _locked(folder: Path, target: Path) -> int:
    """Create a folder, or reuse one without an owner, and lock it; return its open descriptor."""
    while True:
        with suppress(FileExistsError):  # exist_ok=True raises it too in a race
            folder.mkdir(mode=0o700)
        try:
            descriptor = _lock(folder, target)
        except FileNotFoundError:  # its owner removed the folder meanwhile
            continue
        if _is_at(folder, descriptor):
            for left in folder.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            return descriptor
        os.close(descriptor)  # the locked folder was removed before: try again with a new folder


def _lock(folder: Path, target: Path) -> int:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    if not try_lock(descriptor):
        os.close(descriptor)
        raise ConfigError(
            f"another weighin process is writing {target}",
            "wait until it has ended, or name another target",
        )
    return descriptor


def _remove(folder: Path, descriptor: int) -> None:
    """Remove a folder that is locked by its open descriptor, and release the lock."""
    try:
        if _is_at(folder, descriptor):  # else it was renamed, or another process owns a new folder
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(descriptor)


def _is_at(folder: Path, descriptor: int) -> bool:
    """Tell whether the open folder is still at this path, since its owner may have removed it."""
    try:
        return os.path.samestat(os.fstat(descriptor), folder.stat())
    except FileNotFoundError:
        return False
