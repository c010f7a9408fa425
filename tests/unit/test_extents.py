"""Sets of pages, against sets of numbers."""

from hypothesis import given
from hypothesis import strategies as st

from weighin.predict.allocators import PAGE_BYTES, Extents

STRETCHES = st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 20_000)), max_size=20)


def pages(address: int, length: int) -> set[int]:
    last = address + length - 1
    return set(range(address // PAGE_BYTES, last // PAGE_BYTES + 1)) if length else set()


@given(STRETCHES, STRETCHES, STRETCHES)
def test_extents_are_sets_of_whole_pages(
    stretches: list[tuple[int, int]],
    removed: list[tuple[int, int]],
    more: list[tuple[int, int]],
) -> None:
    extents, expected = Extents(), set[int]()

    def add(address: int, length: int) -> None:
        nonlocal expected
        new = pages(address, length) - expected
        assert extents.add(address, length) == len(new) * PAGE_BYTES
        expected |= new

    def check() -> None:
        assert extents.nbytes == len(expected) * PAGE_BYTES
        assert extents.end == (max(expected, default=-1) + 1) * PAGE_BYTES

    for stretch in stretches:
        add(*stretch)
        check()
    for address, length in removed:
        extents.remove(address, address + length)
        expected -= {
            page
            for page in expected
            if address <= page * PAGE_BYTES and (page + 1) * PAGE_BYTES <= address + length
        }
        check()
    for stretch in more:
        add(*stretch)
        check()


def test_an_end_within_a_page_keeps_the_page() -> None:
    extents = Extents()
    extents.add(0, 5 * PAGE_BYTES)
    for address in (2 * PAGE_BYTES + 1, 3 * PAGE_BYTES, 4 * PAGE_BYTES):
        extents.remove(address, extents.end)
        assert (extents.nbytes, extents.end) == (3 * PAGE_BYTES, 3 * PAGE_BYTES)


def test_nothing_is_added_by_a_stretch_without_bytes() -> None:
    found = Extents()
    assert (found.add(5, 0), found.add(5, -1), found.nbytes) == (0, 0, 0)
    assert (found.add(5, 1), found.nbytes) == (PAGE_BYTES, PAGE_BYTES)
