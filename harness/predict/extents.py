"""Sets of pages, kept as stretches: which part of some memory has been touched."""

import mmap
from bisect import bisect_left, bisect_right
from pathlib import Path
from typing import Final

PAGE_BYTES: Final = 4096
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
    """A set of pages of this process's heap; keeps no object in that heap, which would pin its top."""

    def __init__(self, start: int | None = None) -> None:
        self._start = _heap_start() if start is None else start
        self._pages = mmap.mmap(-1, _MOST_HEAP_BYTES // PAGE_BYTES)  # a byte a page, when touched
        self._end = 0
        self.nbytes = 0

    def add(self, address: int, length: int) -> None:
        """Add every page that the stretch touches."""
        if length <= 0:
            return
        first = (address - self._start) // PAGE_BYTES
        last = (address + length - 1 - self._start) // PAGE_BYTES + 1
        held = self._pages[first:last].count(1)
        self._pages[first:last] = b"\1" * (last - first)
        self._end = max(self._end, last)
        self.nbytes += (last - first - held) * PAGE_BYTES

    def remove_from(self, address: int) -> None:
        """Remove every page at ``address`` and behind it."""
        first = max(0, -(-(address - self._start) // PAGE_BYTES))
        if first < self._end:
            self.nbytes -= self._pages[first : self._end].count(1) * PAGE_BYTES
            self._pages[first : self._end] = bytes(self._end - first)
            self._end = first


def _heap_start() -> int:
    """Return the address at which the C library's heap of this process begins."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            return int(line.partition("-")[0], 16)
    raise RuntimeError("this process has no heap")
