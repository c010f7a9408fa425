"""Folders that save_pretrained wrote, and what people change in them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from layouts import Layout, Made, all_but, refused
from small import edit, llama, transformers

GROUP: Final = "Folders of transformers"


def _whole(folder: Path) -> Made:
    llama().save_pretrained(folder)
    return Made(folder)


def _sharded(folder: Path) -> Made:
    llama().save_pretrained(folder, max_shard_size="20KB")
    return Made(folder)


def _bin(folder: Path) -> Made:
    model = llama()
    model.config.save_pretrained(folder)
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return Made(folder)


def _no_dtype(folder: Path) -> Made:
    llama().save_pretrained(folder)
    edit(folder / "config.json", dtype=None, torch_dtype=None)
    return Made(folder)


def _dtype_spelled(spelling: object) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        llama(torch.float16).save_pretrained(folder)
        edit(folder / "config.json", dtype=spelling)
        return Made(folder)

    return make


def _tied(folder: Path) -> Made:
    llama(tie_word_embeddings=True).save_pretrained(folder)
    return Made(folder)


def _tied_but_different(folder: Path) -> Made:
    llama(tie_word_embeddings=False).save_pretrained(folder)
    edit(folder / "config.json", tie_word_embeddings=True)
    return Made(folder)


def _file_beside_index(folder: Path) -> Made:
    llama().save_pretrained(folder, max_shard_size="20KB")
    llama().save_pretrained(folder / "other")
    (folder / "other" / "model.safetensors").rename(folder / "model.safetensors")
    return Made(folder)


def _parts_with_dtypes(folder: Path) -> Made:
    package = transformers()
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = package.CLIPConfig(
        text_config=tower | {"num_attention_heads": 4, "vocab_size": 64},
        vision_config=tower | {"num_attention_heads": 4, "image_size": 16, "patch_size": 8},
        projection_dim=16,
    )
    package.CLIPModel(config).to(torch.bfloat16).save_pretrained(folder)
    content = json.loads((folder / "config.json").read_text())
    content["text_config"]["dtype"] = "float32"
    edit(folder / "config.json", **content)
    return Made(folder)


def _experts_one_by_one(folder: Path) -> Made:
    from safetensors.torch import load_file, save_file

    package = transformers()
    config = package.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    package.MixtralForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    names = load_file(folder / "model.safetensors")
    assert any(".experts.0." in name for name in names)
    save_file(dict(reversed(names.items())), folder / "model.safetensors", {"format": "pt"})
    return Made(folder)


def _encoder_decoder(folder: Path) -> Made:
    package = transformers()
    config = package.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    package.T5ForConditionalGeneration(config).save_pretrained(folder)
    return Made(folder)


def _buffers(folder: Path) -> Made:
    package = transformers()
    config = package.GPTJConfig(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, rotary_dim=4
    )
    package.GPTJForCausalLM(config).to(torch.float16).save_pretrained(folder)
    return Made(folder)


def _base_model_only(folder: Path) -> Made:
    llama().model.save_pretrained(folder)
    edit(folder / "config.json", architectures=["LlamaForCausalLM"])
    return Made(folder)


def _more_keys(folder: Path) -> Made:
    from safetensors.torch import load_file, save_file

    llama().save_pretrained(folder)
    file = folder / "model.safetensors"
    names = {
        f"model.layers.{number}.self_attn.rotary_emb.inv_freq": torch.ones(4) for number in (0, 1)
    }
    save_file(load_file(file) | names, file, {"format": "pt"})
    return Made(folder)


def _wrong_shape(folder: Path) -> Made:
    llama().save_pretrained(folder)
    edit(folder / "config.json", vocab_size=80)
    return Made(folder)


def _only_config(folder: Path) -> Made:
    llama().save_pretrained(folder)
    (folder / "model.safetensors").unlink()
    return Made(folder)


def _float64(folder: Path) -> Made:
    llama(torch.float64).save_pretrained(folder)
    return Made(folder)


_RIGHT: Final[dict[str, Callable[[Path], Made]]] = {
    "one safetensors file": _whole,
    "shards": _sharded,
    "pytorch_model.bin": _bin,
    "no dtype in config.json": _no_dtype,
    "dtype null in config.json": _dtype_spelled(None),
    "tied embeddings": _tied,
    "tied by the config, two matrices in the file": _tied_but_different,
    "model.safetensors beside an index of other values": _file_beside_index,
    "parts with dtypes of their own": _parts_with_dtypes,
    "experts one by one": _experts_one_by_one,
    "encoder and decoder share an embedding": _encoder_decoder,
    "buffers that are computed": _buffers,
    "keys that no module has any more": _more_keys,
}

LAYOUTS: Final = [
    *(Layout(name, GROUP, make) for name, make in _RIGHT.items()),
    Layout("weights of the model without its head", GROUP, _base_model_only, refused("lm_head", all_but("inspect"))),
    Layout("another vocabulary than the config's", GROUP, _wrong_shape, refused("another shape", all_but("inspect"))),
    Layout("config.json without weights", GROUP, _only_config, refused("no weights")),
    *(
        Layout(
            f"dtype {spelling!r} in config.json",
            GROUP,
            _dtype_spelled(spelling),
            refused("dtype", all_but("inspect")),
        )
        for spelling in ("auto", "torch.float16")
    ),
    Layout("float64", GROUP, _float64, refused("float64", ("streaming", "transformers", "baseline", "predict", "recommend"))),
]  # fmt: skip
