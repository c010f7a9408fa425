"""The weights of a checkpoint that holds more than them, or holds them under longer names.

weighin neither imports nor executes what lies beside them. tests/checkpoints/training_checkpoints.py
has the files of frameworks.
"""

import argparse
import enum
import io
import pickle
import re
import time
import tracemalloc
from collections import OrderedDict, defaultdict
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harms import Command, complaint
from snapshots import Compare
from state_files import assert_same
from torch import nn
from torch.distributed.checkpoint.state_dict_saver import save

from weighin import load_streaming
from weighin.cell import ModelSpec
from weighin.checkpoint import generate, inspect
from weighin.errors import CheckpointError
from weighin.stream import formats, pickles
from weighin.stream.pretrained_library import WHOLE, Selection
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
    torch.save({"state": {"net.ema": weights}, "a.b": {"c": weights}, "a.b.w": torch.ones(2)}, path)
    for key in ("state.net.ema", "a.b.c"):
        assert [one.name for one in formats.read(path, Selection(key))] == ["w"]
    state = {"model.w": torch.ones(2), "ema.w": torch.zeros(2), "models.w": torch.zeros(3)}
    torch.save(state, path)
    (one,) = formats.read(path, Selection("model"))
    assert (one.name, one.shape) == ("w", (2,))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_the_files_of_a_distributed_checkpoint_are_known_before_its_key(tmp_path: Path) -> None:
    whole = {"model": {"w": torch.ones(2), "_extra_state": {"recipe": 1}}, "step": 2}
    save(whole, checkpoint_id=tmp_path, no_dist=True)
    assert {one.name for one in formats.files(tmp_path)} == {".metadata", "__0_0.distcp"}
    assert [one.name for one in formats.read(tmp_path, Selection("model"))] == ["w"]


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


def test_an_error_about_flat_names_proposes_what_would_fit(path: Path, tmp_path: Path) -> None:
    def index() -> object:
        return generate.index(SPEC, checkpoint=path, fmt="pt", folder=tmp_path)

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
    assert complaint(index).repair.startswith("choose the checkpoint's own model")


def test_an_indexed_selection_holds_the_plain_state_dict(path: Path, tmp_path: Path) -> None:
    optimizer = torch.optim.AdamW(nn.Linear(3, 2).parameters())
    names = OrderedDict((f"module.{name}", one) for name, one in WEIGHTS.items())
    value = {"model": names, "optimizer": optimizer.state_dict(), "args": {"flags": [True, None]}}
    torch.save(value | {"rng": torch.get_rng_state(), "steps": 2**40}, path)
    selection = Selection("model", "module.")
    generate.index(SPEC, checkpoint=path, fmt="pt", folder=tmp_path, selection=selection)
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


TAKEN = {
    "a parameter": {"w": nn.Parameter(torch.ones(2))},
    "an OrderedDict": OrderedDict(w=torch.ones(2, dtype=torch.bfloat16)),
}
REFUSED = {
    "a parameter with a function": {"w": marked()},
    "a defaultdict": defaultdict[str, Any](list, w=torch.ones(2)),
}


@pytest.mark.parametrize("name", [*TAKEN, *REFUSED])
def test_what_torch_load_refuses_is_read_but_not_handed_to_it(path: Path, name: str) -> None:
    torch.save((TAKEN | REFUSED)[name], path)
    slices = formats.read(path)
    assert ([one.name for one in slices], slices.only_tensors) == (["w"], name in TAKEN)
    with nullcontext() if name in TAKEN else pytest.raises(pickle.UnpicklingError):
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


ONE = {"w": torch.ones(1)}
MODEL = Selection("model")
LONG = "x" * 60
UNSELECTED: dict[str, tuple[Any, Selection]] = {
    "a dict of its own class": ({"model": {"ema": Settings(w=torch.ones(2))}}, MODEL),
    "a list": ({"model": ONE | {"ema": {"a": [torch.ones(2)]}}}, MODEL),
    "a module inside": ({"model": {"net": nn.Linear(1, 1)}}, MODEL),
    "a module": ({"model": nn.Linear(1, 1)}, MODEL),
    "an array": ({"model": {"w": np.ones(2)}}, MODEL),
    "a number": ({"model": {"lr": 0.5}}, MODEL),
    "bytes": ({"model": {"b": b"x"}}, MODEL),
    "a prefix that no name has": ({"m.w": torch.ones(1)} | ONE, Selection(strip_prefix="module.")),
    "a prefix that makes two names one": ({"m.w": torch.ones(1)} | ONE, Selection(strip_prefix="m.")),
    "the beginning of two keys": ({"a.b": {"c": ONE}, "a.b.w": torch.ones(2)}, Selection("a.b")),
    "no name": ({"": ONE, "step": 1}, WHOLE),
    "a number as name": ({0: ONE, "step": 1}, WHOLE),
    "a number as name in a dict": ({"ema": {0: torch.ones(3)}, "step": 1}, WHOLE),
    "the same in three": ({"model": ONE, "ema": ONE, "old": {"model": ONE}, "step": 1}, WHOLE),
    "inner": ({"ema": {0: torch.ones(9), "inner": ONE}, "step": 1}, WHOLE),
    "long": ({LONG: {LONG: {LONG: ONE}}, "step": 1}, WHOLE),
    "too long": ({LONG * 4: ONE, "step": 1}, WHOLE),
    "one level too high": ({"state": {"model": ONE, "step": 1}}, Selection("state")),
}  # fmt: skip


def test_what_is_no_state_dict_is_named_and_only_a_key_of_the_weights_is_advised(
    path: Path, same: Compare
) -> None:
    said = []
    for title, (value, selection) in UNSELECTED.items():
        torch.save(value, path)
        error = str(complaint(formats.read, path, selection)).replace(str(path), "FILE")
        said.append(f"{title}:\n{error}\n")
        if key := re.search(r"^select the weights: --key (\S+) ", error, re.MULTILINE):
            assert [one.name for one in formats.read(path, Selection(key[1]))] == ["w"]
    same("no_state_dicts.txt", "\n".join(said))


# Values that a search must not follow for ever ----------------------------------------------------


def test_deep_and_shared_objects_take_little_time(path: Path) -> None:
    """Lists in lists, and many names of one large list: a search that follows each would never end."""
    depth = 300_000
    nested = b"]" * depth + b"a" * (depth - 1)
    data = b"\x80\x02}(X\1\0\0\0aq\1" + nested + b"q\2"
    data += b"".join(b"X\6\0\0\0%06dh\2" % number for number in range(depth)) + b"u."
    value = pickles.load(path, io.BytesIO(data)).value
    with pytest.raises(CheckpointError, match="not a flat state dict: 'a' holds a list"):
        TorchFile(path, {"model": value}, {}).checkpoint("model")


def test_a_dict_that_holds_itself_is_searched_once(path: Path) -> None:
    value: dict[str, Any] = {}
    value |= {".".join("a" * count): value for count in range(1, 30)}
    start_s = time.process_time()
    for last in "ab":
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
