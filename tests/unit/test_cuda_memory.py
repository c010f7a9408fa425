"""The allocator's peaks, with PyTorch's own statistics put in at the edge: no GPU is needed."""

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weighin.errors import CheckpointError
from weighin.result import Outcome
from weighin.units import GIB
from weighin.worker.__main__ import classify
from weighin.worker.cuda import CudaMemory, is_out_of_memory

DEVICE = torch.device("cuda", 1)


class Allocator:
    """What torch.cuda would answer; takes down what it was asked to do."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.stats = {
            "requested_bytes.all.peak": 6290, "allocated_bytes.all.peak": 6416,
            "reserved_bytes.all.peak": 6484, "requested_bytes.all.current": 1,
            "reserved_bytes.all.current": 2097152, "allocated_bytes.small_pool.peak": 2,
        }  # fmt: skip
        self.properties = {"name": "Example 80GB", "total_memory": 1000, "uuid": "ab-cd"}
        self.backend = "native"
        self.peaks = {0: 0, 1: 512, 2: 0}
        self.looks = 0
        self.looked = threading.Event()
        self.free_bytes = [900, 700]
        self.total_bytes = 1000
        self.device = DEVICE

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        """Answer each look with the next figure; when there is none, the sampling is over."""
        assert device == self.device
        if self.looks == len(self.free_bytes):
            self.looked.set()
            raise RuntimeError
        self.looks += 1
        return self.free_bytes[self.looks - 1], self.total_bytes

    def note(self, name: str) -> Any:
        return lambda device=None, **_: self.calls.append((name, device))

    def functions(self) -> dict[str, Any]:
        """The functions of torch.cuda that it stands for."""
        noted = ("set_device", "synchronize", "empty_cache", "reset_peak_memory_stats")
        return {name: self.note(name) for name in noted} | {
            "reset_peak_host_memory_stats": lambda: None,
            "host_memory_stats": lambda: {"allocated_bytes.peak": 4096, "other": 1},
            "get_device_properties": lambda device: SimpleNamespace(**self.properties),
            "get_allocator_backend": lambda: self.backend,
            "device_count": lambda: len(self.peaks),
            "max_memory_allocated": lambda index: self.peaks[index],
            "memory_summary": lambda device, abbreviated: f"{device} {abbreviated}",
            "set_per_process_memory_fraction": lambda share, _: self.note("fraction")(share),
            "memory_allocated": lambda device: 512,
            "memory_stats": lambda device: self.stats,
            "mem_get_info": self.mem_get_info,
        }


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    allocator = Allocator()
    for name, function in allocator.functions().items():
        monkeypatch.setattr(torch.cuda, name, function)
    monkeypatch.setattr(torch, "zeros", lambda size, device: allocator.note("zeros")(device))
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # of the sampling's end
    yield allocator
    for thread in threading.enumerate():
        if thread.name == "cuda sampler":
            thread.join(60)


@pytest.mark.parametrize("device", [torch.device("cuda", 1), torch.device("cuda")], ids=str)
def test_the_context_comes_first_and_each_call_names_the_device(
    allocator: Allocator, device: torch.device
) -> None:
    """A device without an index is the first."""
    named = allocator.device = torch.device("cuda", device.index or 0)
    memory = CudaMemory(device)
    assert memory.device == named
    assert allocator.calls == [
        ("set_device", named.index), ("zeros", named), ("synchronize", named), ("empty_cache", None),
        ("reset_peak_memory_stats", named),
    ]  # fmt: skip
    allocator.calls.clear()
    memory.synchronize()
    memory.reset()
    assert allocator.calls == [("synchronize", named), ("reset_peak_memory_stats", named)]


def test_the_figures_of_a_phase_are_the_allocators_own(allocator: Allocator) -> None:
    memory = CudaMemory(DEVICE)
    assert memory.allocated() == 512
    assert memory.summary() == "cuda:1 True"
    assert memory.peaks() == {
        "peak_cuda_requested_bytes": 6290, "peak_cuda_allocated_bytes": 6416,
        "peak_cuda_reserved_bytes": 6484, "peak_pinned_bytes": 4096,
    }  # fmt: skip


def test_the_timeline_is_what_the_driver_and_the_allocator_hold(allocator: Allocator) -> None:
    before_ns = time.monotonic_ns()
    memory = CudaMemory(DEVICE)
    assert allocator.looked.wait(60)
    points = memory.take_timeline()
    assert [point[1:] for point in points] == [(512, 100), (512, 300)]
    assert before_ns <= points[0][0] <= points[1][0] <= time.monotonic_ns()
    assert memory.take_timeline() == []


@pytest.mark.parametrize("total", [84_974_239_744, 25_393_692_672, 8 * GIB + 1, 1000 * GIB])
@pytest.mark.parametrize("limit", [8 * GIB, 8 * GIB - 1, 1, 2**33 // 3])
def test_a_limit_as_a_fraction_loses_no_byte(allocator: Allocator, total: int, limit: int) -> None:
    allocator.total_bytes = total
    CudaMemory(DEVICE, limit)
    (fraction,) = [value for name, value in allocator.calls if name == "fraction"]
    assert 0 < fraction <= 1
    assert int(fraction * total) == limit  # as CUDACachingAllocator::setMemoryFraction computes it


def test_a_limit_above_the_device_is_left_to_torch_which_refuses_it(allocator: Allocator) -> None:
    CudaMemory(DEVICE)
    assert "fraction" not in dict(allocator.calls)
    allocator.looks, allocator.total_bytes = 0, 4 * GIB
    CudaMemory(DEVICE, 8 * GIB)
    assert dict(allocator.calls)["fraction"] > 1


def test_the_device_is_described_as_the_drivers_tools_name_it(allocator: Allocator) -> None:
    assert CudaMemory(DEVICE).describe() == {
        "gpu": "Example 80GB", "gpu_bytes": 1000, "gpu_uuid": "GPU-ab-cd", "cuda": torch.version.cuda,
        "cuda_allocator": "native",
    }  # fmt: skip
    del allocator.properties["uuid"]  # of some builds for AMD's GPUs
    assert CudaMemory(DEVICE).describe()["gpu_uuid"] is None


def test_what_degrades_a_figure_is_stated(allocator: Allocator) -> None:
    memory = CudaMemory(DEVICE)
    assert memory.notes() + memory.notes_at_end() == []
    allocator.backend = "cudaMallocAsync"
    allocator.peaks[2] = 3 * GIB
    assert memory.notes() == [
        "the CUDA allocator is cudaMallocAsync: requested and reserved bytes are figures of the"
        " driver's pool, not of torch's blocks"
    ]
    assert memory.notes_at_end() == ["the load also used cuda:2; all figures are of cuda:1 alone"]


def test_a_gpu_without_memory_is_told_from_other_errors() -> None:
    lack = torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might")
    assert is_out_of_memory(lack)
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate"))
    for other in (
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        RuntimeError("CUDA error: out of memory, said a strategy"),
        MemoryError(),
    ):
        assert not is_out_of_memory(other)
    put_into_words = CheckpointError("from_pretrained fails", "")
    put_into_words.__cause__ = torch.AcceleratorError("CUDA error: out of memory")
    assert classify(put_into_words, "streaming") == (Outcome.CUDA_OOM, "CUDA error: out of memory")
