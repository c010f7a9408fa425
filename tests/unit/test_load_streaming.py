"""Streaming: the right model from every layout, in every dtype, with what shares memory still shared."""

import copy
import mmap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from cells import write_state
from safetensors.torch import save_file
from torch import nn

from weighin.errors import CheckpointError
from weighin.models.tied import tied
from weighin.run import loads
from weighin.stream import formats
from weighin.stream.construct import WriteLog, without_weights
from weighin.stream.model import Granularity, _Placer, load_streaming
from weighin.stream.slices import Fill
from weighin.units import MIB

KWARGS = {"vocab_size": 128, "emb_dim": 32, "n_layers": 2, "n_heads": 2}


def seeded() -> torch.nn.Module:
    torch.manual_seed(0)
    return tied(**KWARGS)


def blank() -> torch.nn.Module:
    return without_weights(lambda: tied(**KWARGS))


def saved(folder: Path, fmt: str = "pt") -> Path:
    path = formats.checkpoint_in(folder, fmt)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_state(path, fmt, seeded().state_dict())
    return path


def assert_right(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> None:
    wanted = seeded().to(dtype)
    for found, right in (
        (dict(model.named_parameters()), dict(wanted.named_parameters())),
        (dict(model.named_buffers()), dict(wanted.named_buffers())),
    ):
        assert found.keys() == right.keys()  # tied names are one parameter in both
        for name, tensor in right.items():
            assert found[name].dtype == tensor.dtype, name
            assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("how", ["built", "function"])
@pytest.mark.parametrize("fmt", formats.NAMES)
def test_every_layout_gives_the_right_model(fmt: str, how: str, tmp_path: Path) -> None:
    model = blank() if how == "built" else lambda: tied(**KWARGS)
    assert_right(load_streaming(model, saved(tmp_path, fmt)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("granularity", ["all", "module", "tensor"])
def test_it_converts_on_the_way_and_keeps_ties_at_every_granularity(
    granularity: Granularity, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = saved(tmp_path)
    assert_right(load_streaming(blank(), path, granularity=granularity, threads=1))
    assert_right(load_streaming(blank(), path, granularity=granularity, dtype=dtype), dtype)


def test_a_model_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    (model := seeded()).get_submodule("rotary").to("meta")
    with pytest.raises(CheckpointError) as caught:
        load_streaming(model, path := saved(tmp_path))
    assert str(caught.value) == (
        f"{path}: not loaded, because the model has rotary.cos, rotary.sin on the meta device\n"
        "pass load_streaming a function that builds the model on the CPU, not on the meta device"
    )


class AlsoABuffer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(200, 200))
        self.register_buffer("same", self.weight)


def test_a_parameter_that_is_a_buffer_too_stays_both(tmp_path: Path) -> None:
    torch.save(AlsoABuffer().state_dict(), tmp_path / "both.pt")
    model = load_streaming(AlsoABuffer, tmp_path / "both.pt", dtype=torch.bfloat16)
    assert model.get_buffer("same") is model.get_parameter("weight")
    assert torch.equal(model.get_parameter("weight"), torch.ones(200, 200, dtype=torch.bfloat16))


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_memory_that_is_there_is_filled_where_it_is(device: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = tied(**KWARGS)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert_right(load_streaming(model, saved(tmp_path), device=device))
    assert before == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_memory_on_another_device_is_allocated_after_that_of_the_tensor_before_is_freed(
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


class Views(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        whole = torch.arange(24.0).view(4, 6)
        self.register_buffer("whole", whole)
        self.register_buffer("column", whole[:, 2])
        self.register_buffer("turned", whole.t())


def test_views_of_one_storage_are_read_once_and_stay_views(tmp_path: Path) -> None:
    torch.save(Views().state_dict(), tmp_path / "views.pt")
    model = without_weights(Views)
    load_streaming(model, tmp_path / "views.pt")
    for name, right in Views().state_dict().items():
        found = model.get_buffer(name)
        assert torch.equal(found, right)
        assert found.stride() == right.stride()
        assert found.untyped_storage().data_ptr() == model.get_buffer("whole").data_ptr()


def test_large_tensors_own_their_memory_and_survive_saving(tmp_path: Path) -> None:
    model = torch.nn.Linear(1024, 1025)
    torch.save(model.state_dict(), tmp_path / "large.pt")
    loaded = without_weights(lambda: torch.nn.Linear(1024, 1025))
    load_streaming(loaded, tmp_path / "large.pt")
    assert loaded.weight.untyped_storage().nbytes() == loaded.weight.nbytes
    torch.save(loaded.state_dict(), tmp_path / "again.pt")
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    assert torch.equal(again["weight"], model.weight)
    assert torch.equal(again["bias"], model.bias)


def test_another_models_checkpoint_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    path = tmp_path / "other.pt"
    torch.save({"weight": torch.ones(3, 3), "extra": torch.ones(1)}, path)
    model = torch.nn.Linear(2, 3)
    before = model.weight.clone()
    with pytest.raises(CheckpointError) as caught:
        load_streaming(model, path)
    assert str(caught.value) == (
        f"{path}: does not fit this model, keys: 1 missing (bias); 1 unexpected (extra); "
        "1 of another shape (weight)\n"
        "choose the model that this checkpoint was saved from, or correct its arguments"
    )
    assert torch.equal(model.weight, before)


def test_threads_that_build_and_load_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    path, right = saved(tmp_path), seeded().state_dict()
    register, threads_before = torch.nn.Module.register_buffer, torch.get_num_threads()
    loaded = threading.Barrier(3, timeout=60)

    def load() -> None:
        for _ in range(3):
            loaded.wait()
            found = load_streaming(lambda: tied(**KWARGS), path).state_dict()
            assert all(torch.equal(found[name], tensor) for name, tensor in right.items())

    def build() -> None:
        for _ in range(3):
            loaded.wait()
            for _ in range(50):
                model = torch.nn.BatchNorm1d(64)
                assert torch.equal(model.weight, torch.ones(64))
                assert torch.equal(model.get_buffer("running_var"), torch.ones(64))
                assert not torch.nn.Linear(8, 8).weight.is_meta

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(work) for work in (load, load, build)]:
            done.result()
    assert torch.nn.Module.register_buffer is register
    assert torch.get_num_threads() == threads_before


@pytest.mark.parametrize("advice", ["refused", "unknown to Python"])
def test_a_kernel_without_huge_pages_loads_all_the_same(
    advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if advice == "refused":
        monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)
    else:
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    right = torch.nn.Linear(1000, 2000)
    torch.save(right.state_dict(), tmp_path / "model.pt")
    found = load_streaming(lambda: torch.nn.Linear(1000, 2000), tmp_path / "model.pt")
    assert torch.equal(found.get_parameter("weight"), right.weight)
    with loads.held(3 * MIB) as held_bytes:
        assert held_bytes == 3 * MIB


def test_weights_that_torch_would_align_are_aligned_whatever_their_place_in_the_file(
    tmp_path: Path,
) -> None:
    right = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 3))
    save_file(right.state_dict(), tmp_path / "odd.safetensors", metadata={"odd": "x" * 5})
    model = load_streaming(lambda: copy.deepcopy(right), tmp_path / "odd.safetensors")
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())
