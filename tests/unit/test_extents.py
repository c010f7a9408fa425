"""Sets of pages, against sets of numbers."""

from hypothesis import given
from hypothesis import strategies as st

from weighin.predict.allocators import PAGE_BYTES, Extents, HeapPages

STRETCHES = st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 20_000)), max_size=20)


def pages(address: int, length: int) -> set[int]:
    last = address + length - 1
    return set(range(address // PAGE_BYTES, last // PAGE_BYTES + 1)) if length else set()


@given(STRETCHES)
def test_extents_are_sets_of_pages(stretches: list[tuple[int, int]]) -> None:
    extents, expected = Extents(), set[int]()
    for address, length in stretches:
        new = pages(address, length) - expected
        assert extents.add(address, length) == len(new) * PAGE_BYTES
        expected |= new
        assert extents.nbytes == len(expected) * PAGE_BYTES


@given(STRETCHES, st.integers(0, 15), STRETCHES)
def test_pages_of_the_heap_go_with_its_top(
    stretches: list[tuple[int, int]], cut: int, more: list[tuple[int, int]]
) -> None:
    heap, expected = HeapPages(), set[int]()
    for address, length in stretches:
        heap.add(address, length)
        expected |= pages(address, length)
    assert heap.nbytes == len(expected) * PAGE_BYTES
    heap.remove_from(cut * PAGE_BYTES)
    expected = {page for page in expected if page < cut}
    for address, length in more:
        heap.add(address, length)
        expected |= pages(address, length)
    assert heap.nbytes == len(expected) * PAGE_BYTES


@given(STRETCHES, STRETCHES)
def test_only_whole_pages_are_removed_from_a_heap(
    stretches: list[tuple[int, int]], removed: list[tuple[int, int]]
) -> None:
    heap, expected = HeapPages(), set[int]()
    for address, length in stretches:
        new = pages(address, length) - expected
        assert heap.add(address, length) == len(new) * PAGE_BYTES
        expected |= new
    assert heap.end == (max(expected, default=-1) + 1) * PAGE_BYTES
    for address, length in removed:
        heap.remove(address, length)
        expected -= {
            page
            for page in expected
            if address <= page * PAGE_BYTES and (page + 1) * PAGE_BYTES <= address + length
        }
        assert heap.nbytes == len(expected) * PAGE_BYTES


def test_an_end_within_a_page_keeps_the_page() -> None:
    heap = HeapPages()
    heap.add(0, 5 * PAGE_BYTES)
    heap.remove_from(2 * PAGE_BYTES + 1)
    assert (heap.nbytes, heap.end) == (3 * PAGE_BYTES, 3 * PAGE_BYTES)
    heap.remove_from(3 * PAGE_BYTES)
    assert (heap.nbytes, heap.end) == (3 * PAGE_BYTES, 3 * PAGE_BYTES)


def test_nothing_is_added_by_a_stretch_without_bytes() -> None:
    for kind in (Extents, HeapPages):
        found = kind()
        assert (found.add(5, 0), found.add(5, -1), found.nbytes) == (0, 0, 0)
        assert (found.add(5, 1), found.nbytes) == (PAGE_BYTES, PAGE_BYTES)
