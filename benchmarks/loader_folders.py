"""Make the Hugging Face folders that docs/loaders.md shows: a Llama of 395 MiB and a mixture of experts of 459 MiB.

Their weights are random numbers in bfloat16. ``FOLDER/llama`` and ``FOLDER/moe`` must not exist.
"""

import argparse
from pathlib import Path
from typing import Any, Final

import torch

from weighin.models.pretrained import pretrained_class

MODELS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("LlamaForCausalLM", {
        "hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16,
        "num_key_value_heads": 8, "intermediate_size": 2816, "vocab_size": 32_000,
    }),
    "moe": ("Qwen3MoeForCausalLM", {
        "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "moe_intermediate_size": 256,
        "num_experts": 64, "num_experts_per_tok": 4, "vocab_size": 32_000,
    }),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    folder = parser.parse_args().folder
    torch.set_default_dtype(torch.bfloat16)
    for name, (architecture, settings) in MODELS.items():
        (folder / name).mkdir(parents=True)
        torch.manual_seed(0)
        kind = pretrained_class(architecture)
        kind(kind.config_class(**settings)).save_pretrained(folder / name)


if __name__ == "__main__":
    main()
