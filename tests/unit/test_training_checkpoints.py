"""Checkpoints of training runs, with objects of classes that weighin neither imports nor executes."""

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
from torch import nn

from weighin.errors import CheckpointError
from weighin.stream import formats, pickles
from weighin.stream.pretrained_library import Selection
from weighin.stream.torch_files import TorchFile
from weighin.units import MIB


class Kind(enum.Enum):
    """A class of its own, which a reader must not import."""

    FAST = 1


class Settings(dict[str, Any]):
    """A dict of its own class, as the settings of many frameworks are."""


WEIGHTS = OrderedDict(nn.Linear(3, 2).state_dict())


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_member_of_an_enumeration_is_named_as_python_writes_it(
    tmp_path: Path, protocol: int
) -> None:
    path = tmp_path / "train.pt"
    value = {"model": {"kind": Kind.FAST}}
    torch.save(value, path, pickle_protocol=protocol)
    how = rf"({__name__}\.Kind|\S+\.getattr)"  # Python 3.11.0 to 3.11.3 ask for the attribute
    with pytest.raises(CheckpointError, match=rf"'model\.kind' refers to {how}\n"):
        formats.read(path, Selection("model"))


def test_a_reader_neither_executes_nor_imports(tmp_path: Path) -> None:
    path, proof = tmp_path / "c.pt", tmp_path / "EXECUTED"
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
)
def test_a_state_dict_that_torch_load_refuses_is_read_but_not_handed_to_it(
    tmp_path: Path, state: Any, only_tensors: bool
) -> None:
    torch.save(state, path := tmp_path / "c.pt")
    slices = formats.read(path)
    assert ([one.name for one in slices], slices.only_tensors) == (["w"], only_tensors)
    if only_tensors:
        torch.load(path, weights_only=True)
        return
    with pytest.raises(pickle.UnpicklingError):
        torch.load(path, weights_only=True)


VALUES: dict[str, Any] = {
    "_extra_state": {
        "lr": np.float64(0.5),
        "args": argparse.Namespace(a=1),
        "size": torch.Size([2]),
    },
    "head._extra_state": None,
    "norm._extra_state": io.BytesIO(b"recipe"),
}


@pytest.mark.parametrize("key", ["", "model"])
def test_an_extra_state_is_a_value_of_a_state_dict(tmp_path: Path, key: str) -> None:
    path = tmp_path / "c.pt"
    state = {**WEIGHTS, **VALUES}
    torch.save({key: state, "step": np.int64(1)} if key else state, path)
    slices: Any = formats.read(path, Selection(key))
    assert [one.name for one in slices] == [*WEIGHTS]
    assert [*slices.values] == [*VALUES]


