"""Streaming: the right model from every layout, in every dtype, with what shares memory still shared."""

import argparse
import copy
import io
import logging
import mmap
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import refused
from model_differences import differences
from pytest import MonkeyPatch
from safetensors.torch import save_file
from state_files import write_state
from torch import nn

from weighin.errors import CheckpointError
from weighin.models.tied import tied
from weighin.probes.process import memory_of, read_status
from weighin.run import loads
from weighin.stream import formats
from weighin.stream.construct import WriteLog, without_weights
from weighin.stream.load_streaming import _Placer, load_streaming
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


@pytest.mark.parametrize("fmt", formats.NAMES)
def test_every_layout_gives_the_right_model(fmt: str, tmp_path: Path) -> None:
    """Also by one thread, and in another dtype, in which tied weights stay tied."""
    path, right = saved(tmp_path, fmt), seeded()
    assert differences(load_streaming(blank(), path), right) == []
    assert differences(load_streaming(lambda: tied(**KWARGS), path, threads=1), right) == []
    found = load_streaming(blank(), path, dtype=torch.float16)
    assert differences(found, right.half()) == []


def test_a_model_on_the_meta_device_is_refused(tmp_path: Path) -> None:
    (model := seeded()).get_submodule("rotary").to("meta")
    assert refused(load_streaming, model, path := saved(tmp_path)) == (
        f"{path}: not loaded: tensors of the model are on the meta device: rotary.cos, rotary.sin\n"
        "pass load_streaming a function that builds the model on the CPU, not on the meta device"
    )


def test_another_models_checkpoint_is_refused_before_anything_is_filled(tmp_path: Path) -> None:
    torch.save({"weight": torch.ones(3, 3), "extra": torch.ones(1)}, path := tmp_path / "other.pt")
    before = (model := nn.Linear(2, 3)).weight.clone()
    assert refused(load_streaming, model, path) == (
        f"{path}: does not fit this model: 1 key missing (bias); 1 key unexpected (extra); "
        "1 key of another shape (weight)\n"
        "choose the checkpoint's own model, or correct the arguments of the model"
    )
    assert torch.equal(model.weight, before)


class Both(nn.Linear):
    def __init__(self) -> None:
        super().__init__(200, 200)
        self.register_buffer("same", self.weight)


def test_a_parameter_that_is_a_buffer_too_stays_both(tmp_path: Path) -> None:
    torch.save((right := Both()).state_dict(), tmp_path / "both.pt")
    model = load_streaming(Both, tmp_path / "both.pt", dtype=torch.bfloat16)
    assert model.same is model.weight
    assert torch.equal(model.get_parameter("weight"), right.weight.bfloat16())


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])
def test_memory_that_is_there_is_filled_where_it_is(device: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = tied(**KWARGS).requires_grad_(False)
    before = [parameter.data_ptr() for parameter in model.parameters()]
    load_streaming(model, saved(tmp_path), device=device)
    assert differences(model, seeded().requires_grad_(False)) == []
    assert before == [parameter.data_ptr() for parameter in model.parameters()]


def test_memory_of_another_device_is_freed_before_the_next_is_allocated(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)))
    torch.save(model.state_dict(), path := tmp_path / "model.pt")
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
    path = saved(tmp_path)
    both = seeded(), seeded()  # a comparison writes gradients into its models
    register, threads_before = nn.Module.register_buffer, torch.get_num_threads()
    together = threading.Barrier(3, timeout=60)

    def load(right: nn.Module) -> None:
        assert differences(load_streaming(lambda: tied(**KWARGS), path), right) == []

    def build() -> None:
        for _ in range(50):
            model = nn.BatchNorm1d(64)
            assert torch.equal(model.weight, torch.ones(64))
            assert torch.equal(model.get_buffer("running_var"), torch.ones(64))

    def often(act: Callable[[], None]) -> None:
        for _ in range(3):
            together.wait()
            act()

    with ThreadPoolExecutor(3) as pool:
        acts: list[Callable[[], None]] = [build, *(partial(load, right) for right in both)]
        for done in [pool.submit(often, act) for act in acts]:
            done.result()
    assert nn.Module.register_buffer is register
    assert torch.get_num_threads() == threads_before


