"""A sentence-transformers folder of several parts is one model of its library, and no checkpoint."""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import refused
from safetensors.torch import save_file

from weighin import load_pretrained
from weighin.stream import formats

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
PARTS = {"0_Transformer": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}


def package() -> Any:
    reason = "needs weighin[sentence-transformers]"
    return pytest.importorskip("sentence_transformers", reason=reason, exc_type=ImportError)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the names of the real one, and small tensors."""
    listed = [
        {"name": path[0], "path": path, "type": f"sentence_transformers.models.{kind}"}
        for path, kind in PARTS.items()
    ]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    for path in PARTS:
        (tmp_path / path).mkdir()
        (tmp_path / path / "config.json").write_text("{}")
    save_file({"embed.weight": torch.ones(4, 2)}, tmp_path / "0_Transformer" / "model.safetensors")
    torch.save({"linear.bias": torch.zeros(3)}, tmp_path / "2_Dense" / "pytorch_model.bin")
    return tmp_path


def test_as_one_checkpoint_its_parts_are_named(folder: Path) -> None:
    message, repair = refused(formats.read, folder).split("\n")
    assert "a sentence-transformers folder of several parts: 0_Transformer, 2_Dense" in message
    assert repair.startswith(f"give the folder of one part: {folder}/0_Transformer")


def test_a_part_outside_the_folder_is_refused(folder: Path) -> None:
    package()
    listed = json.loads((folder / "modules.json").read_text())
    listed[1]["path"] = "../other"
    (folder / "modules.json").write_text(json.dumps(listed))
    assert "fails: ValueError: Invalid model path '../other'" in refused(load_pretrained, folder)


def test_without_the_package_the_parts_and_the_package_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    message, repair = refused(load_pretrained, folder).split("\n")
    assert "in 0_Transformer, 2_Dense, needs the Python package sentence_transformers: " in message
    assert "sentence-transformers" in repair


def test_an_option_for_one_part_is_refused(folder: Path) -> None:
    message, repair = refused(load_pretrained, folder, variant="fp16").split("\n")
    assert "of several parts, for which load_pretrained has no variant" in message
    assert "such as one of its parts" in repair


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **model.state_dict()}


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that sentence-transformers itself loads."""
    package()
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "checkpoints"))
    torch.manual_seed(0)
    path: Path = import_module("folder_choices")._several_parts(tmp_path).path
    return path


def test_the_model_is_what_the_package_loads(whole: Path) -> None:
    reference = package().SentenceTransformer(
        str(whole), device="cpu", model_kwargs={"dtype": torch.bfloat16}
    )
    before = torch.get_rng_state()
    own = load_pretrained(whole, dtype=torch.bfloat16)
    assert torch.equal(torch.get_rng_state(), before)
    found, wanted = tensors_of(own), tensors_of(reference)
    assert list(found) == list(wanted)
    for name, one in wanted.items():
        assert found[name].dtype == one.dtype, name
        assert torch.equal(found[name], one), name
    assert [one.training for one in own.modules()] == [one.training for one in reference.modules()]


def test_a_transformer_in_the_folder_itself_is_loaded_with_its_other_parts(
    whole: Path, tmp_path: Path
) -> None:
    package().SentenceTransformer(str(whole), device="cpu").save(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").exists()
    found, wanted = (tensors_of(load_pretrained(one)) for one in (tmp_path / "saved", whole))
    assert "2.linear.weight" in found
    assert found.keys() == wanted.keys()
    assert all(torch.equal(one, found[name]) for name, one in wanted.items())


def test_a_part_whose_weights_do_not_fit_is_refused(whole: Path) -> None:
    save_file({"linear.weight": torch.ones(8, 32)}, whole / "2_Dense" / "model.safetensors")
    assert "linear.bias" in refused(load_pretrained, whole)
