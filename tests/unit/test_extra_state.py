"""Extra states of modules: values of a state dict that are no tensors."""

import argparse
import io
import logging
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from factories import refused
from torch import nn

from weighin import load_streaming


class Stateful(nn.Module):
    """A module with an extra state that is not a tensor."""

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


def stripping() -> Stateful:
    """Return a model with a hook that takes the prefix away."""
    model = Stateful()
    strip = nn.modules.utils.consume_prefix_in_state_dict_if_present
    hook = lambda _, state, *__: strip(state, "wrapped.")  # noqa: E731
    model.register_load_state_dict_pre_hook(hook)  # type: ignore[no-untyped-call]
    return model


@pytest.mark.parametrize("prefix", ["", "wrapped", "wrapped."])
@pytest.mark.parametrize("is_bare", [False, True])
def test_an_extra_state_is_found_without_its_prefix(
    tmp_path: Path, prefix: str, is_bare: bool
) -> None:
    """By the call, also of an extra state without the prefix; or by a hook of the model."""
    saved = {f"wrapped.{name}": value for name, value in Stateful({"step": 2}).state_dict().items()}
    if is_bare and prefix:
        saved["_extra_state"] = saved.pop("wrapped._extra_state")
    torch.save({"model": saved}, tmp_path / "model.pt")
    build = Stateful if prefix else stripping
    ours: Any = load_streaming(build, tmp_path / "model.pt", key="model", strip_prefix=prefix)
    assert ours.extra == {"step": 2}


def test_what_cannot_be_an_extra_state_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    torch.save(Stateful([Foreign()]).state_dict(), path)
    assert refused(load_streaming, Stateful, path) == (
        f"{path}: '_extra_state' cannot be read, because the file holds {__name__}.Foreign, which was"
        " NOT executed\n"
        "load the checkpoint with torch.load and the code that defines the object"
    )
    torch.save({"model": {**nn.Linear(2, 1).state_dict(), "decay": np.float64(0.9)}}, path)
    said = refused(load_streaming, nn.Linear(2, 1), path, key="model")
    assert "does not fit this model, keys: 1 unexpected (decay)" in said


def test_a_model_without_extra_states_gets_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, model = tmp_path / "c.pt", nn.Linear(2, 1)
    torch.save({**model.state_dict(), "_extra_state": {"a": 1}, "x._extra_state": None}, path)
    with caplog.at_level(logging.WARNING):
        loaded: Any = load_streaming(lambda: nn.Linear(2, 1), path)
    assert torch.equal(loaded.weight, model.weight)
    assert caplog.messages == ["no module of this model takes the extra state of _extra_state"]
