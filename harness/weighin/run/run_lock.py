"""The lock of the one run that measures on this machine: two at once would measure each other.

One file for all users and all caches. It is locked by whoever can read it, and never written.
"""

import contextlib
import errno
import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from weighin.errors import ConfigError, MachineBusy

VARIABLE: Final = "WEIGHIN_LOCK"
"""Names another file, where this one cannot be used, or where runs are known to share nothing."""
_FOLDERS: Final = (Path("/run/lock"), Path("/tmp"))  # noqa: S108 (never written, links not followed)
_NAME: Final = "weighin-measuring.lock"
_PAUSES_S: Final = (0.05, 1.0)  # the first, and the longest: a waiting run must not be measured


def lock_path() -> Path:
    """Return the file that is locked: the same for every user of this machine."""
    if named := os.environ.get(VARIABLE):
        return Path(named)
    for folder in _FOLDERS:
        with contextlib.suppress(OSError):
            if folder.stat().st_mode & stat.S_IWOTH:  # else another user could not make it there
                return folder / _NAME
    return Path(tempfile.gettempdir()) / _NAME


@contextmanager
def only_run(
    patience_s: float = 0, waiting: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Hold the lock; it goes with the process that holds it. Waits ``patience_s`` for it.

    ``waiting`` is called once, with the reason, where it has to wait.

    Raises:
        MachineBusy: another run holds it. ConfigError: the file cannot be made or opened.
    """
    path = lock_path()
    try:
        file = _open(path)
    except OSError as error:
        raise ConfigError(
            f"cannot open the lock of this machine's one run, {path}: {error.strerror}",
            f"see whose it is (ls -l), or name another file: {VARIABLE}=/path weighin ...",
        ) from None
    try:
        if not _try_lock(file):
            if patience_s > 0:
                waiting(f"waiting for another run on this machine to end (it holds {path})")
            _wait(file, path, time.monotonic() + patience_s)
        yield
    finally:
        os.close(file)


def _open(path: Path) -> int:
    """Open the file for reading, which is enough to lock it; make it where there is none."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    # Not made by the same call: in sticky folders, Linux refuses that for a file of another user.
    try:
        return os.open(path, flags)
    except FileNotFoundError:
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:  # somebody was faster
        return os.open(path, flags)
    os.fchmod(file, 0o644)  # whatever the umask says: others must be able to lock it
    return file


def _wait(file: int, path: Path, deadline: float) -> None:
    """Take the lock once it is free; raise MachineBusy at the deadline (``time.monotonic``)."""
    pause_s, longest_s = _PAUSES_S
    while time.monotonic() < deadline:
        time.sleep(pause_s)
        if _try_lock(file):
            return
        pause_s = min(2 * pause_s, longest_s)
    raise MachineBusy(
        f"another run is measuring on this machine (it holds {path})",
        "two runs at once would distort each other's figures: weighin bench --wait starts after its end",
    )


def _try_lock(file: int) -> bool:
    """Take the lock if it is free; tell whether this process has it now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise
        return False
    return True
