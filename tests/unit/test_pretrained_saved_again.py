"""What else of a model of ``load_pretrained`` equals ``from_pretrained``: its name, and what it saves."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from weighin import load_pretrained
from weighin.models.pretrained import pretrained_class

EXPERTS = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128, "head_dim": 8,
    "intermediate_size": 64, "num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}  # fmt: skip


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    kind = pretrained_class("Qwen3MoeForCausalLM")
    torch.manual_seed(0)
    model = kind(kind.config_class(**EXPERTS)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "experts")
    return tmp_path / "experts"


def from_pretrained(folder: Path, **options: Any) -> Any:
    return pretrained_class("Qwen3MoeForCausalLM").from_pretrained(folder, **options)


def saved_keys(model: Any, folder: Path) -> set[str]:
    model.save_pretrained(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


@pytest.mark.parametrize("keys", ["of the file", "of the model"])
def test_a_loaded_model_is_saved_with_the_keys_that_its_file_has(
    experts: Path, tmp_path: Path, keys: str
) -> None:
    reference = from_pretrained(experts)
    if keys == "of the model":
        save_file(reference.state_dict(), experts / "model.safetensors", {"format": "pt"})
        reference = from_pretrained(experts)
    found = saved_keys(load_pretrained(experts), tmp_path / "found")
    assert found == saved_keys(reference, tmp_path / "wanted")


def test_a_loaded_model_and_its_modules_name_their_folder(experts: Path) -> None:
    def names(model: Any) -> dict[str, str]:
        found = {
            path: module.name_or_path
            for path, module in model.named_modules()
            if isinstance(module, PreTrainedModel)
        }
        return found | {"config": model.config.name_or_path}

    reference = from_pretrained(experts)
    assert names(load_pretrained(experts)) == names(reference)


def test_a_loaded_model_has_no_attribute_that_from_pretrained_does_not_give(experts: Path) -> None:
    reference = from_pretrained(experts)
    assert vars(load_pretrained(experts)).keys() <= vars(reference).keys()
