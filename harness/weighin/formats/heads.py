"""Read the first bytes of a file, by which several formats tell whether the file is theirs.

To open a file, and to read it, are requests for which storage behind a network makes the reader wait.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Final

_HEAD_BYTES: Final = 512
_HEADER_BYTES: Final = 128 * 1024  # most headers of safetensors files, which are read with the head
_starts: Final[ContextVar[dict[Path, bytes] | None]] = ContextVar("starts", default=None)


@contextmanager
def remembering() -> Iterator[None]:
    """Read the head of each file once until the context ends."""
    token = _starts.set({} if _starts.get() is None else _starts.get())
    try:
        yield
    finally:
        _starts.reset(token)


def read_head(path: Path) -> bytes:
    """Return the first bytes of a file; raise OSError if it cannot be read."""
    return read_start(path)[:_HEAD_BYTES]


def read_start(path: Path) -> bytes:
    """Return the head of a file and, if its name ends in .safetensors, 128 KiB of it."""
    starts = _starts.get()
    if starts is not None and path in starts:
        return starts[path]
    with path.open("rb", buffering=0) as file:
        start = file.read(_HEADER_BYTES if path.suffix == ".safetensors" else _HEAD_BYTES) or b""
    if starts is not None:
        starts[path] = start
    return start
