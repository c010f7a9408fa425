"""The weights of a checkpoint that holds more than them, or holds them under longer names.

weighin neither imports nor executes what lies beside them. tests/checkpoints/training_checkpoints.py
has the files of frameworks.
"""

import argparse
import enum
import io
import pickle
import time
import tracemalloc
from collections import OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harms import Command, complaint
from state_files import assert_same
from torch import nn

from weighin import load_streaming
from weighin.cell import ModelSpec
from weighin.checkpoint import inspect, truth
from weighin.errors import CheckpointError
from weighin.stream import formats, pickles
from weighin.stream.pretrained_library import Selection
from weighin.stream.slices import Checkpoint
from weighin.stream.torch_files import TorchFile
from weighin.units import MIB

SPEC = ModelSpec("m", "torch.nn:Linear", {"in_features": 3, "out_features": 2})
WEIGHTS = OrderedDict(nn.Linear(3, 2).state_dict())


class Kind(enum.Enum):
    """A class of its own, which a reader must not import."""

    FAST = 1


class Settings(dict[str, Any]):
    """A dict of its own class, as the settings of many frameworks are."""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "c.pt"


def load(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    return load_streaming(lambda: nn.Linear(3, 2), path, **options).state_dict()


# Keys and prefixes --------------------------------------------------------------------------------


def test_a_dotted_key_finds_nested_dicts_keys_with_dots_and_beginnings_of_names(path: Path) -> None:
    weights = {"w": torch.ones(2)}
    value = {"state": {"net.ema": weights}, "a.b": {"c": weights}, "a.b.w": torch.ones(2)}
    torch.save(value, path)
    for key in ("state.net.ema", "a.b.c"):
        assert [one.name for one in formats.read(path, Selection(key))] == ["w"]
    assert "not a flat state dict" in complaint(formats.read, path, Selection("a.b")).message
    state = {"model.w": torch.ones(2), "ema.w": torch.zeros(2), "models.w": torch.zeros(3)}
    torch.save(state, path)
    (one,) = formats.read(path, Selection("model"))
    assert (one.name, one.shape) == ("w", (2,))


@pytest.mark.parametrize("prefix", ["module.", "module", "_orig_mod."])
def test_a_prefix_is_removed_as_torch_removes_it(path: Path, prefix: str) -> None:
    wrapped = nn.ModuleDict({prefix.rstrip("."): (model := nn.Linear(3, 2))})
    torch.save(wrapped.state_dict(), path)
    state = torch.load(path, weights_only=True)
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, f"{prefix.rstrip('.')}.")
    slices: Any = formats.read(path, Selection(strip_prefix=prefix))
    assert [one.name for one in slices] == [*state]
    assert slices.metadata == {name: dict(local) for name, local in state._metadata.items()}
    assert_same(load(path, strip_prefix=prefix), model.state_dict())


def test_a_prefix_that_no_name_has_or_that_names_need_is_refused(path: Path) -> None:
    torch.save({"m.w": torch.ones(1), "w": torch.ones(1)}, path)
    assert str(complaint(formats.read, path, Selection(strip_prefix="module."))) == (
        f"{path}: no tensor's name begins with 'module.'\nthe tensors in the file are called: m.w, w"
    )
    error = complaint(formats.read, path, Selection(strip_prefix="m."))
    assert error.message == f"{path}: two tensors would have the same name without the prefix 'm.'"


def test_an_error_about_flat_names_proposes_what_would_fit(path: Path, tmp_path: Path) -> None:
    def index() -> object:
        return truth.index(SPEC, checkpoint=path, fmt="pt", folder=tmp_path)

    wrapped = {f"module._orig_mod.{name}": one for name, one in WEIGHTS.items()}
    torch.save(wrapped, path)
    repair = (
        "all names begin with 'module._orig_mod.': --set strip_prefix=module._orig_mod.;"
        " in load_streaming: strip_prefix='module._orig_mod.'; in a suite: strip_prefix: module._orig_mod."
    )
    assert complaint(load_streaming, nn.Linear(3, 2), path).repair == repair
    assert complaint(index).repair == repair
    torch.save({f"ema.{name}": one for name, one in WEIGHTS.items()} | wrapped, path)
    assert complaint(index).repair == (
        "select the weights: --key ema; in load_streaming: key='ema'; in a suite: key: ema"
    )
    torch.save({"module.other": torch.ones(1)}, path)
    assert complaint(index).repair.startswith("choose the model")


