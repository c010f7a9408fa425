"""The RAM of a CUDA context, which the predicting process measures where there is a GPU."""

import mmap
from typing import Any

import pytest
import torch

from weighin.predict import process
from weighin.predict.process import gpu_bytes
from weighin.units import MIB

HELD: list[mmap.mmap] = []


def held(mib: int) -> None:
    """Take memory for the rest of the test, as a driver does."""
    memory = mmap.mmap(-1, mib * MIB, flags=mmap.MAP_PRIVATE)
    for offset in range(0, len(memory), mmap.PAGESIZE):
        memory[offset] = 1
    HELD.append(memory)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A GPU whose context takes 30 MiB, and whose kernels take 20 MiB."""
    zeros = torch.zeros

    def on_the_gpu(size: int, device: str) -> torch.Tensor:
        assert device == "cuda"
        held(30)
        return zeros(min(size, 1))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch, "zeros", on_the_gpu)
    monkeypatch.setattr(process, "touch", lambda _: held(20))
    yield
    HELD.clear()


@pytest.mark.usefixtures("gpu")
def test_a_context_and_the_kernels_that_read_a_model_are_measured() -> None:
    context_bytes, kernels_bytes = gpu_bytes()
    assert context_bytes == pytest.approx(30 * MIB, abs=2 * MIB)
    assert kernels_bytes == pytest.approx(20 * MIB, abs=2 * MIB)


def test_a_machine_without_a_gpu_has_no_context(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_bytes() == (0, 0)


@pytest.mark.usefixtures("gpu")
def test_a_full_gpu_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    assert gpu_bytes() == (0, 0)
