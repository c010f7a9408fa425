"""Lock files and folders with flock; the kernel releases a lock when the locking process ends."""

import fcntl


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder, and return True; return False if another process holds the lock.

    A descriptor that is open for reading suffices.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
