"""Write files and rename folders so that a crash leaves either the old or the new content whole, and
lock them; the kernel releases a lock when the locking process ends.
"""

import fcntl
import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes, *, is_new: bool = False) -> None:
    """Write a file under a temporary name, sync the file to the disk, and rename it to ``path``.

    Raises:
        FileExistsError: with ``is_new``, ``path`` exists; another process may just have made it.
    """
    # Nobody can guess the name, and so leave a link to another file there.
    temporary = path.with_name(f".{path.name}.{os.urandom(8).hex()}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            path.hardlink_to(temporary)  # unlike a rename, it fails if the path exists
        else:
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder, and sync its new parent; the caller must sync the content first."""
    if source.is_dir():
        sync_folder(source)
    source.rename(target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder's list of files, because ``fsync`` of a new file does not sync this list."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    """Lock a file or folder that is open at least for reading; return False if another process has
    locked it.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True


def drop_written(descriptor: int) -> None:
    """Sync a file's written data to the disk, and drop the file's pages from the page cache."""
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
