"""The weights of a checkpoint that holds more than them, or holds them under longer names."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from harms import complaint
from state_files import assert_same
from torch import nn

from weighin import load_streaming
from weighin.cell import ModelSpec
from weighin.checkpoint import inspect, truth
from weighin.checkpoint.convert import Conversion
from weighin.stream import formats
from weighin.stream.pretrained_library import Selection
from weighin.stream.slices import Checkpoint

SPEC = ModelSpec("m", "torch.nn:Linear", {"in_features": 3, "out_features": 2})


def trained() -> tuple[nn.Module, dict[str, Any]]:
    """Return a model and its training checkpoint, with all that training loops keep in it."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    scheduler.step()
    args = {"lr": 1e-3, "name": "run", "flags": [True, None], "shape": (1, 2)}
    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    states = {name: one.state_dict() for name, one in parts.items()}
    return model, {"epoch": 3, **states, "rng": torch.get_rng_state(), "args": args, "steps": 2**40}


def saved(path: Path, value: Any) -> Path:
    torch.save(value, path)
    return path


def load(path: Path, **options: Any) -> dict[str, torch.Tensor]:
    return load_streaming(lambda: nn.Linear(3, 2), path, **options).state_dict()


@pytest.mark.parametrize("key", ["state.net.ema", "a.b.c", "a.b"])
def test_a_dotted_key_finds_nested_dicts_and_keys_with_dots(tmp_path: Path, key: str) -> None:
    weights = {"w": torch.ones(2)}
    value = {"state": {"net.ema": weights}, "a.b": {"c": weights}, "a.b.w": torch.ones(2)}
    path = saved(tmp_path / "c.pt", value)
    if key == "a.b":
        assert "not a flat state dict" in complaint(formats.read, path, Selection(key)).message
        return
    assert [one.name for one in formats.read(path, Selection(key))] == ["w"]


def test_the_beginning_of_flat_names_is_a_key_too(tmp_path: Path) -> None:
    state = {"model.w": torch.ones(2), "ema.w": torch.zeros(2), "models.w": torch.zeros(3)}
    path = saved(tmp_path / "c.pt", state)
    Conversion(path, tmp_path / "c.safetensors").write()
    for file in (path, tmp_path / "c.safetensors"):
        (one,) = formats.read(file, Selection("model"))
        assert (one.name, one.shape) == ("w", (2,))


@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_the_weights_in_a_folder_of_torch_distributed_checkpoint(tmp_path: Path) -> None:
    from torch.distributed.checkpoint.state_dict_saver import save

    model, checkpoint = trained()
    kept = {name: checkpoint[name] for name in ("model", "optimizer")}
    save(kept, checkpoint_id=tmp_path / "c")
    assert_same(load(tmp_path / "c", key="model"), model.state_dict())


@pytest.mark.parametrize("prefix", ["module.", "module", "_orig_mod."])
def test_a_prefix_is_removed_as_torch_removes_it(tmp_path: Path, prefix: str) -> None:
    model, _ = trained()
    wrapped = nn.ModuleDict({prefix.rstrip("."): model})
    path = saved(tmp_path / "c.pt", wrapped.state_dict())
    state = torch.load(path, weights_only=True)
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, f"{prefix.rstrip('.')}.")
    slices: Any = formats.read(path, Selection(strip_prefix=prefix))
    assert [one.name for one in slices] == [*state]
    assert slices.metadata == {name: dict(local) for name, local in state._metadata.items()}
    assert_same(load(path, strip_prefix=prefix), model.state_dict())


def test_a_prefix_that_no_name_has_or_that_names_need_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", {"m.w": torch.ones(1), "w": torch.ones(1)})
    assert str(complaint(formats.read, path, Selection(strip_prefix="module."))) == (
        f"{path}: no tensor's name begins with 'module.'\nthe tensors in the file are called: m.w, w"
    )
    error = complaint(formats.read, path, Selection(strip_prefix="m."))
    assert error.message == f"{path}: two tensors would have the same name without the prefix 'm.'"


def test_an_error_about_flat_names_proposes_what_would_fit(tmp_path: Path) -> None:
    model, _ = trained()
    wrapped = {f"module._orig_mod.{name}": one for name, one in model.state_dict().items()}
    path = saved(tmp_path / "c.pt", wrapped)
    repair = (
        "all names begin with 'module._orig_mod.': --set strip_prefix=module._orig_mod.;"
        " in load_streaming: strip_prefix='module._orig_mod.'; in a suite: strip_prefix: module._orig_mod."
    )
    assert complaint(load_streaming, nn.Linear(3, 2), path).repair == repair
    indexed = lambda: truth.index(SPEC, checkpoint=path, fmt="pt", folder=tmp_path)  # noqa: E731
    assert complaint(indexed).repair == repair
    other = {f"ema.{name}": one for name, one in model.state_dict().items()} | wrapped
    saved(path, other)
    assert complaint(indexed).repair == (
        "select the weights: --key ema; in load_streaming: key='ema'; in a suite: key: ema"
    )
    saved(path, {"module.other": torch.ones(1)})
    assert complaint(indexed).repair.startswith("choose the model")


def test_a_converted_selection_holds_the_plain_state_dict(tmp_path: Path) -> None:
    model, checkpoint = trained()
    checkpoint["model"] = OrderedDict(
        (f"module.{name}", value) for name, value in checkpoint["model"].items()
    )
    path = saved(tmp_path / "train.pt", checkpoint)
    selection = Selection("model", "module.")
    (tmp_path / "out").mkdir()
    truth.index(SPEC, checkpoint=path, fmt="pt", folder=tmp_path / "out", selection=selection)
    model.load_state_dict(torch.load(tmp_path / "out/pt/model.pt", weights_only=True))
    Conversion(path, tmp_path / "plain.pt", verify=True, selection=selection).write()
    expected = {name.removeprefix("module."): one for name, one in checkpoint["model"].items()}
    assert_same(torch.load(tmp_path / "plain.pt", weights_only=True), expected)
    found = inspect.inspect(path, selection)
    assert [one["name"] for one in found["tensors"]] == ["weight", "bias"]


def test_a_key_never_selects_a_module(tmp_path: Path) -> None:
    path = saved(tmp_path / "c.pt", {"model": nn.Linear(1, 1)})
    error = complaint(formats.read, path, Selection("model"))
    assert "is a whole pickled module (torch.nn.modules.linear.Linear)" in error.message
    assert "torch.save(model.state_dict(), ...)" in error.repair


def test_a_selection_keeps_the_versions_of_modules() -> None:
    slices = Checkpoint()
    slices.metadata = {"": {"version": 1}, "module": {"version": 2}, "module.norm": {"version": 3}}
    for only in (True, False):
        found = slices.without("module.", only=only)
        assert found.metadata == {"": {"version": 2}, "norm": {"version": 3}}
