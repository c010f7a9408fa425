"""Every layout holds the same checkpoint: made, read, and turned into every other."""

import warnings
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from factories import refused
from safetensors import torch as library
from state_files import assert_same, read_state, write_state
from torch import nn

from weighin.checkpoint.checksum import PIECE_ELEMENTS
from weighin.checkpoint.convert import Conversion
from weighin.checkpoint.reader import plans, read_pieces
from weighin.errors import CheckpointError
from weighin.models.tied import tied
from weighin.stream import formats
from weighin.stream.load_streaming import load_streaming
from weighin.stream.pretrained_library import Selection
from weighin.stream.safetensors_files import DTYPES
from weighin.stream.slices import ITEM_BYTES, Slice

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


with torch.random.fork_rng(devices=()):  # a failure must come again
    torch.manual_seed(0)
    TIED_STATE = dict(tied(vocab_size=128, emb_dim=32, n_layers=2, n_heads=2).state_dict())


def write(fmt: str, folder: Path, state: dict[str, torch.Tensor]) -> Path:
    path = formats.checkpoint_in(folder, "pt" if fmt == "pt_legacy" else fmt)
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
    odd, one, again = (
        write(fmt, tmp_path / name, state)
        for name, state in {"odd": ODD, "tied": TIED_STATE, "again": TIED_STATE}.items()
    )
    check(odd, fmt, ODD)
    check(one, fmt, TIED_STATE)
    assert {path.name for path in tmp_path.iterdir()} == {"odd", "tied", "again"}
    for file, same in zip(formats.files(one), formats.files(again), strict=True):
        assert (file.name, file.read_bytes()) == (same.name, same.read_bytes())
    assert {place.file for place in formats.read(odd)} <= set(formats.files(odd))


@pytest.mark.parametrize(
    ("one", "other"),
    [*pairwise((*formats.NAMES, formats.NAMES[0])), ("pt_legacy", "per_param")],
)
def test_every_layout_becomes_another(tmp_path: Path, one: str, other: str) -> None:
    """Each layout is once what is read, and once what is written; a key is a name and never a path."""
    state = ODD | TIED_STATE
    source, target = write(one, tmp_path / "made", state), tmp_path / "converted"
    said = refused(load_streaming, nn.Linear(1, 1), source)
    assert said.startswith(f"{source}: does not fit this model: ")
    assert len(said) < 1000
    Conversion(source, target, other, max_shard_bytes=4096, verify=True).write()
    check(target, other, state)
    again = "pt" if one == "pt_legacy" else one
    Conversion(target, tmp_path / "half", again, "bfloat16", verify=True).write()
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
both_dtypes = pytest.mark.parametrize("dtype", ["", "bfloat16"])


def convert(source: Path, target: Path, fmt: str, dtype: str = "") -> None:
    Conversion(source, target, fmt, dtype, max_shard_bytes=2**12, verify=True).write()


def values_in(dtype: str) -> dict[str, torch.Tensor]:
    return {
        name: one.to(torch.bfloat16) if dtype and one.is_floating_point() else one
        for name, one in VIEWS.items()
    }


@both_dtypes
@pytest.mark.parametrize("fmt", [name for name in formats.NAMES if name != "per_module"])
def test_views_are_converted(fmt: str, dtype: str, tmp_path: Path) -> None:
    torch.save(VIEWS, source := tmp_path / "views.pt")
    there = tmp_path / f"there{formats.suffix_of(fmt)}"
    convert(source, there, fmt, dtype)
    convert(there, tmp_path / "back.pt", "pt")
    back = torch.load(tmp_path / "back.pt")
    assert_same(back, values_in(dtype))
    assert all(one.is_contiguous() for one in back.values())


@both_dtypes
def test_views_are_streamed_to_their_values(dtype: str, tmp_path: Path) -> None:
    torch.save(VIEWS, source := tmp_path / "views.pt")
    model = torch.nn.Module()
    for name, tensor in VIEWS.items():
        model.register_buffer(name, torch.empty(tensor.shape, dtype=tensor.dtype))
    load_streaming(model, source, dtype=torch.bfloat16 if dtype else None)
    assert_same(dict(model.named_buffers()), values_in(dtype))


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


# Every dtype that torch can save: its tensors are read as they are, or the file is refused by name

ALL = sorted({str(one)[6:] for one in vars(torch).values() if isinstance(one, torch.dtype)})
KNOWN = [name for name in ITEM_BYTES if hasattr(torch, name)]
"""The dtypes of the table that this torch has: float8_e8m0fnu came with torch 2.7."""

FLOAT8 = [name for name in KNOWN if name.startswith("float8")]
PAIRS = "float4_e2m1fn_x2"

pytestmark = pytest.mark.filterwarnings(
    "ignore:ComplexHalf support is experimental", "ignore:torch.quantize_per_tensor"
)
with_pairs = pytest.mark.skipif(PAIRS not in KNOWN, reason="this torch has no dtype of 4 bits")


def values(name: str, numel: int = 1000) -> torch.Tensor:
    """Elements of all bits that mean a finite number in most dtypes."""
    dtype = getattr(torch, name)
    raw = torch.arange(numel * dtype.itemsize, dtype=torch.int64) % 60
    return (raw % 2 if name == "bool" else raw).to(torch.uint8).view(dtype)


