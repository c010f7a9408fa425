"""Sets of memory pages that were read or written, stored as sorted intervals or a byte per page."""

import mmap
from bisect import bisect_left, bisect_right
from typing import Final

PAGE_BYTES: Final = mmap.PAGESIZE
_MOST_HEAP_BYTES: Final = 256 * 1024**3


class Extents:
    """A set of whole pages of ``PAGE_BYTES``, stored as sorted intervals of byte addresses."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.nbytes = 0

    def add(self, address: int, length: int) -> int:
        """Add every page that the interval touches; return the size of the new pages in bytes."""
        if length <= 0:
            return 0
        start = address - address % PAGE_BYTES
        end = -(-(address + length) // PAGE_BYTES) * PAGE_BYTES
        first = bisect_left(self._ends, start)  # the first interval that ends at start or later
        last = bisect_right(self._starts, end)  # one past the last that begins at end or before
        present = 0
        if first < last:
            present = sum(
                e - s for s, e in zip(self._starts[first:last], self._ends[first:last], strict=True)
            )
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        new = end - start - present
        self.nbytes += new
        return new


class HeapPages:
    """A set of pages of a heap that begins at address 0, stored as one byte per page."""

    def __init__(self) -> None:
        self._pages = mmap.mmap(
            -1, _MOST_HEAP_BYTES // PAGE_BYTES
        )  # only its touched pages use memory
        self._end = 0
        self.nbytes = 0

    @property
    def end(self) -> int:
        """The address after the last page in the set."""
        return self._end * PAGE_BYTES

    def add(self, address: int, length: int) -> int:
        if length <= 0:
            return 0
        first, last = address // PAGE_BYTES, (address + length - 1) // PAGE_BYTES + 1
        present = self._pages[first:last].count(1)
        self._pages[first:last] = b"\1" * (last - first)
        self._end = max(self._end, last)
        new = (last - first - present) * PAGE_BYTES
        self.nbytes += new
        return new

    def remove(self, address: int, length: int) -> None:
        """Remove every page that lies completely in the interval."""
        first, last = -(-address // PAGE_BYTES), (address + length) // PAGE_BYTES
        if first < last:
            self.nbytes -= self._pages[first:last].count(1) * PAGE_BYTES
            self._pages[first:last] = bytes(last - first)

    def remove_from(self, address: int) -> None:
        """Remove every page from ``address`` to the end."""
        if address < self.end:
            self.remove(address, self.end - address)
            self._end = -(-address // PAGE_BYTES)
