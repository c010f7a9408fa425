"""Write files and rename folders so that a crash leaves the whole old or the whole new content."""

import os
from pathlib import Path


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file under a temporary name, sync the file to the disk, and rename it to ``path``."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def rename(source: Path, target: Path) -> None:
    """Rename a file or folder, whose content is already synced, and sync the new parent folder."""
    if source.is_dir():
        sync_folder(source)
    source.rename(target)
    sync_folder(target.parent)


def sync_folder(folder: Path) -> None:
    """Sync a folder's directory entries, because ``fsync`` of a new file does not sync its entry."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_written(descriptor: int) -> None:
    """Sync a file's written data to the disk and drop its pages from the page cache."""
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
