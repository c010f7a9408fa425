"""A hidden folder beside a file or folder that is being made, until it is whole and renamed.

Each is locked by the process that works in it; the kernel gives the lock back when that process
dies, so that leftovers are told from work. The parent uses this too: no torch.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from glob import escape
from pathlib import Path

from harness.errors import ConfigError


@contextmanager
def growing_beside(target: Path) -> Iterator[Path]:
    """Give a folder beside the target, on the same disk; remove it, and what killed ones left.

    Raises:
        ConfigError: another conversion to the same target is alive.
    """
    remove_dead(target)
    temporary = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
    descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(descriptor)


def remove_dead(target: Path) -> None:
    """Remove what killed conversions to ``target`` left.

    Raises:
        ConfigError: one is alive.
    """
    for leftover in sorted(target.parent.glob(f"{escape(_prefix(target))}*")):
        _remove_if_dead(leftover, target)


def _prefix(target: Path) -> str:
    return f".{target.name[:100]}.weighin-"


def _remove_if_dead(leftover: Path, target: Path) -> None:
    descriptor = os.open(leftover, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(leftover, ignore_errors=True)
    except BlockingIOError:
        raise ConfigError(
            f"another weighin is writing {target}", "wait until it has ended, or name another"
        ) from None
    finally:
        os.close(descriptor)
