"""The models of glibc's heap and of CUDA's caching allocator, against sums done by hand from their rules.

The rows are traces, one word a step:

    a:6M@12M#7M     ask for 6 MiB, written whole: the block a begins at 12 MiB and has 7 MiB; "@map": in no heap
    -a              free it
    !14M            the limit refuses it
    =5M,6M,20M      the sums now: requested, allocated and reserved; the written pages of a heap
    ^5M,6M,20M      the peaks
    trim            or another method
"""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighin.predict.allocators import (
    PAGE_BYTES,
    Block,
    CachingAllocator,
    CudaOutOfMemory,
    Extents,
    Heap,
)

BYTES = {"": 1, "K": 1 << 10, "M": 1 << 20}
ASKED = re.compile(r"(?:(?P<name>\w):)?(?P<size>[^@#]+)(?:@(?P<address>[^#]+))?(?:#(?P<block>.+))?")


def size(text: str) -> int:
    return sum(int(n) * BYTES[unit] for n, unit in re.findall(r"([+-]?\d+)([KM]?)", text))


def play(model: Heap | CachingAllocator, trace: str) -> None:
    blocks: dict[str, Block] = {}
    for word in trace.split():
        if word.isidentifier():
            getattr(model, word)()
        elif word[0] == "-":
            model.free(blocks[word[1:]])
        elif word[0] == "!":
            with pytest.raises(CudaOutOfMemory):
                model.malloc(size(word[1:]))
        elif word[0] in "=^":
            assert sums(model, word[0] == "^") == [size(one) for one in word[1:].split(",")], word
        else:
            asked = ASKED.fullmatch(word)
            assert asked, word
            block = blocks[asked["name"]] = model.malloc(size(asked["size"]))
            if address := asked["address"]:
                wanted = "map" if address == "map" else size(address)
                assert (block.address if block.in_heap else "map") == wanted, word
            assert block.size == size(asked["block"] or str(block.size)), word
            if isinstance(model, Heap) and block.in_heap:
                model.pages.add(block.address, size(asked["size"]))


def sums(model: Heap | CachingAllocator, peaks: bool) -> list[int]:
    if isinstance(model, Heap):
        return [model.pages.nbytes]
    return [*(model.peak if peaks else model.current).values()]


CUDA = {
    "a request is rounded up to 512 bytes, in a segment of 2 MiB": "513 =513,1K,2M",
    "requests of up to 1 MiB are small": "1M =1M,1M,2M",
    "larger ones have a segment of 20 MiB": "1M+1 =1M+1,1M+512,20M",
    "those below 10 MiB have such a segment, too": "10M-512 =10M-512,10M-512,20M",
    "those of 10 MiB have their own": "10M =10M,10M,10M",
    "which is rounded up to 2 MiB": "10M+1 =10M+1,10M+512,12M",
    "however large it is": "100M+1 =100M+1,100M+512,102M",
    "a rest below 1 MiB stays with a large block": "19M+1#20M =19M+1,20M,20M 9M =28M+1,29M,40M",
    "a rest of 1 MiB stays, too": "a:2M -a 19M#20M =19M,20M,20M",
    "a rest above 1 MiB is split off": "a:2M -a 19M-512#19M-512 =19M-512,19M-512,20M",
    "a rest of 512 bytes is split off a small block": "1M@0 1M-512@1M#1M-512 1#512 =2M-511,2M,2M 1@2M =2M-510,2M+512,4M",
    "requests share a segment while they fit": "6M 6M 6M =18M,18M,20M 6M =24M,24M,40M",
    "small and large ones share none": "a:2M -a 1M =1M,1M,22M b:1K -b 5M =6M,6M,22M",
    "the smallest free block that fits is taken": "a:30M b:12M -a -b 11M+512@30M#12M =11M+512,12M,42M",
    "of equal ones the lowest": "a:12M b:12M c:12M -c -b -a 12M@0",
    "free neighbours become one block again": "a:6M b:6M c:6M -a -c -b =0,0,20M 9M@0 9M@9M =18M,18M,20M",
    "an emptied cache gives back segments that are free as a whole": "a:6M b:30M -b empty_cache =6M,6M,20M -a empty_cache =0,0,0",
    "a small segment, too": "a:1K b:2K -a -b empty_cache =0,0,0",
    "peaks are kept until they are reset": "a:100K -a ^100K,100K,2M reset_peaks ^0,0,2M",
}  # fmt: skip


