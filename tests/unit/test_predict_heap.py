"""The model of glibc's heap: where blocks lie, and which written pages stay."""

from weighin.predict.heap import Chunk, Heap
from weighin.units import KIB, MIB


def written(heap: Heap, nbytes: int) -> Chunk:
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
