"""The allocator's peaks, with PyTorch's own statistics put in at the edge: no GPU is needed."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from harness.record import Memory, Phase
from harness.worker.cuda import CudaMemory

DEVICE = torch.device("cuda", 1)


class Allocator:
    """What torch.cuda would answer; takes down what it was asked to do."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.allocated = 512
        self.stats = {
            "requested_bytes.all.peak": 6290,
            "allocated_bytes.all.peak": 6416,
            "reserved_bytes.all.peak": 6484,
            "requested_bytes.all.current": 1,
            "allocated_bytes.small_pool.peak": 2,
        }
        self.looks = 0
        self.looked = threading.Event()
        self.free_bytes = [900, 700]

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        """Answer each look with the next figure; when there is none, the sampling is over."""
        assert device == DEVICE
        if self.looks == len(self.free_bytes):
            self.looked.set()
            raise RuntimeError
        self.looks += 1
        return self.free_bytes[self.looks - 1], 1000


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Iterator[Allocator]:
    allocator = Allocator()

    def note(name: str) -> Any:
        return lambda device=None, **_: allocator.calls.append((name, device))

    monkeypatch.setattr(torch, "zeros", lambda size, device: note("zeros")(device))
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, note(name))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocator.allocated)
    monkeypatch.setattr(torch.cuda, "memory_stats", lambda device: allocator.stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", allocator.mem_get_info)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)  # of the sampling's end
    yield allocator
    for thread in threading.enumerate():
        if thread.name == "cuda sampler":
            thread.join(10)


def test_the_context_is_made_before_the_first_reset(allocator: Allocator) -> None:
    CudaMemory(DEVICE)
    assert allocator.calls == [
        ("zeros", DEVICE),
        ("synchronize", DEVICE),
        ("empty_cache", None),
        ("reset_peak_memory_stats", DEVICE),
    ]


def test_a_phase_gets_three_different_peaks(allocator: Allocator) -> None:
    phase = Phase("read", 1, 2, 3, Memory(4, 5, 6, 7), 8, 9, peak_cgroup_bytes=10)
    assert CudaMemory(DEVICE).complete(phase) == Phase(
        "read", 1, 2, 3, Memory(4, 5, 6, 7, cuda_allocated_bytes=512), 8, 9, 10,
        peak_cuda_requested_bytes=6290,
        peak_cuda_allocated_bytes=6416,
        peak_cuda_reserved_bytes=6484,
    )  # fmt: skip


def test_each_call_names_the_device(allocator: Allocator) -> None:
    memory = CudaMemory(DEVICE)
    allocator.calls.clear()
    memory.synchronize()
    memory.reset()
    assert memory.allocated() == 512
    assert allocator.calls == [("synchronize", DEVICE), ("reset_peak_memory_stats", DEVICE)]


def test_the_timeline_is_what_the_driver_and_the_allocator_hold(allocator: Allocator) -> None:
    before_ns = time.monotonic_ns()
    memory = CudaMemory(DEVICE)
    assert allocator.looked.wait(10)
    points = memory.take_timeline()
    assert [point[1:] for point in points] == [(512, 100), (512, 300)]
    assert before_ns <= points[0][0] <= points[1][0] <= time.monotonic_ns()
    assert memory.take_timeline() == []
