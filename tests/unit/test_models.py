"""The models are what the notebook's figures speak of."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from weighin import install
from weighin.errors import ConfigError
from weighin.models import gpt2, stack, tied
from weighin.stream.construct import resolve_builder
from weighin.stream.hugging_face_folder import BUILDER, folder_library, own_dtype
from weighin.stream.pretrained_library import module_of
from weighin.suite import registry

CONFIGS = Path(__file__).parents[2] / "configs" / "models"

PUBLISHED = {
    "bert-base": (109_514_298, "float32"), "clip-base": (151_277_313, "float32"),
    "deepseek-v3-bf16": (671_026_404_352, "bfloat16"), "gemma-3-1b": (999_885_952, "bfloat16"),
    "gpt-oss-20b-bf16": (20_914_757_184, "bfloat16"), "llama-8b": (8_030_261_248, "bfloat16"),
    "minilm": (22_713_216, "float32"), "mistral-7b": (7_248_023_552, "bfloat16"),
    "qwen3-0.6b": (596_049_920, "bfloat16"), "qwen3-30b-a3b": (30_532_122_624, "bfloat16"),
    "qwen3-8b": (8_190_735_360, "bfloat16"), "t5-base": (222_903_552, "float32"),
    "vit-base": (86_567_656, "float32"), "whisper-small": (241_734_912, "float32"),
}  # fmt: skip
"""The number of parameters, a tied one once, and the dtype of each model of transformers."""


def made(name: str, device: str = "meta") -> Any:
    spec = registry.model(name)
    with torch.device(device):
        return resolve_builder(spec.builder)(**spec.kwargs)


def test_gpt2_xl_has_the_notebooks_size() -> None:
    model = made("gpt2-xl")
    sizes = [tensor.nbytes for tensor in model.state_dict().values()]
    assert len(sizes) == 821
    assert sum(parameter.numel() for parameter in model.parameters()) == 1_638_022_400
    assert f"{sum(sizes) / 1024**3:.3f}" == "6.290"
    assert f"{max(sizes) / 1024**3:.4f}" == "0.2996"


@pytest.mark.parametrize("kind", ["tensors", "nested"])
@pytest.mark.parametrize("tensors", [200, 2000, 20_000])
def test_stacks_of_one_size_have_few_or_many_tensors(tensors: int, kind: str) -> None:
    state = made(f"{kind}-{tensors}").state_dict()
    assert len(state) == tensors
    assert sum(tensor.nbytes for tensor in state.values()) == 20_000 * 64 * 64 * 4
    model = stack.nested(blocks=3, layers=2, width=8, inner=5)
    assert model(stack.example_inputs(width=8)).shape == (1, 8)


@pytest.mark.parametrize(("name", "module"), [("gpt2-tiny", gpt2), ("tied-tiny", tied)])
def test_a_tiny_model_is_about_two_mib_and_runs(name: str, module: Any) -> None:
    model, kwargs = made(name, "cpu"), registry.model(name).kwargs
    assert not model.training
    assert 1.5 < sum(tensor.nbytes for tensor in model.parameters()) / 1024**2 < 2.5
    inputs = module.example_inputs(**kwargs)
    assert inputs[0].shape == (1, 16)
    with torch.inference_mode():
        logits = model(*inputs)
    assert logits.shape == (1, 16, kwargs["vocab_size"])
    assert torch.isfinite(logits).all()


def test_attention_sees_no_later_token() -> None:
    model = gpt2.gpt2(vocab_size=64, context_length=16, emb_dim=16, n_layers=2, n_heads=2)
    ids = torch.arange(8).unsqueeze(0)
    changed = ids.clone()
    changed[0, -1] = 63
    with torch.inference_mode():
        torch.testing.assert_close(model(ids)[:, :-1], model(changed)[:, :-1])


def test_every_model_file_has_its_own_name_and_a_builder() -> None:
    of_transformers = set()
    for path in CONFIGS.glob("*.yaml"):
        assert path.read_text().startswith("# ")
        config = yaml.safe_load(path.read_text())
        assert set(config) == {"name", "builder", "kwargs", "description"}
        assert config["name"] == path.stem
        resolve_builder(config["builder"])
        if config["builder"] == BUILDER:
            of_transformers.add(path.stem)
    assert of_transformers == set(PUBLISHED)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_of_transformers_has_the_published_size_and_dtype(name: str) -> None:
    pytest.importorskip("transformers", reason=install.command("hf"))
    spec, (parameters, dtype) = registry.model(name), PUBLISHED[name]
    assert not folder_library(spec)
    assert sum(parameter.numel() for parameter in made(name).parameters()) == parameters
    assert f"{parameters:,} parameters" in (CONFIGS / f"{name}.yaml").read_text()
    assert own_dtype(spec) == dtype


def test_an_unknown_class_is_named_before_the_load() -> None:
    with pytest.raises(ConfigError, match="has no model class 'NoSuchModel'"):
        module_of(BUILDER).import_class({"architecture": "NoSuchModel", "config": {}})
