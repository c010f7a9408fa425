"""Every layout holds the same checkpoint: made, read, and turned into every other."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from state_files import assert_same, read_state, write_state

from weighin.checkpoint.convert import Conversion
from weighin.checkpoint.reader import plans
from weighin.models.tied import tied
from weighin.stream import formats

LONG = "x" * 10_000


def tied_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(tied(vocab_size=128, emb_dim=32, n_layers=2, n_heads=2).state_dict())


def odd_state() -> dict[str, torch.Tensor]:
    return {
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(3),
        "mask": torch.tensor([[True, False, True]]),
        "bytes": torch.arange(7, dtype=torch.uint8),
        "../../escape": torch.ones(2),
        "/etc/passwd": torch.zeros(3),
        "": torch.ones(4),
        LONG: torch.full((2,), 5.0),
        f"{LONG}.0.weight": torch.full((3,), 6.0),
    }


def write(fmt: str, folder: Path, state: dict[str, torch.Tensor]) -> Path:
    path = formats.checkpoint_in(folder, fmt)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_state(path, fmt, state)
    return path


def ties(path: Path) -> dict[str, str]:
    """Return the tied names of a checkpoint, each with the name of its first tensor."""
    return {one.name: one.shared_with for one in plans(formats.read(path)) if one.shared_with}


TIES = {"head.weight": "embedding.weight"}


@pytest.mark.parametrize("state", [tied_state, odd_state])
@pytest.mark.parametrize("fmt", formats.NAMES)
def test_what_is_written_is_read(
    tmp_path: Path, fmt: str, state: Callable[[], dict[str, torch.Tensor]]
) -> None:
    values = state()
    path = write(fmt, tmp_path / "made", values)
    assert fmt == formats.detect(path)
    assert_same(read_state(path), values)
    assert ties(path) == (TIES if state is tied_state else {})
    outside = {file.relative_to(tmp_path).parts[0] for file in tmp_path.rglob("*")}
    assert outside == {"made"}
    files = formats.files(path)
    assert all(file.is_file() for file in files)
    assert {one.file for one in formats.read(path)} <= set(files)


@pytest.mark.parametrize(
    ("one", "other"), [*pairwise((*formats.NAMES, formats.NAMES[0]))], ids=" to ".join
)
def test_every_layout_becomes_another_with_the_same_tensors(
    tmp_path: Path, one: str, other: str
) -> None:
    """Each layout is once what is read, and once what is written."""
    source, target = write(one, tmp_path / "made", tied_state()), tmp_path / "converted"
    Conversion(source, target, other, max_shard_bytes=4096, verify=True).write()
    assert other == formats.detect(target)
    assert_same(read_state(target), tied_state())
    assert ties(target) == TIES
    assert {path.name for path in tmp_path.iterdir()} == {"converted", "made"}
    Conversion(target, tmp_path / "half", one, "bfloat16", verify=True).write()
    assert ties(tmp_path / "half") == TIES


@pytest.mark.parametrize("fmt", formats.NAMES)
def test_the_same_tensors_are_the_same_bytes(tmp_path: Path, fmt: str) -> None:
    texts = []
    for name in ("a", "b"):
        path = write(fmt, tmp_path / name, tied_state())
        texts.append({file.name: file.read_bytes() for file in formats.files(path)})
    assert texts[0] == texts[1]
