"""Read files and JSON of others within bounds; write files so that a crash leaves the old or the new content."""

import errno
import fcntl
import json
import os
import stat
from typing import TYPE_CHECKING, Any, Final, NoReturn

if TYPE_CHECKING:  # pathlib takes 1 MiB in a worker
    from pathlib import Path

MIB: Final = 1024**2
_MOST_DEPTH: Final = 100
_DEEP: Final = f"nested deeper than {_MOST_DEPTH} levels, or contains itself"


def read_bytes(path: "Path", most_bytes: int = 16 * MIB, *, within: "Path | None" = None) -> bytes:
    """Return a regular file's content. OSError: it is unreadable, longer, or reached by a link below ``within``."""
    if within:
        no_link(path, within)
    # Without O_NONBLOCK, a FIFO would block.
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"longer than {most_bytes // MIB} MiB", str(path))
    return content


def no_link(path: "Path", folder: "Path") -> None:
    """Raise OSError if ``path``, or a folder between it and ``folder``, is a symbolic link."""
    for each in (path, *path.parents):
        if each == folder:
            return
        if each.is_symlink():
            raise OSError(
                errno.ELOOP, "a symbolic link, which weighin does not follow here", str(each)
            )


def parse_json(text: bytes | str, *, finite: bool = True) -> Any:
    """Return the value of a JSON text; raise ValueError if it is none, too deep, too large or not ``finite``."""
    try:
        return bounded(json.loads(text, parse_constant=_refuse if finite else None))
    except RecursionError:
        raise ValueError(_DEEP) from None


def json_in(path: "Path", most_bytes: int = 16 * MIB) -> Any:
    """Return a file's JSON value, also with NaN and infinities; None if no JSON can be read."""
    try:
        return parse_json(read_bytes(path, most_bytes), finite=False)
    except (OSError, ValueError):
        return None


def object_in(path: "Path", most_bytes: int = 16 * MIB) -> dict[str, Any]:
    content = json_in(path, most_bytes)
    return content if isinstance(content, dict) else {}


def bounded(value: Any) -> Any:
    """Return ``value``, a tree of dicts and lists; raise ValueError if it is too deep or too large."""
    level: list[Any] = [[value]]
    seen = 0
    for _ in range(_MOST_DEPTH + 1):
        inside = (each.values() if isinstance(each, dict) else each for each in level)
        level = [one for items in inside for one in items if isinstance(one, dict | list)]
        seen += len(level)
        if not level:
            return value
        if seen > 5_000_000:
            break
    raise ValueError(_DEEP)


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def write_text(path: "Path", text: str) -> None:
    write_bytes(path, text.encode())


def write_bytes(path: "Path", content: bytes, *, is_new: bool = False) -> None:
    """With ``is_new``, raise FileExistsError if ``path`` exists, which another process may just have made."""
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
    sync(path.parent)


def rename(source: "Path", target: "Path") -> None:
    """Rename a file or folder, and sync its new parent; the caller must sync the content first."""
    if source.is_dir():
        sync(source)
    source.rename(target)
    sync(target.parent)


def sync(path: "Path") -> None:
    """Sync a file, or a folder's list of files, because ``fsync`` of a new file does not sync this list."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    return True
