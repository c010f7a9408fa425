"""Models of glibc's malloc and of PyTorch's CUDA caching allocator, and sets of memory pages.

``Heap`` follows malloc/malloc.c of glibc 2.36 with its default settings. It leaves out small blocks,
because their positions differ between processes. Instead, a ``Heap`` models one of three cases:

* usual: when a large block between two used blocks is freed, small blocks take part of the hole, which
  is then too small for another block of the large one's size;
* ``reuses``: small blocks lie elsewhere, and a hole can hold another block of the same size;
* ``pinned``: a small block lies above all large blocks, so that the kernel gets no freed page back.

``CachingAllocator`` follows c10/cuda/CUDACachingAllocator.cpp of torch 2.13 with its default settings:
one stream, no expandable segments, no ``max_split_size_mb``, no rounding to powers of two.
"""

import mmap
from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from weighin.units import KIB, MIB

PAGE_BYTES: Final = mmap.PAGESIZE
_FIRST_THRESHOLD_BYTES: Final = 128 * KIB  # DEFAULT_MMAP_THRESHOLD, and DEFAULT_TRIM_THRESHOLD
_LAST_THRESHOLD_BYTES: Final = 32 * MIB  # DEFAULT_MMAP_THRESHOLD_MAX
_HEAD_BYTES: Final = 16  # malloc's header before each block
_ALIGNING_BYTES: Final = 64 + 32  # posix_memalign adds this for torch's 64-byte alignment
_BEST_FIT: Final = attrgetter("size", "address")  # the smallest size, then the lowest address
_TOP_PAD_BYTES: Final = 128 * KIB  # DEFAULT_TOP_PAD: the size that trimming leaves at the top

_MIN_BLOCK_BYTES: Final = 512  # kMinBlockSize: sizes are rounded up to a multiple of it
_SMALL_BYTES: Final = MIB  # kSmallSize: the largest request of the small pool
_SMALL_SEGMENT_BYTES: Final = 2 * MIB  # kSmallBuffer
_MIN_LARGE_BYTES: Final = 10 * MIB  # kMinLargeAlloc: the smallest request with its own segment
_LARGE_SEGMENT_BYTES: Final = 20 * MIB  # kLargeBuffer: the segment of requests from 1 to 10 MiB
_ROUND_LARGE_BYTES: Final = 2 * MIB  # kRoundLarge

_KINDS: Final = ("requested", "allocated", "reserved")


class Extents:
    """A set of whole pages of ``PAGE_BYTES``, stored as sorted intervals of byte addresses."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self.nbytes = 0

    @property
    def end(self) -> int:
        """The address after the last page in the set."""
        return self._ends[-1] if self._ends else 0

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
            inside = zip(self._starts[first:last], self._ends[first:last], strict=True)
            present = sum(e - s for s, e in inside)
            start, end = min(start, self._starts[first]), max(end, self._ends[last - 1])
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
        new = end - start - present
        self.nbytes += new
        return new

    def remove(self, address: int, end: int) -> None:
        """Remove every page that lies completely between the addresses."""
        start, end = -(-address // PAGE_BYTES) * PAGE_BYTES, end - end % PAGE_BYTES
        first = bisect_right(self._ends, start)  # the first interval that ends after start
        last = bisect_left(self._starts, end)  # one past the last that begins before end
        if start >= end or first >= last:
            return
        parts = [(self._starts[first], start), (end, self._ends[last - 1])]
        kept = [(s, e) for s, e in parts if s < e]
        removed = zip(self._starts[first:last], self._ends[first:last], strict=True)
        self.nbytes += sum(e - s for s, e in kept) - sum(e - s for s, e in removed)
        self._starts[first:last] = [s for s, _ in kept]
        self._ends[first:last] = [e for _, e in kept]


@dataclass(slots=True, eq=False)
class Block:
    """A part of a heap, of a mapping (not ``in_heap``), or of a GPU segment, with its neighbours."""

    address: int
    size: int
    free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None
    in_heap: bool = True
    small: bool = False
    requested: int = 0


def _taken(pool: list[Block], size: int) -> Block | None:
    at = bisect_left(pool, (size, -1), key=_BEST_FIT)
    return pool.pop(at) if at < len(pool) else None


def _divide(pool: list[Block], block: Block, size: int) -> Block:
    """Cut a block to ``size``, and return the free rest, which is now in the pool."""
    rest = Block(block.address + size, block.size - size, True, block, block.after)
    rest.small = block.small
    if block.after:
        block.after.before = rest
    block.after, block.size = rest, size
    insort(pool, rest, key=_BEST_FIT)
    return rest


def _joined(pool: list[Block], block: Block) -> Block:
    """Free a block and join it with its free neighbours, which leave the pool; return all as one."""
    block.free = True
    first = block.before if block.before and block.before.free else block
    last = block.after if block.after and block.after.free else block
    for other in (first, last):
        if other is not block:
            pool.pop(bisect_left(pool, _BEST_FIT(other), key=_BEST_FIT))
    first.size = last.address + last.size - first.address
    first.after = last.after
    if first.after:
        first.after.before = first
    return first


class Heap:
    """The heap of one process; ``pages`` are its written pages, at simulated addresses."""

    def __init__(self, *, reuses: bool = False, pinned: bool = False) -> None:
        self.pages = Extents()
        self._pinned = pinned
        self._added_bytes = _ALIGNING_BYTES if reuses else _HEAD_BYTES
        self._threshold = _FIRST_THRESHOLD_BYTES
        self._trim_threshold = _FIRST_THRESHOLD_BYTES
        self._top = 0
        self._last: Block | None = None  # the chunk just below the top
        self._holes: list[Block] = []

    def malloc(self, nbytes: int) -> Block:
        wanted = nbytes + _ALIGNING_BYTES
        if wanted >= self._threshold:
            return Block(0, nbytes, in_heap=False)
        if hole := _taken(self._holes, wanted):
            rest = _divide(self._holes, hole, nbytes + self._added_bytes)
            if not rest.after:
                self._last = rest
            hole.free = False
            return hole
        block = Block(self._top, nbytes + self._added_bytes, before=self._last)
        if self._last:
            self._last.after = block
        self._last = block
        self._top += block.size
        return block

    def free(self, block: Block) -> None:
        """Free a block; release the free top of the heap if it then exceeds glibc's threshold."""
        if not block.in_heap:
            if self._threshold < block.size <= _LAST_THRESHOLD_BYTES:
                self._threshold, self._trim_threshold = block.size + PAGE_BYTES, 2 * block.size
            return
        block = _joined(self._holes, block)
        if block.after or self._pinned:
            if not block.after:
                self._last = block
            insort(self._holes, block, key=_BEST_FIT)
            return
        self._last = block.before  # the last block becomes a part of the top
        if self._last:
            self._last.after = None
        self._top = block.address
        if self.pages.end - self._top >= self._trim_threshold:
            self.pages.remove(self._top + _TOP_PAD_BYTES, self.pages.end)

    def trim(self) -> None:
        """Release every page that no chunk in use covers, as ``malloc_trim`` does."""
        for hole in self._holes:
            self.pages.remove(hole.address, hole.address + hole.size)
        self.pages.remove(self._top, self.pages.end)