def test_an_indexed_selection_holds_the_plain_state_dict(path: Path, tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(nn.Linear(3, 2).parameters())
    names = OrderedDict((f"module.{name}", one) for name, one in WEIGHTS.items())
    value = {"model": names, "optimizer": optimizer.state_dict(), "args": {"flags": [True, None]}}
    torch.save(value | {"rng": torch.get_rng_state(), "steps": 2**40}, path)
    selection = Selection("model", "module.")
    truth.index(SPEC, checkpoint=path, fmt="pt", folder=tmp_path, selection=selection)
    nn.Linear(3, 2).load_state_dict(torch.load(tmp_path / "pt/model.pt", weights_only=True))
    found = inspect.inspect(path, selection)
    assert [one["name"] for one in found["tensors"]] == ["weight", "bias"]


def test_a_selection_keeps_the_versions_of_modules() -> None:
    slices = Checkpoint()
    slices.metadata = {"": {"version": 1}, "module": {"version": 2}, "module.norm": {"version": 3}}
    for only in (True, False):
        found = slices.without("module.", only=only)
        assert found.metadata == {"": {"version": 2}, "norm": {"version": 3}}


# Objects of other classes -------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_member_of_an_enumeration_is_named_as_python_writes_it(path: Path, protocol: int) -> None:
    torch.save({"model": {"kind": Kind.FAST}}, path, pickle_protocol=protocol)
    how = rf"({__name__}\.Kind|\S+\.getattr)"  # Python 3.11.0 to 3.11.3 ask for the attribute
    with pytest.raises(CheckpointError, match=rf"'model\.kind' refers to {how}\n"):
        formats.read(path, Selection("model"))


def test_a_reader_neither_executes_nor_imports(path: Path, tmp_path: Path) -> None:
    proof = tmp_path / "EXECUTED"
    torch.save({"model": WEIGHTS, "on_load": [Command(proof)]}, path)
    assert len(formats.read(path, Selection("model"))) == len(WEIGHTS)
    assert not proof.exists()


def marked() -> nn.Parameter:
    weight = nn.Parameter(torch.ones(2))
    weight.init = nn.init.zeros_  # type: ignore[attr-defined]
    return weight


@pytest.mark.parametrize(
    ("state", "only_tensors"),
    [
        ({"w": nn.Parameter(torch.ones(2))}, True),
        (OrderedDict(w=torch.ones(2, dtype=torch.bfloat16)), True),
        ({"w": marked()}, False),
        (defaultdict[str, Any](list, w=torch.ones(2)), False),
    ],
    ids=["a parameter", "an OrderedDict", "a parameter with a function", "a defaultdict"],
)
def test_a_state_dict_that_torch_load_refuses_is_read_but_not_handed_to_it(
    path: Path, state: Any, only_tensors: bool
) -> None:
    torch.save(state, path)
    slices = formats.read(path)
    assert ([one.name for one in slices], slices.only_tensors) == (["w"], only_tensors)
    if only_tensors:
        torch.load(path, weights_only=True)
        return
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("", {"_extra_state": {"lr": np.float64(0.5), "args": argparse.Namespace(a=1)}, "norm._extra_state": io.BytesIO(b"x")}),
        ("model", {"_extra_state": {"size": torch.Size([2])}, "head._extra_state": None}),
        ("model", {"decay": 0.9, "name": Kind.FAST}),
    ],
    ids=["extra states", "extra states under a key", "settings under a key"],
)  # fmt: skip
def test_extra_states_and_settings_are_values_beside_the_tensors(
    path: Path, key: str, values: dict[str, Any]
) -> None:
    state = {**WEIGHTS, **values}
    torch.save({key: state, "step": np.int64(1)} if key else state, path)
    slices: Any = formats.read(path, Selection(key))
    assert [one.name for one in slices] == [*WEIGHTS]
    assert [*slices.values] == [*values]


