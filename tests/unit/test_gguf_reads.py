"""What a prediction follows of a GGUF file: its head, and not transformers' own dequantising."""

from pathlib import Path

import pytest

from weighin import install
from weighin.predict.dispatch import CannotFollow
from weighin.predict.patches import gguf_reads

pytest.importorskip("gguf", reason=install.command("gguf"))
module = pytest.importorskip(
    "transformers.modeling_gguf_pytorch_utils", reason=install.command("hf")
)
from test_gguf import small  # noqa: E402 (it needs gguf)


def test_the_head_is_read_and_the_values_are_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "load_gguf_checkpoint", lambda path: {"config": {"of": path}})
    path = small(tmp_path / "m.gguf")
    with gguf_reads(path):
        assert module.load_gguf_checkpoint(path, return_tensors=False) == {"config": {"of": path}}
        with pytest.raises(CannotFollow, match="transformers dequantises a GGUF file"):
            module.load_gguf_checkpoint(path, return_tensors=True, model_to_load=None)


def test_a_model_that_transformers_reads_in_another_way_is_not_followed(tmp_path: Path) -> None:
    quantizer = pytest.importorskip("transformers.quantizers.quantizer_gguf")
    with gguf_reads(small(tmp_path / "m.gguf")), pytest.raises(CannotFollow):
        quantizer.load_gguf_state_dict(None)


def test_other_files_are_read_as_they_are(tmp_path: Path) -> None:
    (path := tmp_path / "model.safetensors").write_bytes(b"GGUX")
    before = module.load_gguf_checkpoint
    with gguf_reads(path):
        assert module.load_gguf_checkpoint is before
    with gguf_reads(small(tmp_path / "m.gguf")):
        assert module.load_gguf_checkpoint is not before
    assert module.load_gguf_checkpoint is before
