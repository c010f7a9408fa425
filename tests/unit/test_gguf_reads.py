"""What a prediction counts while transformers dequantises a GGUF file: pages, values and copies."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_predict_ledger import BASELINE

from weighin import install
from weighin.predict import patches
from weighin.predict.dispatch import CannotFollow, Operations
from weighin.predict.ledger import Ledger
from weighin.predict.patches import gguf_reads
from weighin.units import MIB

gguf = pytest.importorskip("gguf", reason=install.command("gguf"))
module = pytest.importorskip(
    "transformers.modeling_gguf_pytorch_utils", reason=install.command("hf")
)
from test_gguf import codes, write  # noqa: E402 (it needs gguf)

SIDE = 1024
SIZE = SIDE * SIDE * 4
NAMES = {"first.weight": "a.weight", "second": "b.weight", "again.weight": "a.weight"}


class Model(torch.nn.Module):
    """A model without memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(SIDE, SIDE, bias=False, device="meta")
        self.b = torch.nn.Linear(SIDE, SIDE, bias=False, device="meta")


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ledger]:
    """The ledger of a process in which transformers reads only the head of a file."""
    monkeypatch.setattr(module, "load_gguf_checkpoint", lambda path: {"config": {"of": path}})
    monkeypatch.setattr(module, "get_gguf_hf_weights_map", lambda _model, _processor: NAMES)
    one = Ledger(None, BASELINE)
    with Operations(one):
        yield one


def file_of(folder: Path, *kinds: str) -> tuple[Path, int]:
    """Return a file of square tensors in these types, and the size of their codes."""
    tensors = {}
    for name, kind in zip(("first", "second", "again", "gone"), kinds, strict=False):
        written = gguf.GGMLQuantizationType[kind]
        array = codes(written, SIDE, SIDE // gguf.GGML_QUANT_SIZES[written][0])
        tensors[f"{name}.weight"] = (array, written)
    path = write(folder / "m.gguf", tensors)
    return path, sum(array.nbytes for array, _ in tensors.values())


@pytest.mark.parametrize(
    ("kinds", "dtype", "peak", "kept"),
    [
        (("F32", "F32"), None, 2, 2),  # mapped values are copied
        (("F16", "F16"), None, 3, 2),  # beside a copy: the values of it and of the next one
        (("BF16", "BF16"), None, 4, 2),  # numpy computes in two parts
        (("Q8_0", "Q8_0"), None, 4, 2),
        (("Q8_0", "F32"), None, 2, 2),
        (("Q8_0", "Q8_0"), torch.bfloat16, 3.5, 1),
        (("F32", "F32", "F32", "F32"), None, 2, 2),  # one was made, and one is not the model's
        (("F32", "F32", "Q8_0", "Q8_0"), None, 5, 2),
    ],
)
def test_the_values_of_each_tensor_are_held_until_the_next_ones_are_there(
    ledger: Ledger,
    tmp_path: Path,
    kinds: tuple[str, ...],
    dtype: torch.dtype | None,
    peak: float,
    kept: float,
) -> None:
    path, stored = file_of(tmp_path, *kinds)
    with gguf_reads(ledger, path):
        found = module.load_gguf_checkpoint(
            path, return_tensors=True, model_to_load=Model(), torch_dtype=dtype
        )
    assert found["config"] == {"of": path}
    assert list(found["tensors"]) == ["a.weight", "b.weight"]
    for tensor in found["tensors"].values():
        assert (tensor.shape, tensor.dtype) == ((SIDE, SIDE), dtype or torch.float32)
    assert ledger.peaks["tensor_peak_bytes"] == peak * SIZE
    assert ledger.tensor_bytes == kept * SIZE or dtype  # what was converted leaves a hole
    assert ledger.work["mapped_bytes"] == pytest.approx(stored, abs=8 * 4096)
    copied = {None: 0, torch.bfloat16: SIZE}[dtype]
    assert ledger.work["written_bytes"] == len(kinds) * SIZE + copied


def test_the_head_of_a_file_alone_has_no_values(ledger: Ledger, tmp_path: Path) -> None:
    path, _ = file_of(tmp_path, "F32", "F32")
    with gguf_reads(ledger, path):
        assert "tensors" not in module.load_gguf_checkpoint(path)
    assert (ledger.tensor_bytes, ledger.work["mapped_bytes"]) == (0, 0)


def test_the_packages_that_a_load_imports_are_the_loads_memory_once(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = iter([10 * MIB, 74 * MIB])
    path, _ = file_of(tmp_path, "F32")
    before = ledger.other_anon_bytes
    with monkeypatch.context() as patched:
        patched.setattr(patches, "anon_bytes", lambda: next(sizes, 74 * MIB))
        with gguf_reads(ledger, path):
            assert ledger.other_anon_bytes - before == 64 * MIB
            module.load_gguf_checkpoint(path)
            assert ledger.other_anon_bytes == before
            module.load_gguf_checkpoint(path)
            assert ledger.other_anon_bytes == before


def test_a_model_that_transformers_reads_in_another_way_is_not_followed(
    ledger: Ledger, tmp_path: Path
) -> None:
    quantizer = pytest.importorskip("transformers.quantizers.quantizer_gguf")
    path, _ = file_of(tmp_path, "F32")
    with gguf_reads(ledger, path), pytest.raises(CannotFollow, match="gemma9"):
        quantizer.load_gguf_state_dict(SimpleNamespace(architecture="gemma9"))


def test_other_files_are_read_as_they_are(ledger: Ledger, tmp_path: Path) -> None:
    (path := tmp_path / "model.safetensors").write_bytes(b"GGUX")
    before: Any = module.load_gguf_checkpoint
    with gguf_reads(ledger, path):
        assert module.load_gguf_checkpoint is before
    path, _ = file_of(tmp_path, "F32")
    with gguf_reads(ledger, path):
        assert module.load_gguf_checkpoint is not before
    assert module.load_gguf_checkpoint is before
