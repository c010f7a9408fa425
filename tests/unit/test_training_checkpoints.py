"""Checkpoints of training runs, with objects of classes that weighin neither imports nor executes."""

import argparse
import enum
import io
import os
import pickle
import random
import warnings
from collections import OrderedDict, defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from weighin.errors import CheckpointError
from weighin.formats.pretrained_library import Selection
from weighin.stream import formats, pickles


class Kind(enum.Enum):
    """A class of its own, which a reader must not import."""

    FAST = 1


class Member:
    """A member of ``Kind`` as Python 3.11.0 to 3.11.3 write it; other versions write a call of ``Kind``."""

    def __reduce__(self) -> tuple[object, ...]:
        return getattr, (Kind, "FAST")


class Settings(dict[str, Any]):
    """A dict of its own class, as the settings of many frameworks are."""


class Canary:
    """Leaves a file behind if anything calls what the pickle asks for."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.proof}",)


WEIGHTS = OrderedDict(nn.Linear(3, 2).state_dict())
OPTIMIZER = torch.optim.AdamW(nn.Linear(3, 2).parameters())
LAYOUTS: dict[str, tuple[dict[str, Any], str, str]] = {
    # name: what lies beside the weights, the key of the weights, the message without a key
    "lightning": (
        {
            "epoch": 1,
            "hyper_parameters": Settings(lr=0.1, act=nn.ReLU(), refs=np.arange(3.0)),
            "callbacks": {"early": {"best": torch.tensor(1.0), "mode": "min"}},
            "optimizer_states": [OPTIMIZER.state_dict()],
        },
        "state_dict",
        f"'hyper_parameters' refers to {__name__}.Settings",
    ),
    "megatron": (
        {
            "args": argparse.Namespace(layers=2, dtype=torch.bfloat16),
            "rng_state": [{"python": random.getstate(), "numpy": np.random.get_state()}],
            "optimizer": {"fp32": [[torch.ones(3)]]},
        },
        "model",
        "'args' refers to argparse.Namespace",
    ),
    "nerfstudio": (
        {"step": np.int64(30), "optimizers": {"fields": OPTIMIZER.state_dict()}},
        "pipeline",
        "'step' is a NumPy scalar",
    ),
    "nested": (
        {"run": {"kind": Kind.FAST, "path": Path("/tmp")}},
        "state.net",
        f"'run.kind' refers to {__name__}.Kind",
    ),
    "odd keys": (
        {
            "table": {
                (1, 2): "x",
                None: 0.5,
                0.25: b"y",
                True: Kind.FAST,
                "seen": defaultdict(list),
            },
            "loss": {1, 2},
        },
        "model",
        f"'table.True' refers to {__name__}.Kind",
    ),
    "functions": (
        {"schedule": partial(max, 1), "net": nn.Linear(2, 2), "dates": [complex(1, 2), range(3)]},
        "model",
        "'schedule' refers to functools.partial",
    ),
}


def trained(layout: str) -> tuple[dict[str, Any], str]:
    beside, key, _ = LAYOUTS[layout]
    *outer, last = key.split(".")
    weights: dict[str, Any] = {last: WEIGHTS}
    for name in reversed(outer):
        weights = {name: weights}
    return beside | weights, key


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("protocol", [2, 4, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_the_weights_beside_foreign_objects_are_those_that_torch_loads(
    tmp_path: Path, layout: str, protocol: int, is_zip: bool
) -> None:
    path = tmp_path / "train.pt"
    value, key = trained(layout)
    torch.save(value, path, pickle_protocol=protocol, _use_new_zipfile_serialization=is_zip)
    data = path.read_bytes()
    slices = formats.read(path, Selection(key))
    assert [one.name for one in slices] == [*WEIGHTS]
    for one in slices:
        raw = WEIGHTS[one.name].numpy().tobytes()
        assert data[one.offset : one.offset + one.nbytes] == raw
    with pytest.raises(pickle.UnpicklingError), warnings.catch_warnings(action="ignore"):
        torch.load(path, weights_only=True)


@pytest.mark.parametrize("member", [Kind.FAST, Member()], ids=["call", "getattr"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_a_member_of_an_enumeration_is_named_as_any_python_writes_it(
    tmp_path: Path, member: object, protocol: int
) -> None:
    path = tmp_path / "train.pt"
    torch.save({"model": WEIGHTS, "kind": member}, path, pickle_protocol=protocol)
    with pytest.raises(CheckpointError, match=rf"'kind' refers to {__name__}\.Kind\n"):
        formats.read(path)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_without_a_key_the_object_and_the_key_are_named(tmp_path: Path, layout: str) -> None:
    path = tmp_path / "train.pt"
    value, key = trained(layout)
    torch.save(value, path)
    with pytest.raises(CheckpointError) as caught:
        formats.read(path)
    assert caught.value.message == (
        f"{path}: holds more than tensors, and was NOT executed: {LAYOUTS[layout][2]}"
    )
    assert caught.value.repair == (
        f"select the weights: --key {key} (32 B); in load_streaming: key='{key}'; in a suite: key: {key}"
    )


def test_a_reader_neither_executes_nor_imports(tmp_path: Path) -> None:
    path, proof = tmp_path / "c.pt", tmp_path / "EXECUTED"
    torch.save({"model": WEIGHTS, "on_load": [Canary(proof)]}, path)
    assert len(formats.read(path, Selection("model"))) == len(WEIGHTS)
    assert not proof.exists()


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
        ({"net": nn.Linear(1, 1)}, "(torch.nn.modules.linear.Linear) at 'model.net', which", "if you trust the file"),
        ({"w": np.ones(2)}, "'model.w' is a NumPy array, not a tensor", "save tensors instead: "),
        ({"lr": 0.5}, "'lr' holds a float", "save the weights alone"),
    ],
)  # fmt: skip
def test_an_object_with_tensors_inside_of_the_selection_is_named(
    tmp_path: Path, value: Any, message: str, repair: str
) -> None:
    path = tmp_path / "c.pt"
    torch.save({"model": value}, path)
    with pytest.raises(CheckpointError) as caught:
        formats.read(path, Selection("model"))
    assert message.format(here=__name__) in caught.value.message
    assert caught.value.repair.startswith(repair)


def test_a_key_one_level_too_high_is_answered_with_the_right_one(tmp_path: Path) -> None:
    path = tmp_path / "c.pt"
    torch.save({"state": {"model": WEIGHTS, "step": 1}}, path)
    with pytest.raises(CheckpointError, match=r"'model' holds a OrderedDict\nselect the weights: --key state\.model \("):  # fmt: skip
        formats.read(path, Selection("state"))


@pytest.mark.parametrize("depth", [10, 300_000])
def test_deep_and_shared_objects_take_little_time(tmp_path: Path, depth: int) -> None:
    """Lists in lists, and many names of one large list: a search that follows each would never end."""
    nested = b"]" * depth + b"a" * (depth - 1)
    data = b"\x80\x02}(X\1\0\0\0aq\1" + nested + b"q\2"
    data += b"".join(b"X\6\0\0\0%06dh\2" % number for number in range(depth)) + b"u."
    path = tmp_path / "x"
    value = pickles.load(path, io.BytesIO(data)).value
    from weighin.stream.state_dicts import state_dict

    with pytest.raises(CheckpointError, match="not a flat state dict: 'a' holds a list"):
        state_dict(path, {"model": value}, "model")


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_the_weights_beside_other_values_in_torch_distributed_checkpoint(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    model = {f"decoder.{name}": value for name, value in WEIGHTS.items()}
    model["decoder._extra_state"] = {"recipe": "delayed"}
    save({"model": model, "optim": {"w": torch.ones(9)}, "step": 10}, checkpoint_id=tmp_path / "c")
    with pytest.raises(CheckpointError) as caught:
        formats.read(tmp_path / "c")
    assert caught.value.message == (
        f"{tmp_path / 'c' / '.metadata'}: not a flat state dict of tensors: "
        "'model.decoder._extra_state.recipe' is not a tensor"
    )
    assert caught.value.repair.startswith("select the weights: --key model (32 B); ")
    slices: Any = formats.read(tmp_path / "c", Selection("model", "decoder."))
    assert sorted(one.name for one in slices) == sorted(WEIGHTS)
    assert [*slices.values] == ["_extra_state.recipe"]
