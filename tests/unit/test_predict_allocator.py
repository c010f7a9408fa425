"""The model of CUDA's caching allocator against sums done by hand from its documented rules."""

import pytest

from weighin.predict.allocators import CachingAllocator, CudaOutOfMemory
from weighin.units import KIB, MIB


def test_a_request_is_rounded_up_to_512_bytes_in_a_segment_of_2_mib() -> None:
    allocator = CachingAllocator()
    allocator.malloc(513)
    assert allocator.current == {"requested": 513, "allocated": 1024, "reserved": 2 * MIB}


@pytest.mark.parametrize(
    ("requested", "reserved"),
    [
        (MIB, 2 * MIB),  # the largest of the small pool
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (100 * MIB + 1, 102 * MIB),
    ],
)
def test_segments_by_the_size_of_the_request(requested: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.malloc(requested)
    assert allocator.current["reserved"] == reserved


def test_a_rest_of_at_most_1_mib_is_not_split_off_a_large_block() -> None:
    allocator = CachingAllocator()
    allocator.malloc(19 * MIB + 1)  # 20 MiB are reserved; the rest is below 1 MiB
    assert allocator.current["allocated"] == 20 * MIB
    allocator.malloc(9 * MIB)  # of 20 MiB; 11 MiB are left
    assert allocator.current["allocated"] == 29 * MIB


def test_requests_share_a_segment_while_they_fit() -> None:
    allocator = CachingAllocator()
    for _ in range(3):
        allocator.malloc(6 * MIB)
    assert allocator.current["reserved"] == 20 * MIB
    allocator.malloc(6 * MIB)
    assert allocator.current["reserved"] == 40 * MIB


def test_the_smallest_free_block_that_fits_is_taken() -> None:
    allocator = CachingAllocator()
    large, small = allocator.malloc(30 * MIB), allocator.malloc(12 * MIB)
    allocator.free(large)
    allocator.free(small)
    assert allocator.malloc(11 * MIB + 512) is small
    assert allocator.current["allocated"] == 12 * MIB  # its rest is too little to be split off


def test_free_neighbours_become_one_block_again() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(6 * MIB) for _ in range(3)]
    for block in (blocks[0], blocks[2], blocks[1]):
        allocator.free(block)
    assert allocator.current == {"requested": 0, "allocated": 0, "reserved": 20 * MIB}
    allocator.malloc(9 * MIB)
    allocator.malloc(9 * MIB)
    assert allocator.current["reserved"] == 20 * MIB


def test_an_emptied_cache_gives_back_only_segments_that_are_free_as_a_whole() -> None:
    allocator = CachingAllocator()
    kept, freed = allocator.malloc(6 * MIB), allocator.malloc(30 * MIB)
    allocator.free(freed)
    allocator.empty_cache()
    assert allocator.current["reserved"] == 20 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.current["reserved"] == 0


def test_peaks_are_kept_until_they_are_reset() -> None:
    allocator = CachingAllocator()
    block = allocator.malloc(100 * KIB)
    allocator.free(block)
    assert allocator.peak == {"requested": 102_400, "allocated": 102_400, "reserved": 2 * MIB}
    allocator.reset_peaks()
    assert allocator.peak == {"requested": 0, "allocated": 0, "reserved": 2 * MIB}


def test_a_limit_empties_the_cache_before_it_refuses() -> None:
    allocator = CachingAllocator(limit_bytes=32 * MIB)
    allocator.free(allocator.malloc(30 * MIB))
    allocator.malloc(31 * MIB)
    assert allocator.current["reserved"] == 32 * MIB
    with pytest.raises(CudaOutOfMemory):
        allocator.malloc(14 * MIB)


def test_a_rest_of_512_bytes_is_split_off_a_small_block() -> None:
    allocator = CachingAllocator()
    first = allocator.malloc(MIB)
    second = allocator.malloc(MIB - 512)
    assert (second.address - first.address, second.size) == (MIB, MIB - 512)
    assert allocator.malloc(1).size == 512
    assert allocator.current["reserved"] == 2 * MIB
    assert allocator.malloc(1).address == 2 * MIB  # in another segment
    assert allocator.current["reserved"] == 4 * MIB


@pytest.mark.parametrize(("rest", "size"), [(MIB, 20 * MIB), (MIB + 512, 19 * MIB - 512)])
def test_a_rest_above_1_mib_is_split_off_a_large_block(rest: int, size: int) -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(2 * MIB))  # a segment of 20 MiB
    assert allocator.malloc(20 * MIB - rest).size == size
    assert allocator.current["reserved"] == 20 * MIB


def test_small_and_large_requests_have_segments_of_their_own() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(2 * MIB))
    allocator.malloc(MIB)
    assert allocator.current["reserved"] == 22 * MIB
    allocator.free(allocator.malloc(KIB))
    allocator.malloc(5 * MIB)
    assert allocator.current["reserved"] == 22 * MIB


def test_a_limit_may_be_reached_and_not_exceeded() -> None:
    allocator = CachingAllocator(limit_bytes=22 * MIB)
    allocator.malloc(5 * MIB)
    allocator.malloc(1)
    assert allocator.current["reserved"] == 22 * MIB
    with pytest.raises(CudaOutOfMemory):
        CachingAllocator(limit_bytes=20 * MIB - 1).malloc(5 * MIB)
    assert allocator.current["requested"] == 5 * MIB + 1


def test_of_equal_free_blocks_the_lowest_is_taken() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(12 * MIB) for _ in range(3)]
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.malloc(12 * MIB) is blocks[0]


def test_neighbours_on_both_sides_join_and_one_in_use_does_not() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.malloc(4 * MIB) for _ in range(5)]  # the whole segment
    for number in (0, 2, 4):
        allocator.free(blocks[number])
    with pytest.raises(CudaOutOfMemory):
        allocator.limit_bytes = 20 * MIB
        allocator.malloc(5 * MIB)
    allocator.free(blocks[1])
    assert allocator.malloc(12 * MIB) is blocks[0]
    allocator.free(blocks[3])
    assert allocator.malloc(8 * MIB).address == 12 * MIB
    assert allocator.current == {"requested": 20 * MIB, "allocated": 20 * MIB, "reserved": 20 * MIB}
