"""The model of glibc's heap: where blocks lie, and which written pages stay."""

import pytest

from weighin.predict.allocators import Block, Heap
from weighin.units import KIB, MIB

OVERHEAD = 96  # what posix_memalign adds for torch's alignment


def written(heap: Heap, nbytes: int) -> Block:
    chunk = heap.malloc(nbytes)
    if chunk.in_heap:
        heap.pages.add(chunk.address, nbytes)
    return chunk


def test_a_block_of_128_kib_has_a_map_of_its_own_until_one_was_freed() -> None:
    heap = Heap()
    first = heap.malloc(MIB)
    assert not first.in_heap
    heap.free(first)
    assert heap.malloc(MIB - KIB).in_heap
    assert not heap.malloc(2 * MIB).in_heap


def test_blocks_above_32_mib_do_not_raise_the_threshold() -> None:
    heap = Heap()
    heap.free(heap.malloc(33 * MIB))
    assert not heap.malloc(MIB).in_heap


def test_temporaries_between_blocks_in_use_strand_their_pages() -> None:
    heap = Heap()
    heap.free(heap.malloc(8 * MIB))
    for _ in range(10):
        temporary = written(heap, 4 * MIB)
        written(heap, 4 * MIB)
        heap.free(temporary)
    assert 80 * MIB <= heap.pages.nbytes <= 81 * MIB  # no hole takes a block of its own size


