"""Views that torch.save keeps as they are: expanded, overlapping, with steps, without elements."""

from pathlib import Path

import pytest
import torch

from weighin.checkpoint.checksum import PIECE_ELEMENTS
from weighin.checkpoint.convert import Conversion
from weighin.checkpoint.reader import read_pieces
from weighin.stream import formats
from weighin.stream.model import load_streaming

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


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save(VIEWS, tmp_path / "views.pt")
    return tmp_path / "views.pt"


def convert(source: Path, target: Path, fmt: str, dtype: torch.dtype | None = None) -> None:
    name = str(dtype).removeprefix("torch.") if dtype else ""
    Conversion(source, target, fmt, name, max_shard_bytes=2**12, verify=True).write()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("fmt", FORMATS)
def test_views_are_converted_to_their_values(
    source: Path, fmt: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_views_are_streamed_to_their_values(source: Path, dtype: torch.dtype | None) -> None:
    model = torch.nn.Module()
    for name, tensor in VIEWS.items():
        model.register_buffer(name, torch.empty(tensor.shape, dtype=tensor.dtype))
    load_streaming(model, source, dtype=dtype)
    for name, tensor in torch.load(source).items():
        wanted = tensor.to(dtype) if dtype and tensor.is_floating_point() else tensor
        assert torch.equal(model.get_buffer(name), wanted), name
