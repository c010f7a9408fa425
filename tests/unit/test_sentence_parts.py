"""A sentence-transformers folder of several parts is one model of its library, and no checkpoint."""

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from weighin import load_pretrained
from weighin.errors import CheckpointError, ConfigError
from weighin.stream import formats

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
PARTS = {
    "0": ("0_Transformer", "Transformer"),
    "1": ("1_Pooling", "Pooling"),
    "2": ("2_Dense", "Dense"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the names of the real one, and small tensors."""
    listed = [
        {"name": name, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for name, (path, kind) in PARTS.items()
    ]
    (tmp_path / "modules.json").write_text(json.dumps(listed))
    for path, _ in PARTS.values():
        (tmp_path / path).mkdir()
        (tmp_path / path / "config.json").write_text("{}")
    save_file({"embed.weight": torch.ones(4, 2)}, tmp_path / "0_Transformer" / "model.safetensors")
    torch.save({"linear.bias": torch.zeros(3)}, tmp_path / "2_Dense" / "pytorch_model.bin")
    return tmp_path


def test_as_one_checkpoint_its_parts_are_named(folder: Path) -> None:
    with pytest.raises(
        CheckpointError,
        match="a sentence-transformers folder of several parts: 0_Transformer, 2_Dense",
    ) as caught:
        formats.read(folder)
    assert caught.value.repair.startswith(f"give the folder of one part: {folder}/0_Transformer")


def test_a_part_outside_the_folder_is_refused(folder: Path) -> None:
    pytest.importorskip(
        "sentence_transformers", reason="needs weighin[sentence-transformers]", exc_type=ImportError
    )
    listed = json.loads((folder / "modules.json").read_text())
    listed[1]["path"] = "../other"
    (folder / "modules.json").write_text(json.dumps(listed))
    with pytest.raises(
        CheckpointError, match=r"fails: ValueError: Invalid model path '\.\./other'"
    ):
        load_pretrained(folder)


def test_a_transformer_in_the_folder_itself_is_a_model_of_transformers(folder: Path) -> None:
    (folder / "config.json").write_text("{}")
    save_file({"w": torch.ones(2)}, folder / "model.safetensors")
    assert formats.detect(folder) == "safetensors"


def test_without_the_package_the_parts_and_the_package_are_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(
        ConfigError,
        match=r"in 0_Transformer, 2_Dense, needs the Python package sentence_transformers: ",
    ) as caught:
        load_pretrained(folder)
    assert "sentence-transformers" in caught.value.repair


def test_an_option_for_one_part_is_refused(folder: Path) -> None:
    with pytest.raises(
        ConfigError, match="of several parts, for which load_pretrained has no variant"
    ) as caught:
        load_pretrained(folder, variant="fp16")
    assert "such as one of its parts" in caught.value.repair


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers()), **model.state_dict()}


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[Path]:
    pytest.importorskip(
        "sentence_transformers", reason="needs weighin[sentence-transformers]", exc_type=ImportError
    )
    sys.path.insert(0, str(CHECKPOINTS))
    torch.manual_seed(0)
    yield import_module("folder_choices")._several_parts(tmp_path).path
    sys.path.remove(str(CHECKPOINTS))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_model_is_what_the_package_loads(whole: Path, dtype: torch.dtype | None) -> None:
    from sentence_transformers import SentenceTransformer

    options: dict[str, Any] = {"model_kwargs": {"dtype": dtype}} if dtype else {}
    reference = SentenceTransformer(str(whole), device="cpu", **options)
    before = torch.get_rng_state()
    own = load_pretrained(whole, dtype=dtype or "auto")
    assert torch.equal(torch.get_rng_state(), before)
    found, wanted = tensors_of(own), tensors_of(reference)
    assert list(found) == list(wanted)
    for name, one in wanted.items():
        assert found[name].dtype == one.dtype, name
        assert torch.equal(found[name], one), name
    assert [one.training for one in own.modules()] == [one.training for one in reference.modules()]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_transformer_in_the_folder_itself_is_loaded_with_its_other_parts(
    whole: Path, tmp_path: Path
) -> None:
    from sentence_transformers import SentenceTransformer

    SentenceTransformer(str(whole), device="cpu").save(str(tmp_path / "saved"))
    assert (tmp_path / "saved" / "model.safetensors").exists()
    found, wanted = (
        tensors_of(load_pretrained(tmp_path / "saved")),
        tensors_of(load_pretrained(whole)),
    )
    assert "2.linear.weight" in found
    assert found.keys() == wanted.keys()
    assert all(torch.equal(one, found[name]) for name, one in wanted.items())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_weight_of_a_part_within_a_part_stays_mapped(whole: Path, tmp_path: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(whole / "0_Transformer")
    static = [modules.StaticEmbedding(tokenizer, embedding_dim=8) for _ in "ab"]
    router = modules.Router.for_query_document([static[0]], [static[1]])
    folder = tmp_path / "saved"
    SentenceTransformer(modules=[router, modules.Dense(8, 4)], device="cpu").save(str(folder))
    model = load_pretrained(folder)
    assert str(folder) not in Path("/proc/self/maps").read_text()
    assert len([*model.parameters()]) == 4


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_part_whose_weights_do_not_fit_is_refused(whole: Path) -> None:
    save_file({"linear.weight": torch.ones(8, 32)}, whole / "2_Dense" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"linear\.bias"):
        load_pretrained(whole)
