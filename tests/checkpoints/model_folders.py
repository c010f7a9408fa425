"""Folders that save_pretrained wrote, and what people change in them."""

import json
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from layouts import Layout, Made, Maker, all_but, refused
from small import WEIGHTS, clip_config, config, edit, folder_of, llama, rewrite, t5, transformers

GROUP: Final = "Folders of transformers"


def _bin(folder: Path) -> Made:
    model = llama()
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return Made(folder)


def _file_of_other_values(folder: Path) -> None:
    llama().save_pretrained(folder / "other")
    (folder / "other" / WEIGHTS).rename(folder / WEIGHTS)


def _towers() -> Any:
    return transformers().CLIPModel(clip_config(32, 4)).to(torch.bfloat16)


def _text_in_float32(folder: Path) -> None:
    text = json.loads((folder / "config.json").read_text())["text_config"]
    edit(folder / "config.json", text_config=text | {"dtype": "float32"})


def _mixture() -> Any:
    package = transformers()
    config = package.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    return package.MixtralForCausalLM(config).to(torch.bfloat16)


def _in_reversed_order(folder: Path) -> None:
    def change(names: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert any(".experts.0." in name for name in names)
        return dict(reversed(names.items()))

    rewrite(folder / WEIGHTS, change)


def _gptj() -> Any:
    package = transformers()
    config = package.GPTJConfig(
        vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, rotary_dim=4
    )
    return package.GPTJForCausalLM(config).to(torch.float16)


def _more_keys(folder: Path) -> None:
    names = [f"model.layers.{number}.self_attn.rotary_emb.inv_freq" for number in (0, 1)]
    rewrite(folder / WEIGHTS, lambda state: state | {name: torch.ones(4) for name in names})


def _dtype_spelled(spelling: object) -> Maker:
    return folder_of(partial(llama, torch.float16), config(dtype=spelling))


def _dtype_null(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dtype": None}))


_RIGHT: Final[dict[str, Maker]] = {
    "one safetensors file": folder_of(llama),
    "shards": folder_of(llama, max_shard_size="20KB"),
    "pytorch_model.bin": _bin,
    "no dtype in config.json": folder_of(llama, config(dtype=None, torch_dtype=None)),
    "dtype null in config.json": folder_of(partial(llama, torch.float16), _dtype_null),
    "tied embeddings": folder_of(partial(llama, tie_word_embeddings=True)),
    "tied by the config, two matrices in the file": folder_of(llama, config(tie_word_embeddings=True)),
    "model.safetensors beside an index of other values": folder_of(llama, _file_of_other_values, max_shard_size="20KB"),
    "parts with dtypes of their own": folder_of(_towers, _text_in_float32),
    "experts one by one": folder_of(_mixture, _in_reversed_order),
    "encoder and decoder share an embedding": folder_of(t5),
    "buffers that are computed": folder_of(_gptj),
    "keys that no module has any more": folder_of(llama, _more_keys),
}  # fmt: skip

LAYOUTS: Final = [
    *(Layout(name, GROUP, make) for name, make in _RIGHT.items()),
    Layout(
        "weights of the model without its head", GROUP,
        folder_of(lambda: llama().model, config(architectures=["LlamaForCausalLM"])), refused("lm_head", all_but("inspect")),
    ),
    Layout("another vocabulary than the config's", GROUP, folder_of(llama, config(vocab_size=80)), refused("another shape", all_but("inspect"))),
    Layout("config.json without weights", GROUP, folder_of(llama, lambda folder: (folder / WEIGHTS).unlink()), refused("no weights")),
    *(
        Layout(f"dtype {spelling!r} in config.json", GROUP, _dtype_spelled(spelling), refused("dtype", all_but("inspect")))
        for spelling in ("auto", "torch.float16")
    ),
    Layout(
        "float64", GROUP, folder_of(partial(llama, torch.float64)),
        refused("float64", ("streaming", "transformers", "baseline", "predict", "recommend")),
    ),
]  # fmt: skip