class CudaOutOfMemory(Exception):
    """A request exceeds the GPU memory limit, even after the allocator has emptied its cache."""


class CachingAllocator:
    """Blocks and segments of one device, with their current sums and peaks in bytes."""

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes  # of the reserved bytes: set_per_process_memory_fraction
        self.current = dict.fromkeys(_KINDS, 0)
        self.peak = dict.fromkeys(_KINDS, 0)
        self._free: dict[bool, list[Block]] = {True: [], False: []}
        self._next_address = 0

    def malloc(self, requested: int) -> Block:
        """Return a block for at least one byte; CudaOutOfMemory: it would exceed the limit."""
        size = -(-requested // _MIN_BLOCK_BYTES) * _MIN_BLOCK_BYTES
        small = size <= _SMALL_BYTES
        block = _taken(self._free[small], size) or self._new_segment(size, small)
        rest = block.size - size
        if rest >= _MIN_BLOCK_BYTES if small else rest > _SMALL_BYTES:
            _divide(self._free[small], block, size)
        block.free, block.requested = False, requested
        self._count("requested", requested)
        self._count("allocated", block.size)  # includes a remainder that is too small to split off
        return block

    def free(self, block: Block) -> None:
        """Free a block and join it with free neighbours; the block's segment stays reserved."""
        self._count("requested", -block.requested)
        self._count("allocated", -block.size)
        pool = self._free[block.small]
        insort(pool, _joined(pool, block), key=_BEST_FIT)

    def empty_cache(self) -> None:
        """Release every segment that contains no block in use, so that it is no longer reserved."""
        for pool in self._free.values():
            for block in [each for each in pool if not (each.before or each.after)]:
                pool.remove(block)
                self._count("reserved", -block.size)

    def reset_peaks(self) -> None:
        self.peak = dict(self.current)

    def _new_segment(self, size: int, small: bool) -> Block:
        if small:
            length = _SMALL_SEGMENT_BYTES
        elif size < _MIN_LARGE_BYTES:
            length = _LARGE_SEGMENT_BYTES
        else:
            length = -(-size // _ROUND_LARGE_BYTES) * _ROUND_LARGE_BYTES
        limit = self.limit_bytes
        if limit is not None and self.current["reserved"] + length > limit:
            self.empty_cache()
            if self.current["reserved"] + length > limit:
                why = f"{size:,} bytes beside {self.current['reserved']:,} reserved"
                raise CudaOutOfMemory(why)
        self._count("reserved", length)
        block = Block(self._next_address, length, free=True, small=small)
        self._next_address += length
        return block

    def _count(self, kind: str, change: int) -> None:
        self.current[kind] += change
        self.peak[kind] = max(self.peak[kind], self.current[kind])
