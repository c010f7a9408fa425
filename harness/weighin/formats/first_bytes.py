"""Read the first bytes of a file, by which each format recognises its files.

Every format looks at a file's first bytes. ``remembering`` keeps these bytes, so that they are read
only a single time: storage behind a network answers each open and each read only after some
milliseconds.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Final

_HEAD_BYTES: Final = 512
_HEADER_BYTES: Final = 128 * 1024  # as long as most headers of safetensors files
_starts: Final[ContextVar[dict[Path, bytes] | None]] = ContextVar("starts", default=None)


@contextmanager
def remembering() -> Iterator[None]:
    """Read the first bytes of each file only once until the context ends."""
    token = _starts.set({} if _starts.get() is None else _starts.get())
    try:
        yield
    finally:
        _starts.reset(token)


def read_head(path: Path) -> bytes:
    """Return the first 512 bytes of a file; raise OSError if the file cannot be read."""
    return read_start(path)[:_HEAD_BYTES]


def read_start(path: Path) -> bytes:
    """Return the first 512 bytes of a file; of a file NAME.safetensors, the first 128 KiB."""
    starts = _starts.get()
    if starts is not None and path in starts:
        return starts[path]
    with path.open("rb", buffering=0) as file:
        start = file.read(_HEADER_BYTES if path.suffix == ".safetensors" else _HEAD_BYTES) or b""
    if starts is not None:
        starts[path] = start
    return start