def test_a_smaller_block_goes_into_a_hole_and_leaves_the_rest() -> None:
    heap = Heap()
    heap.free(heap.malloc(8 * MIB))
    temporary = written(heap, 4 * MIB)
    written(heap, 4 * MIB)
    heap.free(temporary)
    assert written(heap, 3 * MIB) is temporary
    assert written(heap, MIB // 2).address == temporary.address + temporary.size
    assert heap.pages.nbytes <= 9 * MIB


def test_neighbours_that_are_freed_become_one_hole() -> None:
    heap = Heap()
    heap.free(heap.malloc(8 * MIB))
    first, second, third = (written(heap, 2 * MIB) for _ in range(3))
    written(heap, MIB)
    for chunk in (first, third, second):
        heap.free(chunk)
    assert heap.malloc(5 * MIB).address == first.address


def test_a_top_above_twice_the_largest_map_goes_back_to_the_kernel() -> None:
    heap = Heap()
    heap.free(heap.malloc(8 * MIB))
    chunks = [written(heap, 6 * MIB) for _ in range(3)]
    heap.free(chunks[2])
    heap.free(chunks[1])
    assert heap.pages.nbytes >= 18 * MIB  # 12 MiB are free: below the threshold of 16
    heap.free(chunks[0])
    assert heap.pages.nbytes <= MIB


def test_trimming_gives_back_holes_too() -> None:
    heap = Heap()
    heap.free(heap.malloc(8 * MIB))
    hole = written(heap, 4 * MIB)
    written(heap, 2 * MIB)
    heap.free(hole)
    heap.trim()
    assert 2 * MIB <= heap.pages.nbytes <= 2 * MIB + 8 * KIB


def test_where_small_blocks_lie_elsewhere_a_hole_takes_a_block_of_its_own_size_again() -> None:
    heap = Heap(reuses=True)
    heap.free(heap.malloc(8 * MIB))
    for _ in range(10):
        temporary = written(heap, 4 * MIB)
        written(heap, 4 * MIB)
        heap.free(temporary)
    assert 44 * MIB <= heap.pages.nbytes <= 45 * MIB


def test_below_a_small_block_nothing_goes_back_and_all_but_the_last_fit_in_again() -> None:
    heap = Heap(pinned=True)
    heap.free(heap.malloc(8 * MIB))
    for _ in range(10):
        for chunk in [written(heap, 4 * MIB) for _ in range(5)]:
            heap.free(chunk)
    assert 24 * MIB <= heap.pages.nbytes <= 25 * MIB


def test_a_block_joins_the_hole_below_it_whoever_lies_above() -> None:
    heap = Heap(pinned=True)
    heap.free(heap.malloc(8 * MIB))
    first, second = (written(heap, 4 * MIB) for _ in range(2))
    heap.free(first)
    heap.free(second)
    whole = heap.malloc(7 * MIB)
    assert whole.address == first.address
    assert heap.malloc(2 * MIB).address == second.address + second.size


def in_heap(heap: Heap, nbytes: int) -> bool:
    return heap.malloc(nbytes).in_heap


def test_the_first_threshold_counts_what_aligning_adds() -> None:
    assert not in_heap(Heap(), 128 * KIB - OVERHEAD)
    assert in_heap(Heap(), 128 * KIB - OVERHEAD - 1)


def test_a_freed_map_raises_the_threshold_to_its_size_and_a_page() -> None:
    heap = Heap()
    heap.free(heap.malloc(MIB))
    assert not in_heap(heap, MIB + 4096 - OVERHEAD)
    assert in_heap(heap, MIB + 4096 - OVERHEAD - 1)
    first = heap.malloc(8 * MIB)
    heap.free(heap.malloc(2 * MIB))
    heap.free(heap.malloc(2 * MIB - KIB))  # below the threshold now
    assert in_heap(heap, 2 * MIB)
    heap.free(first)
    assert in_heap(heap, 8 * MIB)


@pytest.mark.parametrize(("size", "raises"), [(32 * MIB, True), (32 * MIB + 1, False)])
def test_the_largest_map_that_raises_the_threshold_has_32_mib(size: int, raises: bool) -> None:
    heap = Heap()
    heap.free(heap.malloc(size))
    assert in_heap(heap, 16 * MIB) is raises


@pytest.mark.parametrize(("reuses", "added"), [(False, 16), (True, OVERHEAD)])
def test_blocks_follow_each_other_with_what_malloc_adds(reuses: bool, added: int) -> None:
    heap = Heap(reuses=reuses)
    first, second, third = (heap.malloc(size) for size in (1000, 2000, 3000))
    assert (first.address, first.size) == (0, 1000 + added)
    assert (second.address, third.address) == (1000 + added, 3000 + 2 * added)


def test_the_top_keeps_128_kib_if_it_is_trimmed() -> None:
    heap = Heap()
    heap.free(heap.malloc(MIB))  # trims from 2 MiB on
    kept = written(heap, 4096 - 16)
    chunks = [written(heap, MIB - 16) for _ in range(2)]
    heap.free(chunks[1])
    assert heap.pages.nbytes == 4096 + 2 * MIB
    heap.free(chunks[0])  # exactly 2 MiB
    assert heap.pages.nbytes == 4096 + 128 * KIB
    heap.trim()
    assert heap.pages.nbytes == 4096
    heap.free(kept)
    heap.trim()
    assert heap.pages.nbytes == 0


def test_a_top_just_below_the_threshold_is_not_trimmed() -> None:
    heap = Heap()
    heap.free(heap.malloc(MIB))
    written(heap, 4096 - 16)
    chunks = [written(heap, size - 16) for size in (MIB, MIB - 4096)]
    for chunk in reversed(chunks):
        heap.free(chunk)
    assert heap.pages.nbytes == 2 * MIB


def test_the_smallest_hole_that_fits_is_taken_and_of_equals_the_lowest() -> None:
    heap = Heap()
    heap.free(heap.malloc(8 * MIB))
    holes = []
    for size in (3 * MIB, 2 * MIB, 2 * MIB):
        holes.append(heap.malloc(size))
        heap.malloc(KIB)
    for hole in reversed(holes):
        heap.free(hole)
    assert heap.malloc(MIB).address == holes[1].address
    assert heap.malloc(3 * MIB - OVERHEAD + 16).address == holes[0].address  # it fits exactly
    assert heap.malloc(2 * MIB - OVERHEAD + 17).address > holes[2].address  # by one byte not


def test_the_rest_of_a_hole_at_the_top_is_the_last_chunk() -> None:
    heap = Heap(pinned=True)
    heap.free(heap.malloc(8 * MIB))
    hole = heap.malloc(4 * MIB)
    heap.free(hole)
    first = heap.malloc(MIB)
    heap.free(first)  # joins the rest of the hole
    assert heap.malloc(4 * MIB - OVERHEAD).address == 0
