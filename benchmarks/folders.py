"""Make folders of models with random weights, which suites and pages load.

    .venv/bin/python benchmarks/folders.py converting [FOLDER]
    .venv/bin/python benchmarks/folders.py loaders FOLDER
    .venv/bin/python benchmarks/folders.py published [FOLDER]
    .venv/bin/python benchmarks/folders.py releases [FOLDER]

"converting" are the inputs of configs/suites/converting.yaml, by default in results/folders/converting: models whose
weights a load converts, dequantises or merges, of 300 to 800 MB once they are loaded. "loaders" are those of
docs/results.md, in bfloat16: a Llama of 395 MiB and a mixture of experts of 459 MiB. "published" is the model of a
published run, in results/folders. "releases" are the inputs of configs/suites/releases-*.yaml, in
results/folders/releases, which releases of transformers or diffusers from 2024 on can read: models of 310 to 400 MiB.
A folder that exists is left as it is.
"""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

from weighin.models.pretrained import pretrained_class
from weighin.stream.hugging_face_folder import own_dtype
from weighin.suite import registry

TESTS: Final = Path(__file__).resolve().parents[1] / "tests"
sys.path += [str(TESTS), str(TESTS / "checkpoints")]

import gguf_files  # noqa: E402 (in the tests, which make small files of the same kinds)
import quantised_folders  # noqa: E402

Sizes = Mapping[str, Any]
LLAMA: Final[Sizes] = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 16_000, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS: Final[Sizes] = {
    "hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
    "head_dim": 64, "moe_intermediate_size": 256, "num_experts": 64, "num_experts_per_tok": 4,
    "vocab_size": 32_000,
}  # fmt: skip
OSS: Final[Sizes] = {
    "hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 16_000, "num_local_experts": 16,
    "num_experts_per_tok": 4, "layer_types": ["sliding_attention", "full_attention"] * 3,
}  # fmt: skip
DENSE: Final[Sizes] = {**LLAMA, "num_hidden_layers": 6}
MIXTRAL: Final[Sizes] = {
    "hidden_size": 512, "intermediate_size": 896, "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "num_local_experts": 8, "vocab_size": 9_000,
    "max_position_embeddings": 4096,  # of each layer, transformers 4.40 keeps tables of this length
}  # fmt: skip
RANK: Final = 64


def made(architecture: str, settings: Sizes, dtype: torch.dtype) -> Any:
    """Return a model of transformers with random weights."""
    kind = pretrained_class(architecture)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return kind(kind.config_class(**settings))
    finally:
        torch.set_default_dtype(before)


def saved(name: str, sizes: Sizes, folder: Path, dtype: torch.dtype = torch.bfloat16) -> None:
    made(name, sizes, dtype).save_pretrained(folder)


def built_in(folder: Path) -> None:
    """Write a model that weighin knows by the folder's name, in its own dtype."""
    spec = registry.model(folder.name.lower())
    kind = pretrained_class(spec.kwargs["architecture"])
    torch.set_default_dtype(getattr(torch, own_dtype(spec)))
    kind(kind.config_class.from_dict(spec.kwargs["config"])).save_pretrained(folder)


def readable(folder: Path) -> None:
    """Add the keys of releases before transformers 5 to config.json, beside those that replaced them."""
    config = json.loads((file := folder / "config.json").read_text())
    config |= {
        "torch_dtype": config["dtype"],
        "rope_theta": config["rope_parameters"]["rope_theta"],
    }
    file.write_text(json.dumps(config, indent=2))


def readable_saved(architecture: str, settings: Sizes, folder: Path) -> None:
    saved(architecture, settings, folder, torch.float32)
    readable(folder)


def pickled(maker: Callable[[Path], object], folder: Path) -> None:
    """Write a folder with a .bin, which today's releases read, but no longer write."""
    maker(folder)
    (weights,) = folder.glob("*.safetensors")
    stem = "pytorch_model" if weights.stem == "model" else weights.stem
    torch.save(load_file(weights), folder / f"{stem}.bin")
    weights.unlink()


