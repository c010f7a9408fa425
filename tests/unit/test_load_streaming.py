"""Streaming: the right model from every layout, in every dtype, with what shares memory still shared."""

import copy
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from weighin.checkpoint.checksum import pieces_of
from weighin.errors import CheckpointError
from weighin.models.tied import tied
from weighin.stream import formats
from weighin.stream.construct import WriteLog, without_weights
from weighin.stream.model import Granularity, _Placer, load_streaming
from weighin.stream.slices import Fill, TensorPlan
from weighin.stream.write import write as write_checkpoint

KWARGS = {"vocab_size": 128, "emb_dim": 32, "n_layers": 2, "n_heads": 2}


def seeded() -> torch.nn.Module:
    torch.manual_seed(0)
    return tied(**KWARGS)


def blank() -> torch.nn.Module:
    return without_weights(lambda: tied(**KWARGS))


def saved(folder: Path, fmt: str = "pt") -> Path:
    state = seeded().state_dict()
    firsts: dict[int, str] = {}
    plans = []
    for name, tensor in state.items():
        first = firsts.setdefault(tensor.data_ptr(), name)
        plans.append(
            TensorPlan(name, tuple(tensor.shape), tensor.dtype, first if first != name else None)
        )
    path = formats.checkpoint_in(folder, fmt)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_checkpoint(fmt, path, plans, lambda name: pieces_of(state[name]))
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


@pytest.mark.parametrize("fmt", formats.NAMES)
def test_every_layout_gives_the_right_model(fmt: str, tmp_path: Path) -> None:
    assert_right(load_streaming(blank(), saved(tmp_path, fmt)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_it_converts_on_the_way(dtype: torch.dtype, tmp_path: Path) -> None:
    assert_right(load_streaming(blank(), saved(tmp_path), dtype=dtype), dtype)


@pytest.mark.parametrize("fmt", formats.NAMES)
def test_a_function_that_builds_the_model_is_called_without_weights(
    fmt: str, tmp_path: Path
) -> None:
    assert_right(load_streaming(lambda: tied(**KWARGS), saved(tmp_path, fmt)))


@pytest.mark.parametrize("granularity", ["all", "module", "tensor"])
def test_tied_weights_stay_tied_at_every_granularity(
    granularity: Granularity, tmp_path: Path
) -> None:
    assert_right(load_streaming(blank(), saved(tmp_path), granularity=granularity, threads=1))


def test_a_model_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    model = seeded()
    model.get_submodule("rotary").to("meta")
    with pytest.raises(CheckpointError) as caught:
        load_streaming(model, path)
    assert str(caught.value) == (
        f"{path}: not loaded, because the model has rotary.cos, rotary.sin on the meta device\n"
        "pass load_streaming the function that builds the model, not a model on the meta device"
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


def test_memory_that_is_there_is_filled_where_it_is(tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = tied(**KWARGS)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    assert_right(load_streaming(model, saved(tmp_path)))
    assert before == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


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


def test_parameters_keep_requires_grad(tmp_path: Path) -> None:
    model = blank()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    load_streaming(model, saved(tmp_path))
    assert not any(parameter.requires_grad for parameter in model.parameters())


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
    path = saved(tmp_path)
    register = torch.nn.Module.register_buffer
    threads_before = torch.get_num_threads()
    errors: list[BaseException] = []
    stop = threading.Event()

    def run(work: Callable[[], object]) -> None:
        try:
            while not stop.is_set():
                work()
        except BaseException as error:
            errors.append(error)

    right = seeded().state_dict()

    def load() -> None:
        found = load_streaming(lambda: tied(**KWARGS), path).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in right.items())

    def build() -> None:
        model = torch.nn.BatchNorm1d(64)
        assert torch.equal(model.weight, torch.ones(64))
        assert torch.equal(model.get_buffer("running_var"), torch.ones(64))
        assert not torch.nn.Linear(8, 8).weight.is_meta

    pool = [threading.Thread(target=run, args=(work,)) for work in (load, load, build)]
    for thread in pool:
        thread.start()
    time.sleep(1)
    stop.set()
    for thread in pool:
        thread.join()
    assert errors == []
    assert torch.nn.Module.register_buffer is register
    assert torch.get_num_threads() == threads_before


def test_the_first_cpu_is_the_cpu(tmp_path: Path) -> None:
    model = tied(**KWARGS)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    load_streaming(model, saved(tmp_path), device="cpu:0")
    assert before == {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_a_constructor_that_looks_at_values_is_built_with_them(tmp_path: Path) -> None:
    class Looks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
            self.scales = [one.weight.abs().max().item() for one in (self.first, self.second)]

    torch.manual_seed(0)
    right = Looks()
    torch.save(Looks().state_dict(), tmp_path / "looks.pt")
    torch.manual_seed(0)
    model = load_streaming(Looks, tmp_path / "looks.pt")
    assert model.get_parameter("first.weight").abs().max().item() != right.scales[0]
    assert isinstance(model, Looks)
    assert model.scales == right.scales


def test_a_model_that_shares_a_foreign_tensor_shares_it_still(tmp_path: Path) -> None:
    """As with torch: what the checkpoint holds arrives there, and the memory stays where it was."""
    teacher = torch.nn.Embedding(8, 4)
    torch.save({"weight": torch.ones(8, 4)}, tmp_path / "student.pt")
    address = teacher.weight.data_ptr()

    def build() -> torch.nn.Module:
        student = torch.nn.Embedding(8, 4)
        student.weight = teacher.weight
        return student

    model = load_streaming(build, tmp_path / "student.pt")
    assert model.get_parameter("weight") is teacher.weight
    assert teacher.weight.data_ptr() == address
    assert torch.equal(teacher.weight, torch.ones(8, 4))


def test_weights_that_torch_would_align_are_aligned_whatever_their_place_in_the_file(
    tmp_path: Path,
) -> None:
    right = torch.nn.Sequential(torch.nn.Linear(1000, 1000), torch.nn.Linear(1000, 3))
    save_file(right.state_dict(), tmp_path / "odd.safetensors", metadata={"odd": "x" * 5})
    model = load_streaming(lambda: copy.deepcopy(right), tmp_path / "odd.safetensors")
    assert all(parameter.data_ptr() % 64 == 0 for parameter in model.parameters())
