"""Every layout holds the same checkpoint: made, read, and turned into every other."""

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from factories import refused
from state_files import assert_same, read_state, write_state
from torch import nn

from weighin.checkpoint.checksum import PIECE_ELEMENTS
from weighin.checkpoint.convert import Conversion
from weighin.checkpoint.reader import plans, read_pieces
from weighin.models.tied import tied
from weighin.stream import formats
from weighin.stream.model import load_streaming

LONG = "x" * 10_000
ODD = {
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
TIED = {"head.weight": "embedding.weight"}


@cache
def tied_state() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return dict(tied(vocab_size=128, emb_dim=32, n_layers=2, n_heads=2).state_dict())


def write(fmt: str, folder: Path, state: dict[str, torch.Tensor]) -> Path:
    path = formats.checkpoint_in(folder, fmt)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_state(path, fmt, state)
    return path


def check(path: Path, fmt: str, state: dict[str, torch.Tensor]) -> None:
    assert formats.detect(path) == fmt
    assert_same(read_state(path), state)
    ties = {one.name: one.shared_with for one in plans(formats.read(path)) if one.shared_with}
    assert ties == (TIED if state is not ODD else {})


@pytest.mark.parametrize("fmt", formats.NAMES)
def test_what_is_written_is_read_and_always_the_same_bytes(tmp_path: Path, fmt: str) -> None:
    for name, state in {"odd": ODD, "tied": tied_state(), "again": tied_state()}.items():
        check(write(fmt, tmp_path / name, state), fmt, state)
    assert {file.relative_to(tmp_path).parts[0] for file in tmp_path.rglob("*")} == {
        "odd", "tied", "again",
    }  # fmt: skip
    one, other = (formats.files(formats.checkpoint_in(tmp_path / name, fmt)) for name in ("tied", "again"))  # fmt: skip
    for file, same in zip(one, other, strict=True):
        assert (file.name, file.read_bytes()) == (same.name, same.read_bytes())
    path = formats.checkpoint_in(tmp_path / "odd", fmt)
    assert {one.file for one in formats.read(path)} <= set(formats.files(path))


@pytest.mark.parametrize(
    ("one", "other"), [*pairwise((*formats.NAMES, formats.NAMES[0]))], ids=" to ".join
)
def test_every_layout_becomes_another(tmp_path: Path, one: str, other: str) -> None:
    """Each layout is once what is read, and once what is written; a key is a name and never a path."""
    state = ODD | tied_state()
    source, target = write(one, tmp_path / "made", state), tmp_path / "converted"
    assert len(refused(load_streaming, nn.Linear(1, 1), source)) < 1000
    Conversion(source, target, other, max_shard_bytes=4096, verify=True).write()
    check(target, other, state)
    Conversion(target, tmp_path / "half", one, "bfloat16", verify=True).write()
    half = {key: one.bfloat16() if one.is_floating_point() else one for key, one in state.items()}
    assert_same(read_state(tmp_path / "half"), half)
    assert {path.name for path in tmp_path.iterdir()} == {"converted", "half", "made"}


# Views that torch.save keeps as they are: expanded, overlapping, with steps, without elements


BASE = torch.arange(1000.0)
VIEWS = {
    "expanded": torch.tensor([7.0]).expand(1000),
    "expanded_int": torch.tensor([7], dtype=torch.int64).expand(1000),
    "expanded_rows": torch.arange(5.0).expand(7, 5),
    "expanded_columns": torch.arange(5.0).unsqueeze(1).expand(5, 7),
    "expanded_between": BASE.as_strided((4, 3, 5), (1, 0, 2), 10),
    "one_value_everywhere": BASE.as_strided((4, 5), (0, 0), 3),
    "steps": BASE[::7],
    "steps_behind": BASE[3:500:2],
    "overlapping": BASE.as_strided((30, 10), (3, 1)),
    "overlapping_ahead": BASE.as_strided((40,), (2,), 1),
    "transposed": BASE[:600].view(20, 30).t(),
    "scalar": torch.tensor(3.5),
    "scalar_of_many": BASE[5],
    "scalar_expanded": torch.tensor(2).expand(1),
    "empty": torch.empty(0, 4),
    "empty_expanded": torch.empty(1, 0).expand(5, 0),
    "empty_of_some": torch.ones(3, 0, 2),
    "nothing_behind": BASE[1000:],
}  # fmt: skip
FORMATS = ("pt", "safetensors", "sharded", "sharded_pt", "per_param", "dcp")


def convert(source: Path, target: Path, fmt: str, dtype: torch.dtype | None = None) -> None:
    name = str(dtype).removeprefix("torch.") if dtype else ""
    Conversion(source, target, fmt, name, max_shard_bytes=2**12, verify=True).write()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("fmt", FORMATS)
def test_views_are_converted(fmt: str, dtype: torch.dtype | None, tmp_path: Path) -> None:
    torch.save(VIEWS, source := tmp_path / "views.pt")
    there = tmp_path / f"there{formats.suffix_of(fmt)}"
    convert(source, there, fmt, dtype)
    convert(there, tmp_path / "back.pt", "pt")
    back, right = torch.load(tmp_path / "back.pt"), torch.load(source)
    assert list(back) == list(right)
    for name, tensor in right.items():
        wanted = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        assert back[name].dtype == wanted.dtype, name
        assert torch.equal(back[name], wanted), name
        assert back[name].is_contiguous(), name


def test_an_expanded_tensor_may_be_longer_than_a_piece(tmp_path: Path) -> None:
    state = {"w": torch.tensor([3], dtype=torch.uint8).expand(17 * 1024**2)}
    torch.save(state, tmp_path / "long.pt")
    convert(tmp_path / "long.pt", tmp_path / "there.safetensors", "safetensors")
    convert(tmp_path / "there.safetensors", tmp_path / "back.pt", "pt")
    assert torch.equal(torch.load(tmp_path / "back.pt")["w"], state["w"])


def test_a_tiny_file_that_repeats_one_element_is_read_in_pieces(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1).expand(2**40)}, tmp_path / "hostile.pt")
    (one,) = formats.read(tmp_path / "hostile.pt")
    assert next(read_pieces(one)).numel() == PIECE_ELEMENTS