def test_a_kernel_without_huge_pages_loads_as_well(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """Where the kernel refuses the advice, and where Python does not know it."""
    torch.save((right := nn.Linear(1000, 2000)).state_dict(), path := tmp_path / "model.pt")

    def check() -> None:
        assert differences(load_streaming(lambda: nn.Linear(1000, 2000), path), right) == []
        with loads.held(3 * MIB) as held_bytes:
            assert held_bytes == 3 * MIB

    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999)
    check()
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE")
    check()


# Writes that nobody has looked at: what a real construction would leave, at the cost of what is looked at


class Looks(nn.Module):
    """Looks at values by operations and by what is none, seeds amidst, and calls all of ``torch.nn.init``."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3)
        torch.manual_seed(5)
        self.two = copy.deepcopy(self.one)
        self.scale = self.one.weight.abs().max().item()
        self.listed = self.one.bias.tolist()
        self.array = torch.empty(3).fill_(2.0).numpy()
        self.narrow = nn.Linear(3, 3).half()
        self.kept = [self.narrow.weight]
        self.register_buffer("noise", torch.randn(3), persistent=False)
        self.register_buffer("mask", torch.ones(600, 600).triu(1), persistent=False)
        self.turned = nn.Parameter(torch.empty(5, 6).t())
        nn.init.kaiming_uniform_(self.turned, mode="fan_out", nonlinearity="relu")
        self.named = nn.Parameter(torch.empty(4, 6, dtype=torch.bfloat16))
        nn.init.uniform_(tensor=self.named, a=-2, b=3)
        self.mixed = nn.Parameter(torch.empty(2, 6))
        nn.init.kaiming_uniform_(self.mixed, 1, mode="fan_out")
        self.own = nn.Parameter(torch.empty(2, 6))
        nn.init.uniform_(self.own, generator=torch.Generator().manual_seed(3))
        self.refused = ""
        try:
            nn.init.kaiming_uniform_(torch.empty(3))  # as torch refuses it
        except ValueError as error:
            self.refused = str(error)
        self.last = nn.Parameter(torch.empty(5, 6))
        nn.init.normal_(self.last, 1, 0.5)


def test_all_is_as_a_real_construction_leaves_it() -> None:
    log = WriteLog()
    torch.manual_seed(0)
    with log.recording():
        model = Looks()
    log.finish()
    after = torch.rand(3)
    torch.manual_seed(0)
    right = Looks()
    assert torch.equal(after, torch.rand(3))
    assert differences(model, right) == []
    assert (model.array == right.array).all()
    assert all(parameter._version > 0 for parameter in (model.turned, model.named, model.last))
    assert "Fan in" in right.refused


@pytest.mark.usefixtures("no_garbage")
def test_what_nobody_looks_at_takes_no_memory() -> None:
    before = memory_of(read_status()).anon_bytes
    model = without_weights(lambda: nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(8))))
    assert sum(one.nbytes for one in model.parameters()) > 512 * MIB
    assert memory_of(read_status()).anon_bytes - before < 16 * MIB


def test_a_write_raises_where_it_is_written() -> None:
    with pytest.raises(RuntimeError, match="must match the size"), WriteLog().recording():
        torch.empty(3).copy_(torch.ones(2))


def test_other_threads_build_as_ever() -> None:
    def beside() -> torch.Tensor:
        torch.manual_seed(3)
        return nn.Linear(3, 3).weight

    class Slow(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            with ThreadPoolExecutor(1) as pool:
                found.append(pool.submit(beside).result())

    found: list[torch.Tensor] = []
    without_weights(Slow)
    assert torch.equal(found[0], beside())


# Extra states of modules: values of a state dict that are no tensors


class Stateful(nn.Module):
    def __init__(self, extra: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Foreign:
    """An object that only its own class can rebuild."""


SHARED = [1, 2.5, "x", b"y", None, True]
STATES: dict[str, Any] = {
    "plain": {"a": SHARED, "b": (SHARED, {3: OrderedDict(c=1)})},
    "scalars": {"lr": np.float64(0.125), "steps": np.int64(7), "half": np.float16(1.5)},
    "arrays": [np.arange(6, dtype=">i4").reshape(2, 3), np.asfortranarray(np.eye(3)), np.zeros((0, 2))],
    "namespace": argparse.Namespace(size=torch.Size([2, 3]), dtype=torch.bfloat16, device=torch.device("cpu")),
    "stream": io.BytesIO(b"recipe"),
    "none": None,
    "tensors": {"scale": torch.arange(3.0)},
    "gaps": torch.arange(6.0)[::2],
}  # fmt: skip


def same(ours: Any, theirs: Any) -> bool:
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, argparse.Namespace):
        ours, theirs = vars(ours), vars(theirs)
    if isinstance(ours, dict):
        return [*ours] == [*theirs] and all(same(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, np.ndarray | np.generic):
        return ours.dtype == theirs.dtype and bool(np.array_equal(ours, theirs))
    if isinstance(ours, torch.Tensor):
        return ours.stride() == theirs.stride() and torch.equal(ours, theirs)
    return bool(ours.getvalue() == theirs.getvalue() if isinstance(ours, io.BytesIO) else ours == theirs)  # fmt: skip


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", STATES)
def test_a_module_gets_the_extra_state_as_from_torch(
    tmp_path: Path, name: str, is_zip: bool
) -> None:
    path = tmp_path / "c.pt"
    saved = nn.ModuleDict({"inner": Stateful(STATES[name])}).state_dict()
    torch.save({"model": saved}, path, _use_new_zipfile_serialization=is_zip)
    expected: Any = nn.ModuleDict({"inner": Stateful()})
    expected.load_state_dict(torch.load(path, weights_only=False)["model"])
    model: Any = load_streaming(lambda: nn.ModuleDict({"inner": Stateful()}), path, key="model")
    assert same(model["inner"].extra, expected["inner"].extra)
    if name == "plain":
        assert model["inner"].extra["b"][0] is model["inner"].extra["a"]


strip = nn.modules.utils.consume_prefix_in_state_dict_if_present


def stripping() -> Stateful:
    """Return a model with a hook that takes the prefix away."""
    untyped: Any = (model := Stateful())
    untyped.register_load_state_dict_pre_hook(lambda _, state, *__: strip(state, "wrapped."))
    return model


class Stripping(Stateful):
    """A module that takes the prefix away itself."""

    def _load_from_state_dict(self, state: Any, *rest: Any) -> None:
        strip(state, "wrapped.")
        super()._load_from_state_dict(state, *rest)


@pytest.mark.parametrize(
    ("build", "prefix", "extra"),
    [
        *(
            (Stateful, prefix, extra)
            for prefix in ("wrapped", "wrapped.")
            for extra in ("", "wrapped.")
        ),
        (stripping, "", "wrapped."),
        (Stripping, "", "wrapped."),
    ],
)
def test_an_extra_state_is_found_without_its_prefix(
    tmp_path: Path, build: Any, prefix: str, extra: str
) -> None:
    """Also one that the file has without the prefix."""
    saved = {"wrapped.weight": torch.ones(3), f"{extra}_extra_state": {"step": 2}}
    torch.save({"model": saved}, path := tmp_path / "model.pt")
    ours: Any = load_streaming(build, path, key="model", strip_prefix=prefix)
    if prefix:
        saved = {name.removeprefix("wrapped."): one for name, one in saved.items()}
    (theirs := build()).load_state_dict(saved)
    assert ours.extra == theirs.extra == {"step": 2}


def test_what_cannot_be_an_extra_state_is_refused_by_its_name(tmp_path: Path) -> None:
    torch.save(Stateful([Foreign()]).state_dict(), path := tmp_path / "c.pt")
    assert refused(load_streaming, Stateful, path) == (
        f"{path}: '_extra_state' cannot be read, because the file holds {__name__}.Foreign, which was"
        " NOT executed\n"
        "load the checkpoint with torch.load and the code that defines the object"
    )
    torch.save({"model": {**nn.Linear(2, 1).state_dict(), "decay": np.float64(0.9)}}, path)
    said = refused(load_streaming, nn.Linear(2, 1), path, key="model")
    assert "does not fit this model: 1 key unexpected (decay)" in said


def test_a_model_without_extra_states_gets_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, model = tmp_path / "c.pt", nn.Linear(2, 1)
    torch.save({**model.state_dict(), "_extra_state": {"a": 1}, "x._extra_state": None}, path)
    with caplog.at_level(logging.WARNING):
        loaded: Any = load_streaming(lambda: nn.Linear(2, 1), path)
    assert torch.equal(loaded.weight, model.weight)
    assert caplog.messages == ["no module of this model takes these extra states: _extra_state"]


# What the code of a module sees: the calls that torch makes for the same file


class Plain(nn.ModuleDict):
    def __init__(self, calls: list[Any], **children: nn.Module) -> None:
        super().__init__(children)
        self.calls = calls
        self.weight = nn.Parameter(torch.zeros(2))


class Recording(Plain):
    """Records what torch gives it to load, and takes its child's weights also under their old names."""

    _version = 3

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        self.calls.append((prefix, [*state], dict(metadata)))
        for key in [key for key in state if key.startswith(f"{prefix}old.")]:
            state[key.replace("old.", "a.", 1)] = state.pop(key)
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def nested(kind: Any, calls: list[Any]) -> nn.Module:
    inner = kind(calls, a=nn.Linear(2, 2), norm=nn.LayerNorm(2))
    return nn.ModuleDict({"a": nn.ModuleDict({"b": inner}), "ab": kind(calls)})