@pytest.mark.parametrize("trace", CUDA.values(), ids=CUDA)
def test_blocks_and_segments_of_a_gpu(trace: str) -> None:
    play(CachingAllocator(), trace)


LIMITED = {
    "the cache is emptied before a request is refused": ("32M", "a:30M -a 31M =31M,32M,32M !14M"),
    "a limit may be reached, with what is cached": ("32M", "a:30M -a 1K =1K,1K,32M"),
    "and not exceeded": ("22M", "5M 1 =5M+1,5M+512,22M !16M"),
    "one byte may be too much": ("20M-1", "!5M =0,0,0"),
    "neighbours on both sides join, and one in use does not":
        ("20M", "a:4M b:4M c:4M d:4M e:4M -a -c -e !5M -b 12M@0 -d 8M@12M =20M,20M,20M"),
}  # fmt: skip


@pytest.mark.parametrize(("limit", "trace"), LIMITED.values(), ids=LIMITED)
def test_a_limit_of_a_gpu(limit: str, trace: str) -> None:
    play(CachingAllocator(limit_bytes=size(limit)), trace)


def test_a_refusal_names_the_request_and_what_is_reserved() -> None:
    allocator = CachingAllocator(limit_bytes=size("30M"))
    play(allocator, "5M")
    with pytest.raises(CudaOutOfMemory, match="16,777,728 bytes beside 20,971,520 reserved"):
        allocator.malloc(size("16M+1"))


USUAL: dict[str, bool] = {}
PINNED, REUSES = {"pinned": True}, {"reuses": True}
RAISED = "m:8M@map -m "  # from now on, blocks of up to 8 MiB lie in the heap
ROUNDS = RAISED + 10 * "a:4M 4M -a "

