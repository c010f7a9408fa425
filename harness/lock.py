"""The lock of the one run that measures on this machine: two at once would measure each other."""

from collections.abc import Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from harness.checkpoint import cache
from harness.errors import ConfigError, HarnessError


@contextmanager
def only_run(patience_s: float = 0) -> Iterator[None]:
    """Hold the lock; it goes with the process that holds it. Waits ``patience_s`` for it.

    Raises:
        HarnessError: another run holds it. ConfigError: the cache's folder cannot be written.
    """
    path = cache.folder() / "measuring.lock"
    lock = FileLock(path, timeout=patience_s)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise HarnessError(
            f"another run is measuring on this machine (it holds {path})",
            "wait until it has ended: two runs at once would measure each other",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot write to the cache {cache.folder()}: {error.strerror}",
            "choose another folder: WEIGHIN_CACHE=/path weighin ...",
        ) from None
    try:
        yield
    finally:
        lock.release()