@pytest.mark.parametrize(
    ("value", "message", "repair"),
    [
        ({"ema": Settings(w=torch.ones(2))}, "'model.ema' refers to {here}.Settings", "if you trust the file"),
        ({"w": torch.ones(1), "ema": {"a": [torch.ones(2)]}}, "'ema' holds a dict", "save the weights alone"),
        ({"net": nn.Linear(1, 1)}, "'model.net' is a whole pickled module (torch.nn.modules.linear.Linear), and", "if you trust the file"),
        (nn.Linear(1, 1), "is a whole pickled module (torch.nn.modules.linear.Linear)", "if you trust the file"),
        ({"w": np.ones(2)}, "'model.w' is a NumPy array, not a tensor", "save tensors instead: "),
        ({"lr": 0.5}, "'lr' holds a float", "save the weights alone"),
        ({"b": b"x"}, "'b' holds a _codecs.encode", "save the weights alone"),
    ],
    ids=["a dict of its own class", "a list", "a module inside", "a module", "an array", "a number", "bytes"],
)  # fmt: skip
def test_an_object_with_tensors_inside_of_the_selection_is_named(
    path: Path, value: Any, message: str, repair: str
) -> None:
    torch.save({"model": value}, path)
    error = complaint(formats.read, path, Selection("model"))
    assert message.format(here=__name__) in error.message
    assert error.repair.startswith(repair)


LONG = "x" * 60
SHARED = {"w": torch.ones(3)}


@pytest.mark.parametrize(
    ("value", "typed", "key"),
    [
        ({"": SHARED}, "", ""),
        ({0: SHARED}, "", ""),
        ({"ema": {0: torch.ones(3)}}, "", ""),
        ({"model": SHARED, "ema": SHARED, "old": {"model": SHARED}}, "", "model"),
        ({"ema": {0: torch.ones(9), "inner": SHARED}}, "", "ema.inner"),
        ({LONG: {LONG: {LONG: SHARED}}}, "", f"{LONG}.{LONG}.{LONG}"),
        ({LONG * 4: SHARED}, "", ""),
        ({"state": {"model": SHARED, "step": 1}}, "state", "state.model"),
    ],
    ids=["no name", "a number", "a number in a dict", "the same in three", "inner", "long", "too long", "one level too high"],
)  # fmt: skip
def test_only_a_key_that_selects_the_weights_is_advised(
    path: Path, value: dict[Any, Any], typed: str, key: str
) -> None:
    torch.save(value | {"step": 1}, path)
    repair = complaint(formats.read, path, Selection(typed)).repair
    if not key:
        assert "--key" not in repair
        return
    assert repair == (
        f"select the weights: --key {key} (12 B); in load_streaming: key='{key}'; in a suite: key: {key}"
    )
    assert [one.name for one in formats.read(path, Selection(key))] == ["w"]


# Values that a search must not follow for ever ----------------------------------------------------


@pytest.mark.parametrize("depth", [10, 300_000])
def test_deep_and_shared_objects_take_little_time(path: Path, depth: int) -> None:
    """Lists in lists, and many names of one large list: a search that follows each would never end."""
    nested = b"]" * depth + b"a" * (depth - 1)
    data = b"\x80\x02}(X\1\0\0\0aq\1" + nested + b"q\2"
    data += b"".join(b"X\6\0\0\0%06dh\2" % number for number in range(depth)) + b"u."
    value = pickles.load(path, io.BytesIO(data)).value
    with pytest.raises(CheckpointError, match="not a flat state dict: 'a' holds a list"):
        TorchFile(path, {"model": value}, {}).checkpoint("model")


@pytest.mark.parametrize("last", ["a", "b"])
def test_a_dict_that_holds_itself_is_searched_once(path: Path, last: str) -> None:
    value: dict[str, Any] = {}
    value |= {".".join("a" * count): value for count in range(1, 30)}
    start_s = time.process_time()
    with pytest.raises(CheckpointError):
        TorchFile(path, value, {}).checkpoint(".".join("a" * 29 + last))
    assert time.process_time() - start_s < 60  # each path would be 2**28 of them


def test_the_numbers_in_a_list_take_no_more_memory(path: Path) -> None:
    value = {"h": [0] * 200_000, "n": 0}
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="'h' holds a list"):
        TorchFile(path, value, {}).checkpoint("")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < MIB
