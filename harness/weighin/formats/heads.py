"""Read the first bytes of a file, by which several formats tell whether the file is theirs."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Final

_HEAD_BYTES: Final = 512
_heads: Final[ContextVar[dict[Path, bytes] | None]] = ContextVar("heads", default=None)


@contextmanager
def remembering() -> Iterator[None]:
    """Read the head of each file once until the context ends.

    To open a file again is a request, for which storage behind a network makes the reader wait.
    """
    token = _heads.set({} if _heads.get() is None else _heads.get())
    try:
        yield
    finally:
        _heads.reset(token)


def read_head(path: Path) -> bytes:
    """Return the first bytes of a file; raise OSError if it cannot be read."""
    heads = _heads.get()
    if heads is not None and path in heads:
        return heads[path]
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if heads is not None:
        heads[path] = head
    return head