def test_a_key_may_select_a_dict_with_settings_among_its_tensors(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    torch.save({"model": {**WEIGHTS, "decay": 0.9, "name": Kind.FAST}}, path)
    slices: Any = formats.read(path, Selection("model", ""))
    assert [one.name for one in slices] == [*WEIGHTS]
    assert [*slices.values] == ["decay", "name"]


@pytest.mark.parametrize(
    ("value", "message", "repair"),
    [
        ({"ema": Settings(w=torch.ones(2))}, "'model.ema' refers to {here}.Settings", "if you trust the file"),
        ({"w": torch.ones(1), "ema": {"a": [torch.ones(2)]}}, "'ema' holds a dict", "save the weights alone"),
        ({"net": nn.Linear(1, 1)}, "'model.net' is a whole pickled module (torch.nn.modules.linear.Linear), and", "if you trust the file"),
        ({"w": np.ones(2)}, "'model.w' is a NumPy array, not a tensor", "save tensors instead: "),
        ({"lr": 0.5}, "'lr' holds a float", "save the weights alone"),
        ({"b": b"x"}, "'b' holds a _codecs.encode", "save the weights alone"),
    ],
)  # fmt: skip
def test_an_object_with_tensors_inside_of_the_selection_is_named(
    tmp_path: Path, value: Any, message: str, repair: str
) -> None:
    path = tmp_path / "c.pt"
    torch.save({"model": value}, path)
    error = complaint(formats.read, path, Selection("model"))
    assert message.format(here=__name__) in error.message
    assert error.repair.startswith(repair)


LONG = "x" * 60
SHARED = {"w": torch.ones(3)}


@pytest.mark.parametrize(
    ("value", "typed", "key"),
    [
        ({"": {"w": torch.ones(3)}}, "", ""),
        ({0: {"w": torch.ones(3)}}, "", ""),
        ({"ema": {0: torch.ones(3)}}, "", ""),
        ({"model": SHARED, "ema": SHARED, "old": {"model": SHARED}}, "", "model"),
        ({"ema": {0: torch.ones(9), "inner": {"w": torch.ones(3)}}}, "", "ema.inner"),
        ({LONG: {LONG: {LONG: {"w": torch.ones(3)}}}}, "", f"{LONG}.{LONG}.{LONG}"),
        ({LONG * 4: {"w": torch.ones(3)}}, "", ""),
        ({"state": {"model": SHARED, "step": 1}}, "state", "state.model"),
    ],
    ids=["no name", "a number", "a number in a dict", "the same in three", "inner", "long", "too long", "one level too high"],
)  # fmt: skip
def test_only_a_key_that_selects_the_weights_is_advised(
    tmp_path: Path, value: dict[Any, Any], typed: str, key: str
) -> None:
    path = tmp_path / "c.pt"
    torch.save(value | {"step": 1}, path)
    repair = complaint(formats.read, path, Selection(typed)).repair
    if not key:
        assert "--key" not in repair
        return
    assert repair == (
        f"select the weights: --key {key} (12 B); in load_streaming: key='{key}'; in a suite: key: {key}"
    )
    assert [one.name for one in formats.read(path, Selection(key))] == ["w"]


@pytest.mark.parametrize("depth", [10, 300_000])
def test_deep_and_shared_objects_take_little_time(tmp_path: Path, depth: int) -> None:
    """Lists in lists, and many names of one large list: a search that follows each would never end."""
    nested = b"]" * depth + b"a" * (depth - 1)
    data = b"\x80\x02}(X\1\0\0\0aq\1" + nested + b"q\2"
    data += b"".join(b"X\6\0\0\0%06dh\2" % number for number in range(depth)) + b"u."
    path = tmp_path / "x"
    value = pickles.load(path, io.BytesIO(data)).value
    with pytest.raises(CheckpointError, match="not a flat state dict: 'a' holds a list"):
        TorchFile(path, {"model": value}, {}).checkpoint("model")


@pytest.mark.parametrize("last", ["a", "b"])
def test_a_dict_that_holds_itself_is_searched_once(tmp_path: Path, last: str) -> None:
    value: dict[str, Any] = {}
    value |= {".".join("a" * count): value for count in range(1, 30)}
    start_s = time.process_time()
    with pytest.raises(CheckpointError):
        TorchFile(tmp_path / "x", value, {}).checkpoint(".".join("a" * 29 + last))
    assert time.process_time() - start_s < 1


def test_the_numbers_in_a_list_take_no_more_memory(tmp_path: Path) -> None:
    value = {"h": [0] * 200_000, "n": 0}
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="'h' holds a list"):
        TorchFile(tmp_path / "x", value, {}).checkpoint("")
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < MIB


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_the_weights_beside_other_values_in_torch_distributed_checkpoint(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    model = {f"decoder.{name}": value for name, value in WEIGHTS.items()}
    model["decoder._extra_state"] = {"recipe": "delayed"}
    save({"model": model, "optim": {"w": torch.ones(9)}, "step": 10}, checkpoint_id=tmp_path / "c")
    error = complaint(formats.read, tmp_path / "c")
    assert error.message == (
        f"{tmp_path / 'c' / '.metadata'}: not a flat state dict of tensors: "
        "'model.decoder._extra_state.recipe' is not a tensor"
    )
    assert error.repair.startswith("select the weights: --key model (32 B); ")
    slices: Any = formats.read(tmp_path / "c", Selection("model", "decoder."))
    assert sorted(one.name for one in slices) == sorted(WEIGHTS)
    assert [*slices.values] == ["_extra_state.recipe"]
