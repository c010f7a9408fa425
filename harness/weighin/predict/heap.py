"""A model of glibc's malloc for large blocks: the blocks in the heap, and the heap's resident pages.

The model of the heap follows malloc/malloc.c of glibc 2.36 with its default settings. The model
leaves out small blocks, because their positions differ between processes. Instead, a ``Heap``
models one of three cases:

* usual: when a large block between two used blocks is freed, small blocks take part of the hole, which is then too small for another block of the large one's size;
* ``reuses``: small blocks lie elsewhere, and a hole can hold another block of the same size;
* ``pinned``: a small block lies above all large blocks, so that the kernel gets no freed page back.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from weighin.predict.extents import PAGE_BYTES, HeapPages
from weighin.units import KIB, MIB

_FIRST_THRESHOLD_BYTES: Final = 128 * KIB  # DEFAULT_MMAP_THRESHOLD, and DEFAULT_TRIM_THRESHOLD
_LAST_THRESHOLD_BYTES: Final = 32 * MIB  # DEFAULT_MMAP_THRESHOLD_MAX
_HEAD_BYTES: Final = 16  # malloc's header before each block
_ALIGNING_BYTES: Final = 64 + 32  # posix_memalign adds this for torch's 64-byte alignment
_BEST_FIT: Final = attrgetter("size", "address")
_TOP_PAD_BYTES: Final = 128 * KIB  # DEFAULT_TOP_PAD: the size that trimming leaves at the top


@dataclass(slots=True, eq=False)
class Chunk:
    """A part of the heap, with links to its neighbours; or, if not ``in_heap``, a separate mapping."""

    address: int
    size: int
    in_heap: bool
    free: bool = False
    before: "Chunk | None" = None
    after: "Chunk | None" = None


class Heap:
    """The heap of one process; ``pages`` are its written pages, at simulated addresses.

    Args:
        reuses: whether a hole can hold another block of the same size.
        pinned: whether a small block lies at the top, so that free chunks below it stay holes.
    """

    def __init__(self, *, reuses: bool = False, pinned: bool = False) -> None:
        self.pages = HeapPages()
        self._pinned = pinned
        self._added_bytes = _ALIGNING_BYTES if reuses else _HEAD_BYTES
        self._threshold = _FIRST_THRESHOLD_BYTES
        self._trim_threshold = _FIRST_THRESHOLD_BYTES
        self._top = 0
        self._last: Chunk | None = None  # the chunk just below the top
        self._holes: list[Chunk] = []

    def malloc(self, nbytes: int) -> Chunk:
        wanted = nbytes + _ALIGNING_BYTES
        if wanted >= self._threshold:
            return Chunk(0, nbytes, in_heap=False)
        at = bisect_left(self._holes, (wanted, -1), key=_BEST_FIT)
        if at < len(self._holes):
            return self._from_hole(self._holes.pop(at), nbytes + self._added_bytes)
        chunk = Chunk(self._top, nbytes + self._added_bytes, in_heap=True, before=self._last)
        if self._last:
            self._last.after = chunk
        self._last = chunk
        self._top += chunk.size
        return chunk

    def free(self, chunk: Chunk) -> None:
        """Free a chunk; release the free top of the heap if it then exceeds glibc's threshold."""
        if not chunk.in_heap:
            if self._threshold < chunk.size <= _LAST_THRESHOLD_BYTES:
                self._threshold, self._trim_threshold = chunk.size + PAGE_BYTES, 2 * chunk.size
            return
        chunk.free = True
        for other in (chunk.before, chunk.after):
            if other and other.free:
                self._holes.pop(bisect_left(self._holes, _BEST_FIT(other), key=_BEST_FIT))
        first = chunk.before if chunk.before and chunk.before.free else chunk
        last = chunk.after if chunk.after and chunk.after.free else chunk
        first.size = last.address + last.size - first.address
        first.after = last.after
        if first.after:
            first.after.before = first
        elif self._pinned:
            self._last = first
        else:
            self._lower_top(first)
            return
        insort(self._holes, first, key=_BEST_FIT)

    def trim(self) -> None:
        """Release every page that no chunk in use covers, as ``malloc_trim`` does."""
        for hole in self._holes:
            self.pages.remove(hole.address, hole.size)
        self.pages.remove_from(self._top)

    def _from_hole(self, hole: Chunk, size: int) -> Chunk:
        rest = Chunk(hole.address + size, hole.size - size, True, True, hole, hole.after)
        if hole.after:
            hole.after.before = rest
        else:
            self._last = rest
        hole.after, hole.size, hole.free = rest, size, False
        insort(self._holes, rest, key=_BEST_FIT)
        return hole

    def _lower_top(self, chunk: Chunk) -> None:
        """Join the free last chunk to the top; release the top if it exceeds glibc's threshold."""
        self._last = chunk.before
        if self._last:
            self._last.after = None
        self._top = chunk.address
        if self.pages.end - self._top >= self._trim_threshold:
            self.pages.remove_from(self._top + _TOP_PAD_BYTES)
