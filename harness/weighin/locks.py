"""Lock files and folders; the kernel releases a lock when its process ends."""

import fcntl


def try_lock(descriptor: int) -> bool:
    """Lock an open file or folder for this process alone, and return whether that worked.

    Read permission is enough. Another process that holds the lock keeps it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
