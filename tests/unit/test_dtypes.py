"""Every dtype that torch can save: its tensors are read as they are, or the file is refused by name."""

import warnings
from pathlib import Path

import pytest
import torch
from factories import refused
from safetensors import torch as library

from weighin.checkpoint.convert import Conversion
from weighin.checkpoint.reader import read_pieces
from weighin.errors import CheckpointError
from weighin.stream import formats
from weighin.stream.model import load_streaming
from weighin.stream.pretrained_library import Selection
from weighin.stream.safetensors_files import DTYPES
from weighin.stream.slices import ITEM_BYTES, Slice

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
        assert f"no dtype torch.{name}" in refused(conversion.write)
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