def saved(name: str, path: Path, *, legacy: bool) -> torch.Tensor:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of dtypes on their way in, or out
            tensor = torch.zeros(1008, dtype=torch.uint8).view(getattr(torch, name))
            tensor = values(name) if name in ITEM_BYTES else tensor
            torch.save({"w": tensor}, path, _use_new_zipfile_serialization=not legacy)
    except (KeyError, RuntimeError, TypeError) as error:
        pytest.skip(f"torch does not save it: {error}")
    return tensor


def same(found: torch.Tensor, right: torch.Tensor) -> bool:
    """Tell whether two tensors have the same dtype, shape and bytes."""
    raw = (one.contiguous().view(torch.uint8) for one in (found, right))
    return (found.dtype, found.shape) == (right.dtype, right.shape) and torch.equal(*raw)


def only(path: Path) -> torch.Tensor:
    """Read the only tensor of a checkpoint, piece by piece."""
    (one,) = formats.read(path)
    found = torch.cat([piece.contiguous().view(torch.uint8) for piece in read_pieces(one)])
    return found.view(getattr(torch, one.dtype_name)).view(one.shape)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", ALL)
def test_what_torch_saves_is_read_or_refused(name: str, legacy: bool, tmp_path: Path) -> None:
    tensor = saved(name, tmp_path / "w.pt", legacy=legacy)
    if name not in ITEM_BYTES:
        with pytest.raises(CheckpointError, match=rf"'w' is a .*torch\.{name}\b") as caught:
            formats.read(tmp_path / "w.pt")
        assert "plain weights" not in caught.value.repair  # the file was made just so
        return
    assert same(only(tmp_path / "w.pt"), tensor)
    assert ITEM_BYTES[name] == tensor.itemsize


@pytest.mark.parametrize("fmt", ["pt", "safetensors", "dcp"])
@pytest.mark.parametrize("name", KNOWN)
def test_every_dtype_is_converted_or_refused_by_its_name(
    name: str, fmt: str, tmp_path: Path
) -> None:
    torch.save({"w": values(name)}, tmp_path / "w.pt")
    there = tmp_path / f"there{formats.suffix_of(fmt)}"
    conversion = Conversion(tmp_path / "w.pt", there, fmt, verify=True)
    if fmt == "safetensors" and name not in DTYPES.values():
        assert f"cannot store torch.{name}" in refused(conversion.write)
        assert not there.exists()
        return
    conversion.write()
    assert same(only(there), values(name))


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FLOAT8)
def test_float8_is_floating_point_for_every_load(
    name: str, dtype: torch.dtype | None, tmp_path: Path
) -> None:
    """As for ``torch.nn.Module.to``."""
    model = torch.nn.Module()
    model.register_buffer("w", torch.zeros(1000))
    torch.save({"w": values(name)}, tmp_path / "w.pt")
    load_streaming(model, tmp_path / "w.pt", dtype=dtype)
    wanted = values(name).float().to(dtype or torch.float32)  # by way of the model's own dtype
    assert same(model.get_buffer("w"), wanted)


@with_pairs
def test_pairs_of_4_bits_are_converted_as_they_are_and_into_no_other_dtype(tmp_path: Path) -> None:
    tensor = values(PAIRS, 24).reshape(2, 3, 4)
    torch.save({"w": tensor}, tmp_path / "w.pt")
    Conversion(tmp_path / "w.pt", tmp_path / "w.safetensors", verify=True).write()
    assert same(library.load_file(tmp_path / "w.safetensors")["w"], tensor)
    model = torch.nn.Module()
    model.register_buffer("w", tensor)
    conversion = Conversion(tmp_path / "w.pt", tmp_path / "new.safetensors", dtype="bfloat16")
    said = f"'w' has the dtype torch.{PAIRS}; torch can neither copy nor convert"
    assert said in refused(conversion.write)
    assert said in refused(load_streaming, model, tmp_path / "w.pt", dtype=torch.bfloat16)


def test_a_dtype_that_this_torch_lacks_is_named(tmp_path: Path) -> None:
    one = Slice("w", (1,), (1,), "float2_e1m0", tmp_path / "w.pt", 0, 0, 1)
    assert "'w' has the dtype float2_e1m0; torch" in refused(lambda: one.dtype)


@pytest.mark.parametrize(("key", "legacy"), [("", True), ("model", False)])
def test_a_quantised_tensor_in_a_selection_is_refused(
    key: str, legacy: bool, tmp_path: Path
) -> None:
    codes = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    state = {"fc.packed": (codes, None), "fc.bias": torch.ones(3)}
    value = {"model": state, "step": 3} if key else state
    torch.save(value, tmp_path / "w.pt", _use_new_zipfile_serialization=not legacy)
    message, repair = refused(formats.read, tmp_path / "w.pt", Selection(key)).split("\n")
    place = f"{key}.fc.packed.0".removeprefix(".")
    said = f"{place!r} is a tensor of torch.qint8; weighin reads plain tensors"
    assert message == f"{tmp_path / 'w.pt'}: {said}"
    assert "dequantize()" in repair
    torch.save({"model": {"w": torch.ones(3)}, "compressed": {"w": codes}}, tmp_path / "w.pt")
    assert [one.name for one in formats.read(tmp_path / "w.pt", Selection("model"))] == ["w"]
