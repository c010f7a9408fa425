"""Sets of pages, kept as stretches: which part of some memory has been touched."""

import mmap
from bisect import bisect_left, bisect_right
from typing import Final

PAGE_BYTES: Final = mmap.PAGESIZE
_MOST_HEAP_BYTES: Final = 256 * 1024**3


class Extents:
    """A set of whole pages of ``PAGE_BYTES``, given by addresses in bytes."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.nbytes = 0

    def add(self, address: int, length: int) -> int:
        """Add every page that the stretch touches; return the bytes of the new ones."""
        if length <= 0:
            return 0
        start = address - address % PAGE_BYTES
        end = -(-(address + length) // PAGE_BYTES) * PAGE_BYTES
        first = bisect_left(self._ends, start)  # the first stretch that ends at start or later
        last = bisect_right(self._starts, end)  # behind the last one that begins at end or before
        held = 0
        if first < last:
            held = sum(
                e - s for s, e in zip(self._starts[first:last], self._ends[first:last], strict=True)
            )
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        new = end - start - held
        self.nbytes += new
        return new


class HeapPages:
    """A set of pages of a heap that begins at address 0, a byte a page."""

    def __init__(self) -> None:
        self._pages = mmap.mmap(-1, _MOST_HEAP_BYTES // PAGE_BYTES)  # real only where touched
        self._end = 0
        self.nbytes = 0

    @property
    def end(self) -> int:
        """The address behind the last page that was added and not removed."""
        return self._end * PAGE_BYTES

    def add(self, address: int, length: int) -> int:
        """Add every page that the stretch touches; return the bytes of the new ones."""
        if length <= 0:
            return 0
        first, last = address // PAGE_BYTES, (address + length - 1) // PAGE_BYTES + 1
        held = self._pages[first:last].count(1)
        self._pages[first:last] = b"\1" * (last - first)
        self._end = max(self._end, last)
        new = (last - first - held) * PAGE_BYTES
        self.nbytes += new
        return new

    def remove(self, address: int, length: int) -> None:
        """Remove every page that lies in the stretch as a whole."""
        first, last = -(-address // PAGE_BYTES), (address + length) // PAGE_BYTES
        if first < last:
            self.nbytes -= self._pages[first:last].count(1) * PAGE_BYTES
            self._pages[first:last] = bytes(last - first)

    def remove_from(self, address: int) -> None:
        """Remove every page at ``address`` and behind it."""
        if address < self.end:
            self.remove(address, self.end - address)
            self._end = -(-address // PAGE_BYTES)
