"""An adapter of LoRA is merged as peft merges it, bit by bit."""

import json
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from model_differences import state_differences
from small import FLOATS, Tensors, llama, save
from typed import CommandLine

from weighin import load_pretrained

SIZES = {"hidden_size": 96, "intermediate_size": 160}
CONFIG: dict[str, Any] = {
    "peft_type": "LORA", "r": 5, "lora_alpha": 7, "bias": "none", "target_modules": ["q_proj"],
    "init_lora_weights": True,
}  # fmt: skip
PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"


def base_in(folder: Path, **settings: Any) -> Path:
    torch.manual_seed(3)
    llama(torch.float32, **SIZES | settings).save_pretrained(folder / "base")
    return folder / "base"


def matrices() -> Tensors:
    shapes = {"A": (5, 96), "B": (96, 5)}
    return {f"{PREFIX}.lora_{side}.weight": torch.randn(shape) for side, shape in shapes.items()}


def adapter_in(folder: Path, tensors: Tensors | None = None, **changes: Any) -> Path:
    made = folder / "adapter"
    made.mkdir()
    (made / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    save(tensors or matrices(), made / "adapter_model.safetensors")
    return made


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("dtype", FLOATS)
def test_the_product_is_added_in_float32_and_rounded_once(
    tmp_path: Path, dtype: torch.dtype, use_rslora: bool
) -> None:
    base = base_in(tmp_path)
    halves = {name: one.bfloat16() for name, one in matrices().items()}
    adapter = adapter_in(tmp_path, halves, use_rslora=use_rslora)
    before = load_pretrained(base, dtype=dtype).state_dict()
    after = load_pretrained(base, dtype=dtype, adapter=adapter).state_dict()
    changed = PREFIX.removeprefix("base_model.model.") + ".weight"
    a, b = (one.float() for one in halves.values())
    merged = before[changed].float() + (b @ a) * (7 / sqrt(5) if use_rslora else 7 / 5)
    assert state_differences(after, before | {changed: merged.to(dtype)}) == []


def test_an_adapter_beside_its_model_is_merged_if_it_is_named(tmp_path: Path) -> None:
    base, adapter = base_in(tmp_path), adapter_in(tmp_path)
    expected = load_pretrained(base, adapter=adapter).state_dict()
    for file in adapter.iterdir():
        file.rename(base / file.name)
    found = load_pretrained(base, adapter=base).state_dict()
    assert state_differences(found, expected) == []


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_merged_weights_are_written_as_they_are_loaded(tmp_path: Path, is_tied: bool) -> None:
    base = base_in(tmp_path, tie_word_embeddings=is_tied)
    adapter = adapter_in(tmp_path)
    command = CommandLine(tmp_path, tmp_path / "cache")
    ended = command.run("convert base merged.pt --keys model --dtype bf16 --adapter adapter")
    assert ended.code == 0, ended.err
    expected = load_pretrained(base, dtype=torch.bfloat16, adapter=adapter).state_dict()
    assert state_differences(torch.load(tmp_path / "merged.pt"), expected) == []
