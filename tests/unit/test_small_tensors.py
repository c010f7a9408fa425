"""Many small tensors are filled where they are, by few reads, with the bytes of the file."""

import itertools
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from weighin.errors import CheckpointError
from weighin.probes import page_cache
from weighin.stream.bytes import Reader
from weighin.stream.model import load_streaming


def layers(count: int = 60) -> nn.Sequential:
    """Return small layers of many sizes, with large ones and other dtypes among them."""
    torch.manual_seed(1)
    found = [nn.Linear(1 + number % 37, 1 + number % 11) for number in range(count)]
    found[20] = nn.Linear(600, 700)
    found[21].weight.requires_grad_(False)
    model = nn.Sequential(*found)
    model[30].half()
    model[31].register_buffer("steps", torch.tensor(7))
    model[32].register_buffer("none", torch.empty(0, 3))
    return model


def saved(folder: Path, kind: str) -> tuple[nn.Module, Path]:
    model, path = layers(), folder / f"model.{kind}"
    state = model.state_dict()
    torch.save(state, path) if kind == "pt" else save_file(state, path)
    return model, path


def assert_equal(found: nn.Module, right: nn.Module) -> None:
    assert found.state_dict().keys() == right.state_dict().keys()
    for name, tensor in right.state_dict().items():
        other = found.state_dict()[name]
        assert other.dtype == tensor.dtype and torch.equal(other, tensor), name


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
@pytest.mark.parametrize("state", ["cached", "not cached"])
def test_small_tensors_get_the_values_of_the_file(kind: str, state: str, tmp_path: Path) -> None:
    right, path = saved(tmp_path, kind)
    if state == "not cached":
        page_cache.drop([path])
    target = layers()
    with torch.no_grad():
        for tensor in itertools.chain(target.parameters(), target.buffers()):
            tensor.zero_()
    addresses = [tensor.data_ptr() for tensor in target[:20].parameters()]
    load_streaming(target, path)
    assert_equal(target, right)
    assert [tensor.data_ptr() for tensor in target[:20].parameters()] == addresses


@pytest.mark.parametrize("kind", ["pt", "safetensors"])
def test_a_built_model_has_the_values_of_the_file(kind: str, tmp_path: Path) -> None:
    right, path = saved(tmp_path, kind)
    assert_equal(load_streaming(layers, path), right)
    narrow = load_streaming(layers, path, dtype=torch.bfloat16)
    assert_equal(narrow, right.to(torch.bfloat16))


@pytest.mark.usefixtures("all_cached")
def test_sixty_small_tensors_take_few_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = nn.Sequential(*(nn.Linear(20, 20) for _ in range(60))), tmp_path / "model.pt"
    torch.save(model.state_dict(), path)
    piece, calls = Reader.piece, []

    def counted(*arguments: Any) -> memoryview:
        calls.append(arguments)
        return piece(*arguments)

    monkeypatch.setattr(Reader, "piece", counted)
    load_streaming(model, path)
    assert len(calls) == 1


def test_a_file_that_was_cut_during_the_load_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = saved(tmp_path, "safetensors")
    piece = Reader.piece

    def cut(*arguments: Any) -> memoryview:
        os.truncate(path, 5000)
        return piece(*arguments)

    monkeypatch.setattr(Reader, "piece", cut)
    with pytest.raises(CheckpointError, match="truncated: it ends before byte"):
        load_streaming(model, path)
