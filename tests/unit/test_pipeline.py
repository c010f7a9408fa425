"""A pipeline of diffusers is refused with its parts, each of which is a model; the largest is named."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from factories import refused
from safetensors.torch import save_file

from weighin import load_pretrained
from weighin.cli.app import app

WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a pipeline of a unet and a smaller vae, without a tokenizer's folder."""
    index = {
        "_class_name": "TestPipeline", "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"], "scheduler": ["diffusers", "PNDMScheduler"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
    }  # fmt: skip
    root = tmp_path / "pipe line"
    for name in ("vae", "unet", "scheduler"):
        (root / name).mkdir(parents=True)
    for name, size in (("unet", 64), ("vae", 16)):
        save_file({"w": torch.ones(size)}, root / name / WEIGHTS)
        (root / name / "config.json").write_text('{"_class_name": "X"}')
    (root / "model_index.json").write_text(json.dumps(index))
    return root


@pytest.mark.parametrize("index", ["", "[" * 5000], ids=["whole", "damaged"])
@pytest.mark.parametrize(
    "words",
    ["bench {} --ram 8g", "floor {}", "convert {} out.safetensors", "inspect {}", "predict {}", "recommend {}", ""],
)  # fmt: skip
def test_every_verb_and_load_pretrained_name_the_parts_and_the_largest(
    folder: Path, words: str, index: str
) -> None:
    if index:
        (folder / "model_index.json").write_text(index)
    typed = [str(folder) if word == "{}" else word for word in words.split()]
    act = (
        partial(app.main, typed, standalone_mode=False)
        if words
        else partial(load_pretrained, folder)
    )
    assert refused(act) == (
        f"{folder}: a diffusers pipeline of 2 models: unet (328 B), vae (128 B)\ngive one of them;"
        f" the largest: {folder / 'unet'}"
    )
