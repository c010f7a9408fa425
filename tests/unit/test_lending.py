"""Memory that lends itself as buffers: whose it is, how much, and that the load stays right."""

from pathlib import Path

import pytest
import torch

from harness import page_cache
from harness.checkpoint import filling, layouts
from harness.checkpoint.filling import Stretch, prepare
from harness.checkpoint.gathering import ALIGNMENT
from harness.checkpoint.lending import LENT_BYTES, lend
from harness.checkpoint.memory import memory_of
from harness.checkpoint.streaming import load_streaming

MIB = 1024**2
SIZES = {"a": 3 * MIB, "b": 40 * MIB, "c": 5 * MIB, "d": 4096, "e": 7 * MIB}  # bytes in float32
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    state = {name: torch.randn(size // 4) for name, size in SIZES.items()}
    path = tmp_path_factory.mktemp("lending") / "model.pt"
    torch.save(state, path)
    return path, state


def stretches(path: Path, dtype: torch.dtype | None) -> dict[str, Stretch]:
    return {one.name: prepare([one], {}, CPU, dtype) for one in layouts.read(path)[1]}


def test_the_largest_lend_until_each_thread_has_a_buffer(
    saved: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    all_ = stretches(saved[0], torch.bfloat16)
    lent = lend(list(all_.values()), threads=3)
    assert [len(buffer) for buffer in lent.buffers] == [LENT_BYTES, 4 * MIB, 3.5 * MIB]
    assert [one.slices[0].name for one in lent.lenders] == ["b", "e"]
    assert [one.slices[0].name for one in lent.borrowers] == ["a", "c", "d"]
    for buffer, of in zip(lent.buffers, ("b", "b", "e"), strict=True):
        lender = all_[of].memory
        buffer[0] = buffer[-1] = 77
        at = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        assert at % ALIGNMENT == 0
        assert lender.data_ptr() <= at
        assert at + len(buffer) <= lender.data_ptr() + lender.nbytes


@pytest.mark.parametrize(("dtype", "threads"), [(None, 3), (torch.bfloat16, 8)])
def test_nobody_lends_where_nothing_is_converted_or_nobody_would_borrow(
    saved: tuple[Path, dict[str, torch.Tensor]], dtype: torch.dtype | None, threads: int
) -> None:
    large = [one for one in stretches(saved[0], dtype).values() if one.memory.nbytes > 2 * MIB]
    lent = lend(large, threads)
    assert (lent.buffers, lent.borrowers, lent.lenders) == ((), tuple(large), ())


class Five(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name, size in SIZES.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(size // 4)))


@pytest.mark.parametrize(
    ("dtype", "threads", "lending"),
    [
        (torch.bfloat16, 1, 1),
        (torch.bfloat16, 3, 2),
        (torch.bfloat16, None, 3),
        (torch.float64, 3, 1),
        (torch.float64, None, 4),
    ],
)
def test_what_was_read_by_way_of_lent_memory_is_right_and_so_is_the_lender(
    saved: tuple[Path, dict[str, torch.Tensor]],
    dtype: torch.dtype,
    threads: int | None,
    lending: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lenders: list[int] = []

    def noting(given: list[Stretch], count: int) -> object:
        lent = lend(given, count)
        lenders.append(len(lent.lenders))
        for one in lent.lenders:
            memory_of(one.memory)[:] = b"\xff" * one.memory.nbytes
        return lent

    monkeypatch.setattr(filling, "lend", noting)
    path, state = saved
    assert page_cache.drop([path]) == 0
    with torch.device("meta"):
        model = Five()
    load_streaming(model, path, dtype=dtype, threads=threads)
    assert lenders == [lending]
    for name, tensor in state.items():
        assert torch.equal(model.state_dict()[name], tensor.to(dtype)), name


def test_torch_has_its_threads_again_after_a_load(
    saved: tuple[Path, dict[str, torch.Tensor]],
) -> None:
    before = torch.get_num_threads()
    with torch.device("meta"):
        model = Five()
    load_streaming(model, saved[0], dtype=torch.bfloat16)
    assert torch.get_num_threads() == before