def readable_quantised(folder: Path) -> None:
    quantised_folders.write_folder(folder, "fp8", {**LLAMA, "head_dim": 64})
    readable(folder)


def readable_gguf(folder: Path) -> None:
    """Write a Llama as GGUF, with the config.json that transformers 4.44 asks for."""
    gguf_of("Q8_0", folder, DENSE)
    kind = pretrained_class("LlamaForCausalLM")
    config = kind.config_class(**DENSE, architectures=[kind.__name__], dtype="float32")
    config.save_pretrained(folder)
    readable(folder)


def unet(folder: Path) -> None:
    from diffusers import UNet2DConditionModel  # which no other folder needs

    net: Any = UNet2DConditionModel(block_out_channels=(96, 192, 384, 384), cross_attention_dim=768)
    net.save_pretrained(folder)


def gguf_of(kind: str, folder: Path, settings: Sizes = LLAMA) -> None:
    model = made("LlamaForCausalLM", settings, torch.float32)
    folder.mkdir(parents=True)
    file, arrays = folder / f"{folder.name}.gguf", gguf_files.of_llama(model)
    gguf_files.write(file, "llama", arrays, kind, model)


def adapted(folder: Path) -> None:
    """Write a Llama, and beside its folder an adapter of rank 64 of all its linear layers."""
    model = made("LlamaForCausalLM", LLAMA, torch.bfloat16)
    model.save_pretrained(folder)
    adapter = folder.with_name(f"{folder.name}-adapter")
    adapter.mkdir()
    config = {
        "peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "bias": "none", "task_type": "CAUSAL_LM",
        "target_modules": "all-linear", "init_lora_weights": True,
    }  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    matrices = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            prefix = f"base_model.model.{name}"
            matrices[f"{prefix}.lora_A.weight"] = torch.randn(RANK, module.in_features) / 100
            matrices[f"{prefix}.lora_B.weight"] = torch.randn(module.out_features, RANK) / 100
    save_file(matrices, adapter / "adapter_model.safetensors", {"format": "pt"})


MAKERS: Final[Mapping[str, Mapping[str, Callable[[Path], object]]]] = {
    "converting": {
        "experts": partial(saved, "Qwen3MoeForCausalLM", EXPERTS),
        "float32": partial(saved, "LlamaForCausalLM", LLAMA, dtype=torch.float32),
        "gguf-Q8_0": partial(gguf_of, "Q8_0"),
        "gguf-Q4_K": partial(gguf_of, "Q4_K"),
        "gguf-F16": partial(gguf_of, "F16"),
        "mxfp4": partial(quantised_folders.write_folder, name="mxfp4", sizes=OSS),
        "fp8": partial(quantised_folders.write_folder, name="fp8", sizes=LLAMA),
        "lora": adapted,
    },
    "published": {"Qwen3-0.6B": built_in},
    "releases": {
        "dense": partial(readable_saved, "LlamaForCausalLM", DENSE),
        "experts": partial(readable_saved, "MixtralForCausalLM", MIXTRAL),
        "bin": partial(pickled, partial(readable_saved, "LlamaForCausalLM", DENSE)),
        "gguf": readable_gguf,
        "fp8": readable_quantised,
        "unet": unet,
        "unet-bin": partial(pickled, unet),
    },
    "loaders": {
        "llama": partial(saved, "LlamaForCausalLM", {**LLAMA, "vocab_size": 32_000}),
        "moe": partial(saved, "Qwen3MoeForCausalLM", EXPERTS),
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("which", choices=MAKERS)
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER")
    options = parser.parse_args()
    own = options.which in ("converting", "releases")
    folder = options.folder or Path("results/folders", options.which if own else "")
    for name, maker in MAKERS[options.which].items():
        if not (folder / name).exists():
            torch.manual_seed(0)
            maker(folder / name)


if __name__ == "__main__":
    main()
