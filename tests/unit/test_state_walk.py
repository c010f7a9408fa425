"""Test that modules are loaded from the same state dicts, in the same order, as by torch's own walk."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from state_files import assert_same
from torch import nn

from weighin.errors import CheckpointError
from weighin.stream.model import load_streaming

Call = tuple[str, list[str], dict[str, Any]]


class Recording(nn.Module):
    """Records the state dict that it is given, and renames an old key in it."""

    _version = 3

    def __init__(self, calls: list[Call], **children: nn.Module) -> None:
        super().__init__()
        self.calls = calls
        self.weight = nn.Parameter(torch.zeros(2))
        for name, child in children.items():
            self.add_module(name, child)

    def _load_from_state_dict(
        self, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        self.calls.append((prefix, list(state), dict(metadata)))
        for key in [key for key in state if key.startswith(f"{prefix}old.")]:
            state[key.replace("old.", "a.", 1)] = state.pop(key)
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def plain(**children: nn.Module) -> nn.Module:
    module = nn.Module()
    for name, child in children.items():
        module.add_module(name, child)
    return module


def model(calls: list[Call]) -> nn.Module:
    """Return modules with an override above, between and below plain modules with similar names."""
    inner = Recording(calls, a=nn.Linear(2, 2), ab=nn.Linear(2, 1), norm=nn.BatchNorm1d(2))
    shared = nn.Linear(2, 2)
    return plain(
        a=plain(a=shared, b=inner, a_b=nn.Linear(1, 2)),
        ab=nn.ModuleList(Recording(calls) for _ in range(12)),
        last=shared,
    )


def outcome(load: Any, path: Path) -> tuple[list[Call], str, nn.Module]:
    calls: list[Call] = []
    target, error = model(calls), ""
    try:
        load(target, path)
    except RuntimeError as caught:
        error = str(caught)
    except CheckpointError as caught:
        error = str(caught.__cause__)
    return calls, error, target


def by_torch(target: nn.Module, path: Path) -> None:
    target.load_state_dict(torch.load(path))


def rename(state: Any) -> None:
    for leaf in ("weight", "bias"):
        state[f"a.b.old.{leaf}"] = state.pop(f"a.b.a.{leaf}")


def drop_and_add(state: Any) -> None:
    for key in ("last.bias", "ab.3.weight", "a.a.weight", "a.b.norm.running_var"):
        del state[key]
    odd = ("a", "a.", "a..b", "abc.weight", "a.b.x.y", "a.a.more", "ab.12.weight", ".")
    state.update(dict.fromkeys((*odd, "ab.3.weight.x"), torch.ones(1)))


def reshape(state: Any) -> None:
    state.update({"a.a_b.weight": torch.ones(3, 1), "ab.7.weight": torch.ones(1)})


def mark(state: Any) -> None:
    state._metadata["a.a"] = {"version": 1, "assign_to_params_buffers": True}


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": list,
    "a renamed child": rename,
    "missing and unexpected": drop_and_add,
    "other shapes": reshape,
    "a marked module": mark,
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_walk_gives_what_torch_gives(change: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    state: Any = model([]).state_dict()
    for key, value in state.items():
        if value.is_floating_point():
            state[key] = torch.randn(value.shape)
    CHANGES[change](state)
    torch.save(state, path := tmp_path / "model.pt")
    calls, error, expected = outcome(by_torch, path)
    found_calls, found_error, found = outcome(load_streaming, path)
    assert found_calls == calls
    assert found_error == error
    assert bool(error) == (change in ("missing and unexpected", "other shapes"))
    if not error:
        assert_same(found.state_dict(), expected.state_dict())


def test_a_load_counts_as_one_change_of_each_tensor(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    torch.save(nn.Linear(2, 3).state_dict(), path)
    by_us, by_torch_itself = nn.Linear(2, 3), nn.Linear(2, 3)
    load_streaming(by_us, path)
    by_torch_itself.load_state_dict(torch.load(path))
    versions = [one._version for one in by_us.parameters()]
    assert versions == [one._version for one in by_torch_itself.parameters()]
