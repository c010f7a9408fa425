"""Present a part of a file as a file of its own, for archives inside other files."""

import io
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


class FileView(io.RawIOBase):
    """The ``length`` bytes from ``base`` on of an open file; reads do not move its position."""

    def __init__(self, descriptor: int, base: int, length: int) -> None:
        self._descriptor, self._base, self._length = descriptor, base, length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        """Return the position within the view."""
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move the position, as in ``io``; a position before the view's start is an error."""
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError(f"negative position {start + offset}")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        """Read into ``buffer``, at most up to the view's end."""
        view = memoryview(buffer).cast("B")[: max(0, self._length - self._at)]
        read = os.preadv(self._descriptor, [view], self._base + self._at) if view else 0
        self._at += read
        return read
