"""Unmount a FUSE file system at once, also if its process answers no more."""

import contextlib
import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

_CONNECTIONS: Final = Path("/sys/fs/fuse/connections")
_MNT_FORCE: Final = 1  # linux/fs.h; FUSE then fails every request that waits
_MNT_DETACH: Final = 2
_libc = ctypes.CDLL(None, use_errno=True)


def unmount(mountpoint: Path, device: int | None = None) -> None:
    """Unmount ``mountpoint``, and fail the reads that wait for an answer, so that their processes can end.

    Mounts of the same file system in other mount namespaces stay, and all their reads fail. ``device``
    is the minor number of the mounted file system, for a user who is not root.
    """
    if device is not None:
        with contextlib.suppress(OSError):  # fusectl is not mounted, or the connection has ended
            (_CONNECTIONS / str(device) / "abort").write_text("1")
    path = os.fsencode(mountpoint)
    if _libc.umount2(path, _MNT_FORCE | _MNT_DETACH) == 0:
        return
    if command := shutil.which("fusermount") or shutil.which("fusermount3"):
        subprocess.run([command, "-uz", str(mountpoint)], capture_output=True, check=False)
