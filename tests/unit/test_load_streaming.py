"""Streaming: the right model from every layout, in every dtype, with what shares memory still shared."""

import copy
import mmap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import refused
from model_differences import differences
from safetensors.torch import save_file
from state_files import write_state
from torch import nn

from weighin.models.tied import tied
from weighin.run import loads
from weighin.stream import formats
from weighin.stream.construct import WriteLog, without_weights
from weighin.stream.model import Granularity, _Placer, load_streaming
from weighin.stream.slices import Fill
from weighin.units import MIB

KWARGS = {"vocab_size": 128, "emb_dim": 32, "n_layers": 2, "n_heads": 2}


def seeded() -> nn.Module:
    torch.manual_seed(0)
    return tied(**KWARGS)


def blank() -> nn.Module:
    return without_weights(lambda: tied(**KWARGS))


def saved(folder: Path, fmt: str = "pt") -> Path:
    path = formats.checkpoint_in(folder, fmt)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_state(path, fmt, seeded().state_dict())
    return path


@pytest.mark.parametrize("how", ["built", "function"])
@pytest.mark.parametrize("fmt", formats.NAMES)
def test_every_layout_gives_the_right_model(fmt: str, how: str, tmp_path: Path) -> None:
    model = blank() if how == "built" else lambda: tied(**KWARGS)
    assert differences(load_streaming(model, saved(tmp_path, fmt)), seeded()) == []


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("granularity", ["all", "module", "tensor"])
def test_every_granularity_converts_on_the_way_and_keeps_ties(
    granularity: Granularity, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    options: Any = {"threads": 1} if dtype is None else {"dtype": dtype}
    model = load_streaming(blank(), saved(tmp_path), granularity=granularity, **options)
    assert differences(model, seeded().to(dtype or torch.float32)) == []


def test_a_model_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    (model := seeded()).get_submodule("rotary").to("meta")
    assert refused(load_streaming, model, path := saved(tmp_path)) == (
        f"{path}: not loaded, because the model has rotary.cos, rotary.sin on the meta device\n"
        "pass load_streaming a function that builds the model on the CPU, not on the meta device"
    )


def both() -> nn.Module:
    model = nn.Linear(200, 200)
    model.register_buffer("same", model.weight)
    return model


def test_a_parameter_that_is_a_buffer_too_stays_both(tmp_path: Path) -> None:
    torch.save((right := both()).state_dict(), tmp_path / "both.pt")
    model = load_streaming(both, tmp_path / "both.pt", dtype=torch.bfloat16)
    assert model.get_buffer("same") is model.get_parameter("weight")
    assert torch.equal(model.get_buffer("same"), right.get_parameter("weight").bfloat16())


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_memory_that_is_there_is_filled_where_it_is(device: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = tied(**KWARGS).requires_grad_(False)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    load_streaming(model, saved(tmp_path), device=device)
    assert differences(model, seeded().requires_grad_(False)) == []
    assert before == [parameter.data_ptr() for parameter in model.parameters()]


def test_memory_of_another_device_is_freed_before_the_next_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    path = tmp_path / "model.pt"
    torch.save(model.state_dict(), path)
    memory = []
    for layer in model:
        values = np.zeros((4, 4), dtype=np.float32)
        layer.weight = nn.Parameter(torch.from_numpy(values))
        memory.append(weakref.ref(values))
    del values
    placer = _Placer(model, WriteLog(), torch.device("cuda", 0), None)
    empty, left = torch.empty, []

    def allocate(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        assert device.type == "cuda"
        left.append(sum(one() is not None for one in memory))
        return empty(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", allocate)
    pairs = zip(formats.read(path), model.parameters(), strict=True)
    placer.place([Fill(where, one.detach()) for where, one in pairs])
    assert left == [3, 2, 1]


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(24.0).view(4, 6)
        for name, one in {"whole": whole, "column": whole[:, 2], "turned": whole.t()}.items():
            self.register_buffer(name, one)


def test_views_of_one_storage_are_read_once_and_stay_views(tmp_path: Path) -> None:
    torch.save(Views().state_dict(), tmp_path / "views.pt")
    assert differences(load_streaming(without_weights(Views), tmp_path / "views.pt"), Views()) == []


def test_large_tensors_own_their_memory_which_torch_would_align(tmp_path: Path) -> None:
    """Whatever their place in the file."""
    right = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 3))
    save_file(right.state_dict(), tmp_path / "odd.safetensors", metadata={"odd": "x" * 5})
    model = load_streaming(lambda: copy.deepcopy(right), tmp_path / "odd.safetensors")
    assert differences(model, right) == []
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())
    large = model.get_parameter("0.weight")
    assert large.untyped_storage().nbytes() == large.nbytes


def test_threads_that_build_and_load_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    path, right = saved(tmp_path), seeded()
    register, threads_before = nn.Module.register_buffer, torch.get_num_threads()
    together = threading.Barrier(3, timeout=60)

    def load() -> None:
        for _ in range(3):
            together.wait()
            assert differences(load_streaming(lambda: tied(**KWARGS), path), right) == []

    def build() -> None:
        for _ in range(3):
            together.wait()
            for _ in range(50):
                model = nn.BatchNorm1d(64)
                assert torch.equal(model.weight, torch.ones(64))
                assert torch.equal(model.get_buffer("running_var"), torch.ones(64))

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(work) for work in (load, load, build)]:
            done.result()
    assert nn.Module.register_buffer is register
    assert torch.get_num_threads() == threads_before


@pytest.mark.parametrize("advice", ["refused", "unknown to Python"])
def test_a_kernel_without_huge_pages_loads_as_well(
    advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if advice == "refused":
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)
    else:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    right = nn.Linear(1000, 2000)
    torch.save(right.state_dict(), tmp_path / "model.pt")
    found = load_streaming(lambda: nn.Linear(1000, 2000), tmp_path / "model.pt")
    assert differences(found, right) == []
    with loads.held(3 * MIB) as held_bytes:
        assert held_bytes == 3 * MIB
