"""Write a Hugging Face folder whose model's code comes with it."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

_CONFIGURATION = """
from transformers import PretrainedConfig


class TinyConfig(PretrainedConfig):
    model_type = "weighin-tiny"

    def __init__(self, width=16, **settings):
        super().__init__(**settings)
        self.width = width
"""
_MODELING = """
import torch
from transformers import PreTrainedModel

from .configuration_tiny import TinyConfig


class TinyForCausalLM(PreTrainedModel):
    config_class = TinyConfig
    base_model_prefix = "tiny"

    def __init__(self, config):
        super().__init__(config)
        self.embedding = torch.nn.Embedding(32, config.width)
        self.head = torch.nn.Linear(config.width, 32)
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
        self.post_init()

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, TinyForCausalLM):
            torch.nn.init.constant_(module.scale, 2.0)

    def forward(self, input_ids):
        return self.head(self.embedding(input_ids)) * self.scale[0]
"""
CONFIG: dict[str, Any] = {
    "architectures": ["TinyForCausalLM"],
    "model_type": "weighin-tiny",
    "width": 16,
    "dtype": "float32",
    "auto_map": {"AutoConfig": "configuration_tiny.TinyConfig", "AutoModelForCausalLM": "modeling_tiny.TinyForCausalLM"},
}  # fmt: skip


def write_folder(folder: Path, **changes: Any) -> Path:
    """Write the folder; ``changes`` replace keys of ``config.json``."""
    folder.mkdir(parents=True)
    (folder / "configuration_tiny.py").write_text(_CONFIGURATION)
    (folder / "modeling_tiny.py").write_text(_MODELING)
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))
    random = torch.Generator().manual_seed(0)
    shapes = {"embedding.weight": (32, 16), "head.weight": (32, 16), "head.bias": (32,)}
    tensors = {name: torch.randn(shape, generator=random) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
