"""A model of PyTorch's CUDA caching allocator: the bytes that it allocates and reserves.

The model of the allocator follows c10/cuda/CUDACachingAllocator.cpp of torch 2.13 with its default
settings: one stream, no expandable segments, no ``max_split_size_mb``, no rounding to powers of
two.
"""

from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from weighin.units import MIB

_MIN_BLOCK_BYTES: Final = 512  # kMinBlockSize: sizes are rounded up to a multiple of it
_SMALL_BYTES: Final = MIB  # kSmallSize: the largest request of the small pool
_SMALL_SEGMENT_BYTES: Final = 2 * MIB  # kSmallBuffer
_MIN_LARGE_BYTES: Final = 10 * MIB  # kMinLargeAlloc: the smallest request with its own segment
_LARGE_SEGMENT_BYTES: Final = 20 * MIB  # kLargeBuffer: the segment of requests from 1 to 10 MiB
_ROUND_LARGE_BYTES: Final = 2 * MIB  # kRoundLarge

_KINDS: Final = ("requested", "allocated", "reserved")
_BEST_FIT: Final = attrgetter("size", "address")  # the smallest size, then the lowest address


class CudaOutOfMemory(Exception):
    """A request exceeds the GPU memory limit, even after the allocator has emptied its cache."""


@dataclass(slots=True, eq=False)
class CudaBlock:
    """A part of a segment (one reservation), with links to its neighbours. Free neighbours merge."""

    address: int
    size: int
    small: bool
    free: bool = True
    requested: int = 0
    before: "CudaBlock | None" = None
    after: "CudaBlock | None" = None


class CachingAllocator:
    """Blocks and segments of one device, with their current sums and peaks in bytes.

    ``limit_bytes`` limits the reserved bytes (``set_per_process_memory_fraction``).
    """

    def __init__(self, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self.current = dict.fromkeys(_KINDS, 0)
        self.peak = dict.fromkeys(_KINDS, 0)
        self._free: dict[bool, list[CudaBlock]] = {True: [], False: []}
        self._next_address = 0

    def malloc(self, requested: int) -> CudaBlock:
        """Return a block for ``requested`` bytes; ``requested`` must be at least 1.

        Raises:
            CudaOutOfMemory: the block would exceed the limit.
        """
        size = -(-requested // _MIN_BLOCK_BYTES) * _MIN_BLOCK_BYTES
        small = size <= _SMALL_BYTES
        block = self._best_fit(size, small) or self._new_segment(size, small)
        rest = block.size - size
        if rest >= _MIN_BLOCK_BYTES if small else rest > _SMALL_BYTES:
            self._split(block, size)
        block.free, block.requested = False, requested
        self._count("requested", requested)
        self._count("allocated", block.size)  # includes a remainder that is too small to split off
        return block

    def free(self, block: CudaBlock) -> None:
        """Free a block and merge it with free neighbours; the block's segment stays reserved."""
        self._count("requested", -block.requested)
        self._count("allocated", -block.size)
        block.free = True
        for other in (block.before, block.after):
            if other is not None and other.free:
                self._take(other)
        block = self._merge(block)
        insort(self._free[block.small], block, key=_BEST_FIT)

    def empty_cache(self) -> None:
        """Release every segment that contains no block in use, so that it is no longer reserved."""
        for pool in self._free.values():
            for block in [each for each in pool if not (each.before or each.after)]:
                pool.remove(block)
                self._count("reserved", -block.size)

    def reset_peaks(self) -> None:
        self.peak = dict(self.current)

    def _best_fit(self, size: int, small: bool) -> CudaBlock | None:
        pool = self._free[small]
        at = bisect_left(pool, (size, -1), key=_BEST_FIT)
        return pool.pop(at) if at < len(pool) else None

    def _new_segment(self, size: int, small: bool) -> CudaBlock:
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
                raise CudaOutOfMemory(
                    f"{size:,} bytes beside {self.current['reserved']:,} reserved"
                )
        self._count("reserved", length)
        block = CudaBlock(self._next_address, length, small)
        self._next_address += length
        return block

    def _split(self, block: CudaBlock, size: int) -> None:
        rest = CudaBlock(block.address + size, block.size - size, block.small)
        rest.before, rest.after = block, block.after
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        insort(self._free[rest.small], rest, key=_BEST_FIT)

    def _take(self, block: CudaBlock) -> None:
        pool = self._free[block.small]
        pool.pop(bisect_left(pool, _BEST_FIT(block), key=_BEST_FIT))

    @staticmethod
    def _merge(block: CudaBlock) -> CudaBlock:
        if block.before is not None and block.before.free:
            first = block.before
            first.size += block.size
            first.after = block.after
            block = first
        if block.after is not None and block.after.free:
            block.size += block.after.size
            block.after = block.after.after
        if block.after is not None:
            block.after.before = block
        return block

    def _count(self, kind: str, change: int) -> None:
        self.current[kind] += change
        self.peak[kind] = max(self.peak[kind], self.current[kind])
