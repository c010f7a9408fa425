"""The ledger of a symbolic run: where storages lie, and the memory that operations on them touch."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from weighin.predict.allocator import CachingAllocator
from weighin.predict.dispatch import CannotFollow, Operations
from weighin.predict.fake_cuda import pretended
from weighin.predict.ledger import Ledger
from weighin.result import Memory
from weighin.units import KIB, MIB

BASELINE = Memory(rss_bytes=0, anon_bytes=0, file_bytes=5 * MIB, shmem_bytes=0)
MANY = 4 * MIB  # elements; large blocks have a mapping of their own


@pytest.fixture
def ledger() -> Iterator[Ledger]:
    """A ledger that follows every operation of the test, also those on a simulated GPU."""
    with ExitStack() as followed:
        one = Ledger(CachingAllocator(), BASELINE)
        followed.enter_context(pretended(one))
        followed.enter_context(Operations(one))
        yield one


def cuda_bytes(ledger: Ledger) -> int:
    assert ledger.cuda
    return ledger.cuda.current["requested"]


def added(ledger: Ledger, before: int) -> int:
    """The anonymous memory of tensors at its peak since a sum before."""
    return ledger.peak_tensor_bytes - before


@pytest.mark.parametrize(
    ("source", "target", "dtype", "buffer_bytes"),
    [
        ("cpu", "cuda", torch.float16, 2 * MANY),  # converted on the CPU, into the GPU's dtype
        ("cpu", "cuda", torch.float64, 8 * MANY),
        ("cpu", "cuda", torch.float32, 0),
        ("cuda", "cuda", torch.float16, 0),  # converted on the GPU
        ("cuda", "cpu", torch.float16, 0),
        ("cpu", "cpu", torch.float16, 0),
    ],
)
def test_a_copy_to_the_gpu_that_converts_needs_a_buffer_on_the_cpu(
    ledger: Ledger, source: str, target: str, dtype: torch.dtype, buffer_bytes: int
) -> None:
    given = torch.ones(MANY, device=source)
    onto = torch.zeros(MANY, dtype=dtype, device=target)
    before = ledger.tensor_bytes
    ledger.restart_peaks()
    onto.copy_(given)
    assert added(ledger, before) == buffer_bytes
    assert ledger.tensor_bytes == before  # the buffer is freed


def test_memory_is_counted_where_it_is_written_and_until_it_is_freed(ledger: Ledger) -> None:
    tensor = torch.empty(MANY)
    assert ledger.tensor_bytes == 0
    tensor[: MANY // 2].fill_(1)
    assert ledger.tensor_bytes == 2 * MANY
    tensor.zero_()
    assert ledger.tensor_bytes == 4 * MANY
    assert ledger.work["fresh_bytes"] == 4 * MANY
    del tensor
    assert ledger.tensor_bytes == 0
    assert ledger.peak_tensor_bytes == 4 * MANY


def test_memory_of_the_gpu_is_the_allocators_and_not_the_processs(ledger: Ledger) -> None:
    tensor = torch.zeros(MANY, device="cuda")
    assert (ledger.tensor_bytes, cuda_bytes(ledger)) == (0, 4 * MANY)
    assert tensor.is_cuda and tensor.device == torch.device("cuda", 0)
    assert ledger.work["written_bytes"] == 0  # the processor wrote nothing
    del tensor
    assert cuda_bytes(ledger) == 0


def test_results_are_on_the_device_of_the_inputs(ledger: Ledger) -> None:
    on_gpu, on_cpu = torch.zeros(MANY, device="cuda"), torch.zeros(MANY)
    before = ledger.tensor_bytes
    result = on_gpu * 2
    assert (ledger.tensor_bytes - before, cuda_bytes(ledger)) == (0, 8 * MANY)
    other = on_cpu * 2
    assert (ledger.tensor_bytes - before, cuda_bytes(ledger)) == (4 * MANY, 8 * MANY)
    assert (result.is_cuda, other.is_cuda) == (True, False)


@pytest.mark.parametrize(
    ("nbytes", "locked"),
    [(3 * MIB, 4 * MIB), (4 * MIB, 4 * MIB), (4 * MIB + 1, 8 * MIB), (65 * KIB, 128 * KIB)],
)
def test_page_locked_memory_is_rounded_up_to_a_power_of_two(
    ledger: Ledger, nbytes: int, locked: int
) -> None:
    with ledger.placed("pinned"):
        torch.empty(nbytes, dtype=torch.uint8)
    assert ledger.pinned_bytes == ledger.tensor_bytes == locked  # also after it was freed


def test_freed_page_locked_memory_is_used_again_for_the_same_size(ledger: Ledger) -> None:
    tensor = torch.zeros(3 * MIB, dtype=torch.uint8)
    first = tensor.pin_memory()
    second = tensor.pin_memory()
    assert ledger.pinned_bytes == 8 * MIB
    del first
    third = tensor[: 2 * MIB + 1].pin_memory()  # also 4 MiB, as rounded
    assert ledger.pinned_bytes == 8 * MIB
    fourth = tensor.pin_memory()
    assert ledger.pinned_bytes == 12 * MIB
    del second, third, fourth


def test_pages_of_a_mapped_file_are_files_until_they_are_written(
    ledger: Ledger, tmp_path: Path
) -> None:
    (path := tmp_path / "file").write_bytes(bytes(MIB))
    storage = ledger.map_file(str(path), MIB)
    mapped = torch.empty(0, dtype=torch.uint8).set_(storage)
    assert ledger.place_of(mapped) == "file"
    assert ledger.file_bytes == BASELINE.file_bytes
    ledger.read(mapped[: 512 * KIB])
    ledger.read(mapped[: 256 * KIB])  # the same pages
    assert (ledger.file_bytes - BASELINE.file_bytes, ledger.tensor_bytes) == (512 * KIB, 0)
    assert ledger.work["mapped_bytes"] == 512 * KIB
    mapped[:4096].zero_()  # private: its pages are copied
    assert ledger.tensor_bytes == 4096


def test_places_are_nested_and_come_back(ledger: Ledger) -> None:
    with ledger.placed("cuda"):
        with ledger.placed(None):
            inner = torch.empty(MANY)
        with ledger.placed("host"):
            outer = torch.empty(MANY)
    assert [ledger.place_of(one) for one in (inner, outer, torch.empty(MANY))] == [
        "cuda", "host", "host",
    ]  # fmt: skip
    assert ledger.place_of(torch.empty(MANY, device="meta")) == "meta"


def test_a_small_tensor_has_its_values_and_is_no_tensor_memory(ledger: Ledger) -> None:
    small = torch.ones(64 * KIB, dtype=torch.uint8)
    assert int(small.sum()) == 64 * KIB
    large = torch.ones(64 * KIB + 1, dtype=torch.uint8)
    with pytest.raises(CannotFollow, match="uses values of tensors"):
        int(large.sum())


def test_a_phase_has_the_peaks_within_it(ledger: Ledger) -> None:
    with ledger.phase("build"):
        torch.zeros(MANY)
        torch.zeros(MANY, device="cuda")
    with ledger.phase("read"):
        torch.zeros(MANY // 2)
    build, read = ledger.phases
    assert (build.name, read.name) == ("build", "read")
    assert build.cuda_requested_bytes == 4 * MANY
    assert read.cuda_requested_bytes == 0
    assert build.host_anon_peak_bytes - read.host_anon_peak_bytes == pytest.approx(
        2 * MANY, abs=MIB
    )


def test_buffers_of_code_that_is_not_executed_are_held_for_a_while(ledger: Ledger) -> None:
    with ledger.holding(7 * MIB):
        assert ledger.tensor_bytes == 7 * MIB
    assert (ledger.tensor_bytes, ledger.peak_tensor_bytes) == (0, 7 * MIB)


def test_work_is_counted_by_its_kind(ledger: Ledger) -> None:
    tensor = torch.empty(MANY)
    tensor.fill_(1)
    tensor.normal_()
    torch.rand(MANY)
    assert ledger.work["written_bytes"] == 4 * MANY
    assert ledger.work["random_bytes"] == 8 * MANY
