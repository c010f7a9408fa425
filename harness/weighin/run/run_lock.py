"""Let only one run measure on a machine at a time, because two runs distort each other's figures."""

import contextlib
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from weighin.atomic import try_lock
from weighin.errors import ConfigError, HarnessError
from weighin.probes.cgroup import LOCK_VARIABLE

_FOLDERS: Final = (Path("/run/lock"), Path("/tmp"))  # noqa: S108 (never written, links not followed)
_NAME: Final = "weighin-measuring.lock"
_PAUSES_S: Final = (0.05, 1.0)  # the first and the longest: polling disturbs the measuring run


def lock_path() -> Path:
    """Return the lock file's path: one for all users, unless ``LOCK_VARIABLE`` names another one."""
    if named := os.environ.get(LOCK_VARIABLE):
        return Path(named)
    for folder in _FOLDERS:
        with contextlib.suppress(OSError):
            if folder.stat().st_mode & stat.S_IWOTH:  # any user may create the file
                return folder / _NAME
    return Path(tempfile.gettempdir()) / _NAME


@contextmanager
def only_run(
    patience_s: float = 0, waiting: Callable[[str], None] = lambda _: None
) -> Iterator[None]:
    """Wait up to ``patience_s`` seconds for the machine's lock; hold it during the ``with`` block.

    The kernel releases the lock when the process ends. If weighin has to wait, it calls ``waiting``
    with the reason.

    Raises:
        HarnessError: another run still holds the lock after ``patience_s``.
        ConfigError: the lock file cannot be created or opened.
    """
    path = lock_path()
    try:
        file = _open(path)
    except OSError as error:
        raise ConfigError(
            f"cannot open the lock file {path}: {error.strerror}",
            f"see who owns the lock file (ls -l), or name another lock file: {LOCK_VARIABLE}=/path"
            " weighin ...",
        ) from None
    try:
        if not try_lock(file):
            if patience_s > 0:
                waiting(
                    "waiting for another run on this machine to end (it holds the lock file"
                    f" {path})",
                )
            _wait(file, path, time.monotonic() + patience_s)
        yield
    finally:
        os.close(file)


@contextmanager
def only_writer(folder: Path) -> Iterator[None]:
    """Lock a run's plan in the ``with`` block, so that two processes do not run the same cells.

    Raises:
        HarnessError: another process holds the lock.
    """
    try:
        locked = os.open(folder / "plan.json", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:  # nobody can resume a run without a plan
        yield
        return
    try:
        if not try_lock(locked):
            raise HarnessError(
                f"another process runs the plan in {folder}",
                "wait for its end, then resume the run",
                exit_code=4,
            )
        yield
    finally:
        os.close(locked)


def _open(path: Path) -> int:
    """Open the lock file for reading, or create it if it does not exist."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # Linux refuses O_CREAT in a sticky folder
        return os.open(path, flags)
    try:
        file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:  # another process created it first
        return os.open(path, flags)
    os.fchmod(file, 0o644)  # despite the umask, because other users must be able to open the file
    return file


def _wait(file: int, path: Path, deadline: float) -> None:
    """Take the lock when it is free; raise HarnessError at ``deadline`` (``time.monotonic``)."""
    pause_s, longest_s = _PAUSES_S
    while time.monotonic() < deadline:
        time.sleep(pause_s)
        if try_lock(file):
            return
        pause_s = min(2 * pause_s, longest_s)
    raise HarnessError(
        f"another run is measuring on this machine (it holds the lock file {path})",
        "wait for its end: weighin bench --wait; parallel runs would distort each other's figures",
        exit_code=4,
    )
