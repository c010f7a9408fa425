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

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def package() -> Any:
    reason = "needs weighin[sentence-transformers]"
    return pytest.importorskip("sentence_transformers", reason=reason, exc_type=ImportError)


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that sentence-transformers itself loads."""
    package()
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "checkpoints"))
    torch.manual_seed(0)
    path: Path = import_module("folder_choices")._several_parts(tmp_path).path
    return path


def test_a_part_outside_the_folder_is_refused(whole: Path) -> None:
    listed = json.loads((whole / "modules.json").read_text())
    listed[1]["path"] = "../other"
    (whole / "modules.json").write_text(json.dumps(listed))
    assert "fails: ValueError: Invalid model path '../other'" in refused(load_pretrained, whole)


def test_without_the_package_the_parts_and_the_package_are_named(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    message, repair = refused(load_pretrained, whole).split("\n")
    assert "in 0_Transformer, 2_Dense, needs the Python package sentence_transformers: " in message
    assert "sentence-transformers" in repair


def test_an_option_for_one_part_is_refused(whole: Path) -> None:
    message, repair = refused(load_pretrained, whole, variant="fp16").split("\n")
    assert "of several parts, for which load_pretrained has no variant" in message
    assert "leave out variant, or give the folder of one part" in repair


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **model.state_dict()}


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


def test_a_part_whose_weights_do_not_fit_is_refused(whole: Path) -> None:
    save_file({"linear.weight": torch.ones(8, 32)}, whole / "2_Dense" / "model.safetensors")
    assert "linear.bias" in refused(load_pretrained, whole)
