"""Every dtype that torch can save: its tensors are read as they are, or the file is refused by name."""

import warnings
from pathlib import Path

import pytest
import torch

from weighin.checkpoint.convert import Conversion
from weighin.checkpoint.reader import read_pieces
from weighin.errors import CheckpointError, ConfigError
from weighin.stream import formats
from weighin.stream.model import load_streaming
from weighin.stream.pretrained_library import Selection
from weighin.stream.safetensors_files import DTYPES
from weighin.stream.slices import ITEM_BYTES, NOT_CONVERTED, Slice

ALL = sorted({str(one)[6:] for one in vars(torch).values() if isinstance(one, torch.dtype)})
KNOWN = [name for name in ITEM_BYTES if hasattr(torch, name)]
"""The dtypes of the table that this torch has: float8_e8m0fnu came with torch 2.7."""

CONVERTED = [name for name in KNOWN if name != NOT_CONVERTED]
FLOAT8 = [name for name in KNOWN if name.startswith("float8")]

NEW = {*FLOAT8, "float4_e2m1fn_x2", "uint16", "uint32", "uint64", "complex32"}
"""What torch before 1.6 did not have."""

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


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


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("name", ALL)
def test_what_torch_saves_is_read_or_refused_by_its_name(
    name: str, legacy: bool, tmp_path: Path
) -> None:
    tensor = saved(name, tmp_path / "w.pt", legacy=legacy)
    if name not in ITEM_BYTES:
        with pytest.raises(CheckpointError, match=rf"'w' is a .*torch\.{name}\b") as caught:
            formats.read(tmp_path / "w.pt")
        assert "plain weights" not in caught.value.repair  # the file was made just so
        return
    found = only(tmp_path / "w.pt")
    assert (found.dtype, found.nbytes, ITEM_BYTES[name]) == (
        tensor.dtype,
        tensor.nbytes,
        found.itemsize,
    )
    assert torch.equal(raw(found), raw(tensor))


def only(path: Path) -> torch.Tensor:
    """Read the only tensor of a checkpoint, piece by piece."""
    (one,) = formats.read(path)
    found = torch.cat([raw(piece) for piece in read_pieces(one)])
    return found.view(getattr(torch, one.dtype_name)).view(one.shape)


@pytest.mark.parametrize("fmt", ["pt", "safetensors", "dcp"])
@pytest.mark.parametrize("name", KNOWN)
def test_every_dtype_is_converted_as_it_is_or_refused_by_its_name(
    name: str, fmt: str, tmp_path: Path
) -> None:
    torch.save({"w": values(name)}, tmp_path / "w.pt")
    there = tmp_path / f"there{formats.suffix_of(fmt)}"
    conversion = Conversion(tmp_path / "w.pt", there, fmt, verify=True)
    if fmt == "safetensors" and name not in DTYPES.values():
        with pytest.raises(ConfigError, match=rf"no dtype torch\.{name}"):
            conversion.write()
        assert not there.exists()
        return
    conversion.write()
    assert (found := only(there)).dtype == getattr(torch, name)
    assert torch.equal(raw(found), raw(values(name)))


@pytest.mark.parametrize("name", DTYPES.values())
def test_every_dtype_of_safetensors_is_read_as_its_own_library_wrote_it(
    name: str, tmp_path: Path
) -> None:
    library = pytest.importorskip("safetensors.torch")
    if getattr(torch, name) not in library._TYPES.values():
        pytest.skip(f"this version of safetensors does not write {name}")
    library.save_file({"w": values(name)}, tmp_path / "w.safetensors")
    found = only(tmp_path / "w.safetensors")
    assert (found.dtype, found.shape) == (getattr(torch, name), (1000,))
    assert torch.equal(raw(found), raw(values(name)))


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
    assert model.get_buffer("w").dtype == wanted.dtype
    assert torch.equal(raw(model.get_buffer("w")), raw(wanted))


@pytest.mark.skipif("float4_e2m1fn_x2" not in KNOWN, reason="this torch has no dtype of 4 bits")
def test_pairs_of_4_bits_are_converted_as_safetensors_own_library_does(tmp_path: Path) -> None:
    library = pytest.importorskip("safetensors.torch")
    tensor = values("float4_e2m1fn_x2", 24).reshape(2, 3, 4)
    torch.save({"w": tensor}, tmp_path / "w.pt")
    Conversion(tmp_path / "w.pt", tmp_path / "w.safetensors", verify=True).write()
    found = library.load_file(tmp_path / "w.safetensors")["w"]
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(raw(found), raw(tensor))


@pytest.mark.skipif("float4_e2m1fn_x2" not in KNOWN, reason="this torch has no dtype of 4 bits")
def test_a_conversion_that_torch_lacks_is_refused_with_the_tensors_name(tmp_path: Path) -> None:
    torch.save({"w": values("float4_e2m1fn_x2")}, tmp_path / "w.pt")
    conversion = Conversion(tmp_path / "w.pt", tmp_path / "w.safetensors", dtype="bfloat16")
    said = "'w' has the dtype torch.float4_e2m1fn_x2; torch can neither copy nor convert"
    with pytest.raises(CheckpointError, match=said):
        conversion.write()
    model = torch.nn.Module()
    model.register_buffer("w", values("float4_e2m1fn_x2"))
    with pytest.raises(CheckpointError, match=said):
        load_streaming(model, tmp_path / "w.pt", dtype=torch.bfloat16)


def test_a_dtype_that_this_torch_lacks_is_named(tmp_path: Path) -> None:
    one = Slice("w", (1,), (1,), "float2_e1m0", tmp_path / "w.pt", 0, 0, 1)
    with pytest.raises(CheckpointError, match="'w' has the dtype float2_e1m0; torch"):
        _ = one.dtype


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize(("key", "legacy"), [("", True), ("model", False)])
def test_a_quantised_tensor_in_a_selection_is_refused_and_not_left_out(
    key: str, legacy: bool, tmp_path: Path
) -> None:
    codes = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    state = {"fc.packed": (codes, None), "fc.bias": torch.ones(3)}
    value = {"model": state, "step": 3} if key else state
    torch.save(value, tmp_path / "w.pt", _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError) as caught:
        formats.read(tmp_path / "w.pt", Selection(key))
    place = f"{key}.fc.packed.0".removeprefix(".")
    said = f"{place!r} is a tensor of torch.qint8; weighin reads plain tensors"
    assert caught.value.message == f"{tmp_path / 'w.pt'}: {said}"
    assert "dequantize()" in caught.value.repair


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantised_tensor_outside_of_the_selection_does_not_matter(tmp_path: Path) -> None:
    codes = torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)
    torch.save({"model": {"w": torch.ones(3)}, "compressed": {"w": codes}}, tmp_path / "w.pt")
    assert [one.name for one in formats.read(tmp_path / "w.pt", Selection("model"))] == ["w"]
