"""Sets of pages, against sets of numbers."""

from hypothesis import given
from hypothesis import strategies as st

from weighin.predict.extents import PAGE_BYTES, Extents, HeapPages

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