HEAPS = {
    "a block of 128 KiB with its alignment has a map of its own": (USUAL, "128K-96@map 128K-97@0"),
    "a freed map raises the threshold to its size and a page": (USUAL, "m:1M@map -m 1M+4K-96@map 1M+4K-97@0"),
    "to its own, not to that of others": (USUAL, "m:1M -m 1M-1K@0 2M@map"),
    "each larger one raises it, and one in the heap does not": (USUAL, "m:1M -m a:8M@map b:2M@map -b c:2M-1K@0 -c 2M@0 -a 8M@2M+16"),
    "a smaller one lowers nothing": (USUAL, "a:2M b:1M -a -b 2M@0"),
    "the largest map that raises it has 32 MiB": (USUAL, "m:32M -m 16M@0"),
    "a larger one raises nothing": (USUAL, "m:32M+1 -m 1M@map"),
    "blocks follow each other behind malloc's heads": (USUAL, "1000@0#1016 2000@1016 3000@3032"),
    "or with room for their alignment": (REUSES, "1000@0#1096 2000@1096 3000@3192"),
    # The written pages of 20 blocks, 11, and of those that fit in again below the last one.
    "temporaries between blocks in use strand their pages": (USUAL, ROUNDS + "=80M+4K"),
    "where small blocks lie elsewhere, a hole takes a block of its own size again": (REUSES, ROUNDS + "=44M+4K"),
    "below a small block nothing goes back, and all but the last fit in again":
        (PINNED, RAISED + 10 * "a:4M b:4M c:4M d:4M e:4M -a -b -c -d -e " + "=24M+4K"),
    "a smaller block goes into a hole and leaves the rest": (USUAL, RAISED + "a:4M 4M -a 3M@0 512K@3M+16 =8M+4K"),
    "neighbours that are freed become one hole": (USUAL, RAISED + "a:2M b:2M c:2M 1M -a -c -b 5M@0"),
    "the rest of a hole joins what is freed above it": (USUAL, RAISED + "a:4M b:4M 1K -a 1M@0 -b 6M@1M+16"),
    "the rest of a hole in the middle is not the last chunk": (USUAL, RAISED + "a:4M b:1M -a 1M@0 d:4M@5M+32 -d 5M@5M+32"),
    "a block joins the hole below it, whoever lies above": (PINNED, RAISED + "a:4M b:4M -a -b 7M@0 2M@8M+32"),
    "a hole at the top joins what is freed above it": (PINNED, RAISED + "a:4M b:1M -a -b c:6M@5M+32 -c 8M@0"),
    "the rest of a hole at the top is the last chunk": (PINNED, RAISED + "a:4M -a b:1M -b 4M-96@0"),
    "the smallest hole that fits is taken, and of equals the lowest; a byte too much is too much":
        (USUAL, RAISED + "a:3M 1K b:2M 1K c:2M 1K -c -b -a 1M@3M+1056 3M-80@0 2M-79@7M+3168"),
    "a top of twice the largest map goes back to the kernel, but for 128 KiB":
        (USUAL, "m:1M -m a:4K-16 b:1M-16 c:1M-16 -c =2M+4K -b =4K+128K trim =4K -a trim =0"),
    "a top that is a page smaller stays": (USUAL, "m:1M -m 4K-16 a:1M-16 b:1M-4K-16 -b -a =2M"),
    "the blocks of a top are free one by one": (USUAL, RAISED + "a:6M b:6M c:6M -c -b =18M+4K d:6M@6M+16 -d -a =128K"),
    "trimming gives back holes, too": (USUAL, RAISED + "a:4M 2M -a =6M+4K trim =2M+4K"),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "trace"), HEAPS.values(), ids=HEAPS)
def test_blocks_and_written_pages_of_a_heap(kind: dict[str, bool], trace: str) -> None:
    play(Heap(**kind), trace)


# -- pages

STRETCHES = st.lists(st.tuples(st.integers(0, 40_000), st.integers(0, 20_000)), max_size=20)
Stretches = list[tuple[int, int]]


def touched(address: int, length: int) -> set[int]:
    last = address + length - 1
    return set(range(address // PAGE_BYTES, last // PAGE_BYTES + 1)) if length else set()


def within(address: int, length: int) -> set[int]:
    return set(range(-(-address // PAGE_BYTES), (address + length) // PAGE_BYTES))


@given(STRETCHES, STRETCHES, STRETCHES)
def test_extents_are_sets_of_whole_pages(
    stretches: Stretches, removed: Stretches, more: Stretches
) -> None:
    extents, expected = Extents(), set[int]()
    steps = [("add", *one) for one in stretches]
    steps += [("remove", *one) for one in removed] + [("add", *one) for one in more]
    for step, address, length in steps:
        if step == "add":
            new = touched(address, length) - expected
            assert extents.add(address, length) == len(new) * PAGE_BYTES
            expected |= new
        else:
            extents.remove(address, address + length)
            expected -= within(address, length)
        assert extents.nbytes == len(expected) * PAGE_BYTES
        assert extents.end == (max(expected, default=-1) + 1) * PAGE_BYTES


def test_the_borders_of_pages() -> None:
    extents = Extents()
    assert (extents.add(5, 0), extents.add(5, -1), extents.nbytes) == (0, 0, 0)
    assert extents.add(0, 4 * PAGE_BYTES + 1) == 5 * PAGE_BYTES
    for address in (2 * PAGE_BYTES + 1, 3 * PAGE_BYTES, 4 * PAGE_BYTES):  # keeps the page it is in
        extents.remove(address, extents.end)
        assert (extents.nbytes, extents.end) == (3 * PAGE_BYTES, 3 * PAGE_BYTES)
