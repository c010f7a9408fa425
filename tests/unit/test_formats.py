"""Every layout holds the same checkpoint: made, read, and turned into every other."""

from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest
import torch

from weighin.checkpoint.checksum import checksum, pieces_of
from weighin.checkpoint.convert import Conversion
from weighin.checkpoint.reader import plans, read_pieces
from weighin.models.gpt2 import gpt2
from weighin.models.tied import tied
from weighin.stream import formats
from weighin.stream.slices import TensorPlan
from weighin.stream.write import write as write_checkpoint

LONG = "x" * 10_000


def tied_state() -> dict[str, torch.Tensor]:
    model = tied(vocab_size=128, emb_dim=32, n_layers=2, n_heads=2)
    return dict(model.state_dict())


def gpt2_state() -> dict[str, torch.Tensor]:
    model = gpt2(vocab_size=64, context_length=8, emb_dim=16, n_layers=2, n_heads=2)
    return dict(model.to(torch.bfloat16).state_dict())


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
    firsts: dict[int, str] = {}
    tensors = []
    for name, tensor in state.items():
        first = firsts.setdefault(tensor.data_ptr(), name) if tensor.numel() else name
        tied_to = first if first != name else None
        tensors.append(TensorPlan(name, tuple(tensor.shape), tensor.dtype, tied_to))
    path = formats.checkpoint_in(folder, fmt)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_checkpoint(fmt, path, tensors, lambda name: pieces_of(state[name]))
    return path


def content(path: Path) -> list[tuple[object, ...]]:
    """Return every tensor of a checkpoint: its name, shape, dtype, first tied name, checksum."""
    slices = formats.read(path)
    found: list[tuple[object, ...]] = []
    for one, plan in zip(slices, plans(slices), strict=True):
        pieces = [piece.clone() for piece in read_pieces(one)]
        value = torch.cat(pieces) if pieces else torch.empty(0, dtype=one.dtype)
        found.append((one.name, one.shape, one.dtype, plan.shared_with, checksum(value)))
    return found


def expected(state: dict[str, torch.Tensor]) -> list[tuple[object, ...]]:
    firsts: dict[int, str] = {}
    found: list[tuple[object, ...]] = []
    for name, tensor in state.items():
        first = firsts.setdefault(tensor.data_ptr(), name) if tensor.numel() else name
        shared = first if first != name else None
        found.append((name, tuple(tensor.shape), tensor.dtype, shared, checksum(tensor)))
    return found


def convert(source: Path, target: Path, fmt: str, dtype: str = "") -> None:
    Conversion(source, target, fmt, dtype, max_shard_bytes=4096, verify=True).write()


@pytest.mark.parametrize("state", [tied_state, gpt2_state, odd_state])
@pytest.mark.parametrize("fmt", formats.NAMES)
def test_what_is_written_is_read(
    tmp_path: Path, fmt: str, state: Callable[[], dict[str, torch.Tensor]]
) -> None:
    torch.manual_seed(0)
    values = state()
    path = write(fmt, tmp_path / "made", values)
    assert fmt == formats.detect(path)
    found = content(path)
    assert sorted(found, key=repr) == sorted(expected(values), key=repr)
    assert [one[0] for one in found] == list(values)
    outside = {file.relative_to(tmp_path).parts[0] for file in tmp_path.rglob("*")}
    assert outside == {"made"}
    files = formats.files(path)
    assert all(file.is_file() for file in files)
    assert {one.file for one in formats.read(path)} <= set(files)


@pytest.mark.parametrize(("one", "other"), list(permutations(formats.NAMES, 2)))
def test_every_layout_becomes_every_other_with_equal_checksums(
    tmp_path: Path, one: str, other: str
) -> None:
    torch.manual_seed(0)
    values = tied_state()
    source = write(one, tmp_path / "made", values)
    convert(source, tmp_path / "converted", other)
    assert other == formats.detect(tmp_path / "converted")
    assert content(tmp_path / "converted") == expected(values)
    assert {path.name for path in tmp_path.iterdir()} == {"converted", "made"}


@pytest.mark.parametrize("fmt", formats.NAMES)
def test_the_same_tensors_are_the_same_bytes(tmp_path: Path, fmt: str) -> None:
    torch.manual_seed(0)
    values = tied_state()
    texts = []
    for name in ("a", "b"):
        path = write(fmt, tmp_path / name, values)
        texts.append({file.name: file.read_bytes() for file in formats.files(path)})
    assert texts[0] == texts[1]


def test_dtypes_are_converted_on_the_way_and_only_of_floating_point(tmp_path: Path) -> None:
    torch.manual_seed(0)
    values = tied_state() | {"steps": torch.tensor(7)}
    source = write("pt", tmp_path / "made", values)
    convert(source, tmp_path / "half", "per_param", "bfloat16")
    found = {
        name: (dtype, tied, total) for name, _, dtype, tied, total in content(tmp_path / "half")
    }
    assert found["steps"][0] is torch.int64
    assert found["head.weight"][1] == "embedding.weight"
    for name, value in tied_state().items():
        assert found[name][0] is torch.bfloat16
        assert values[name].shape == value.shape
        assert found[name][2] == checksum(values[name].to(torch.bfloat16))


def test_views_and_transposed_tensors_become_contiguous(tmp_path: Path) -> None:
    base = torch.arange(600.0).reshape(20, 30)
    state = {"t": base.t(), "part": base[3:7, 2:9], "last": base[:, ::7], "row": base[5]}
    torch.save(state, tmp_path / "views.pt")
    convert(tmp_path / "views.pt", tmp_path / "new.pt", "pt")
    found = torch.load(tmp_path / "new.pt", weights_only=True)
    for name, value in state.items():
        assert torch.equal(found[name], value)
        assert found[name].is_contiguous()
        assert found[name].untyped_storage().nbytes() == value.nbytes