def renamed(state: Any) -> None:
    for leaf in ("weight", "bias"):
        state[f"a.b.old.{leaf}"] = state.pop(f"a.b.a.{leaf}")


def less_and_more(state: Any) -> None:
    del state["ab.weight"], state["a.b.norm.bias"]
    state |= dict.fromkeys(("a.", "a..b", "a.b.more", "abc.weight"), torch.ones(1))


def marked(state: Any) -> None:
    state["a.b.a.weight"] = state["a.b.a.weight"].double()  # a mark keeps the file's dtype
    state._metadata["a.b.a"] = {"version": 1, "assign_to_params_buffers": True}


CHANGES: dict[str, Any] = {
    "nothing": list, "a renamed child": renamed, "less and more": less_and_more, "a marked module": marked,
}  # fmt: skip


@pytest.mark.parametrize("kind", [Recording, Plain])
@pytest.mark.parametrize("change", CHANGES)
def test_the_code_of_a_module_gets_what_torch_gives_it(
    change: str, kind: Any, tmp_path: Path
) -> None:
    def loaded(load: Any) -> tuple[nn.Module, list[Any], str]:
        calls: list[Any] = []
        model, error = nested(kind, calls), ""
        try:
            load(model)
        except (RuntimeError, CheckpointError) as raised:  # ours has torch's as its cause
            error = str(raised.__cause__ or raised)
        return model, calls, error

    state: Any = nested(kind, []).state_dict()
    for key, one in state.items():
        state[key] = torch.randn(one.shape) if one.is_floating_point() else one
    CHANGES[change](state)
    torch.save(state, path := tmp_path / "model.pt")
    model, calls, error = loaded(lambda model: load_streaming(model, path))
    right, by_torch, wanted = loaded(lambda model: model.load_state_dict(torch.load(path)))
    assert (calls, error) == (by_torch, wanted)
    assert bool(error) == (
        change == "less and more" or (change, kind) == ("a renamed child", Plain)
    )
    if not error:
        assert differences(model, right) == []
    if change == "nothing":  # a load counts as one change of each tensor
        versions = [[one._version for one in each.parameters()] for each in (model, right)]
        assert versions[0] == versions[1]
