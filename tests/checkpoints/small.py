"""Small models and state dicts for the makers: seeded, with values of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import torch

LLAMA: Final[dict[str, Any]] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}  # fmt: skip


def transformers() -> Any:
    """Return the package, imported when a maker runs: the list of layouts needs no package."""
    import transformers
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    set_verbosity_error()  # type: ignore[no-untyped-call]
    disable_progress_bar()  # type: ignore[no-untyped-call]
    return transformers


def llama(dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    """Return a small Llama whose weights are in ``dtype``."""
    package = transformers()
    config = package.LlamaConfig(**LLAMA | settings)
    return package.LlamaForCausalLM(config).eval().to(dtype)


def state(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return four tensors, as of an embedding and two linear layers."""
    shapes = {
        "embed.weight": (16, 8), "block.up.weight": (32, 8), "block.up.bias": (32,),
        "block.down.weight": (8, 32),
    }  # fmt: skip
    return {name: torch.randn(shape).to(dtype) for name, shape in shapes.items()}


def edit(path: Path, **changes: Any) -> None:
    """Change keys of a JSON object in a file; None removes the key."""
    content = json.loads(path.read_text()) | changes
    path.write_text(
        json.dumps({key: one for key, one in content.items() if one is not None}, indent=2)
    )
