"""Read the first bytes of a file, by which each format recognises its files.

Every format looks at a file's first bytes, and several parts of a command read the same checkpoint.
``remembering`` keeps what was read, so that each file is opened a single time: storage behind a
network answers each open and each read only after some milliseconds.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Final, TypeVar

_HEAD_BYTES: Final = 512
_HEADER_BYTES: Final = 128 * 1024  # as long as most headers of safetensors files
_known: Final[ContextVar[dict[Hashable, Any] | None]] = ContextVar("known", default=None)

Kept = TypeVar("Kept")


@contextmanager
def remembering() -> Iterator[None]:
    """Keep what ``once`` returns until the context ends; the files must not change until then."""
    token = _known.set({} if _known.get() is None else _known.get())
    try:
        yield
    finally:
        _known.reset(token)


def once(key: Hashable, read: Callable[[], Kept]) -> Kept:
    """Return the result of ``read``, or within ``remembering`` an earlier result for this key."""
    known = _known.get()
    if known is None:
        return read()
    if key not in known:
        known[key] = read()
    kept: Kept = known[key]
    return kept


def read_head(path: Path) -> bytes:
    """Return the first 512 bytes of a file; raise OSError if the file cannot be read."""
    return read_start(path)[:_HEAD_BYTES]


def read_start(path: Path) -> bytes:
    """Return the first 512 bytes of a file; of a file NAME.safetensors, the first 128 KiB."""

    def read() -> bytes:
        with path.open("rb", buffering=0) as file:
            size = _HEADER_BYTES if path.suffix == ".safetensors" else _HEAD_BYTES
            return file.read(size) or b""

    return once(path, read)
