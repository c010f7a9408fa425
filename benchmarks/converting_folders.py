"""Make the inputs of configs/suites/converting.yaml: models whose weights a load converts, dequantises or merges.

Each model takes 300 to 800 MB once it is loaded; ``--small`` makes models of less than 2 MB. A folder that
exists is left as it is. The weights are random numbers.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from weighin.models.pretrained import pretrained_class

TESTS: Final = Path(__file__).resolve().parents[1] / "tests"
sys.path += [str(TESTS), str(TESTS / "checkpoints")]

import gguf_files  # noqa: E402 (in the tests, which make small files of the same kinds)
import quantised_folders  # noqa: E402

DEFAULT: Final = Path("results/folders/converting")
_LLAMA: Final[Mapping[str, Any]] = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 16_000, "tie_word_embeddings": False,
}  # fmt: skip
_SMALL_LLAMA: Final[Mapping[str, Any]] = {
    "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "tie_word_embeddings": False,
}  # fmt: skip
_EXPERTS: Final[Mapping[str, Any]] = {
    "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "moe_intermediate_size": 256, "num_experts": 64, "num_experts_per_tok": 4,
    "vocab_size": 32_000,
}  # fmt: skip
_SMALL_EXPERTS: Final = {
    **_EXPERTS, "hidden_size": 64, "num_hidden_layers": 2, "num_experts": 4, "vocab_size": 96,
}  # fmt: skip
_OSS: Final[Mapping[str, Any]] = {
    "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 16_000, "num_local_experts": 16,
    "num_experts_per_tok": 4, "layer_types": ["sliding_attention", "full_attention"] * 3,
}  # fmt: skip
_RANK: Final = 64


def experts(folder: Path, *, small: bool) -> None:
    _saved(folder, "Qwen3MoeForCausalLM", _SMALL_EXPERTS if small else _EXPERTS, torch.bfloat16)


def full_precision(folder: Path, *, small: bool) -> None:
    _saved(folder, "LlamaForCausalLM", _SMALL_LLAMA if small else _LLAMA, torch.float32)


def gguf_of(kind: str) -> Callable[..., None]:
    def write(folder: Path, *, small: bool) -> None:
        model = _made("LlamaForCausalLM", _SMALL_LLAMA if small else _LLAMA, torch.float32)
        folder.mkdir(parents=True)
        arrays = gguf_files.of_llama(model)
        file = folder / f"{folder.name}.gguf"
        gguf_files.write(file, "llama", arrays, kind, gguf_files.described(model))

    return write


def quantised(name: str, sizes: Mapping[str, Any]) -> Callable[..., None]:
    def write(folder: Path, *, small: bool) -> None:
        own = _SMALL_LLAMA if sizes is _LLAMA else None
        quantised_folders.write_folder(folder, name, own if small else sizes)

    return write


def adapted(folder: Path, *, small: bool) -> None:
    """Write a Llama, and beside its folder an adapter of rank 64 of all its linear layers."""
    model = _saved(folder, "LlamaForCausalLM", _SMALL_LLAMA if small else _LLAMA, torch.bfloat16)
    adapter = folder.with_name(f"{folder.name}-adapter")
    adapter.mkdir()
    config = {
        "peft_type": "LORA", "r": _RANK, "lora_alpha": _RANK, "bias": "none", "task_type": "CAUSAL_LM",
        "target_modules": "all-linear", "init_lora_weights": True,
    }  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    matrices = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            prefix = f"base_model.model.{name}"
            matrices[f"{prefix}.lora_A.weight"] = torch.randn(_RANK, module.in_features) / 100
            matrices[f"{prefix}.lora_B.weight"] = torch.randn(module.out_features, _RANK) / 100
    save_file(matrices, adapter / "adapter_model.safetensors", {"format": "pt"})


MAKERS: Final[Mapping[str, Callable[..., None]]] = {
    "experts": experts,
    "float32": full_precision,
    "gguf-Q8_0": gguf_of("Q8_0"),
    "gguf-Q4_K": gguf_of("Q4_K"),
    "gguf-F16": gguf_of("F16"),
    "mxfp4": quantised("mxfp4", _OSS),
    "fp8": quantised("fp8", _LLAMA),
    "lora": adapted,
}


def make(folder: Path, *, small: bool = False) -> None:
    """Write every input that is missing into ``folder``."""
    for name, maker in MAKERS.items():
        if not (folder / name).exists():
            torch.manual_seed(0)
            maker(folder / name, small=small)


def _made(architecture: str, settings: Mapping[str, Any], dtype: torch.dtype) -> Any:
    kind = pretrained_class(architecture)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return kind(kind.config_class(**settings))
    finally:
        torch.set_default_dtype(before)


def _saved(folder: Path, architecture: str, settings: Mapping[str, Any], dtype: torch.dtype) -> Any:
    model = _made(architecture, settings, dtype)
    model.save_pretrained(folder)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT, metavar="FOLDER")
    parser.add_argument("--small", action="store_true", help="models of less than 2 MB")
    options = parser.parse_args()
    make(options.folder, small=options.small)


if __name__ == "__main__":
    main()
