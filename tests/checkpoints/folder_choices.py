"""Folders in which a variant, a class, a file or a revision is to be chosen, and indexes that contradict."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from layouts import VERBS, Layout, Made, all_but, refused
from small import edit, llama, transformers

GROUP: Final = "Choices in a folder of transformers"
INDEX: Final = "model.safetensors.index.json"


def _bert(kind: str = "BertModel") -> Any:
    package = transformers()
    config = package.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=32,
    )  # fmt: skip
    return getattr(package, kind)(config)


def _variant(shard: str = "1GB", *, beside: bool = False) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        if beside:
            llama(torch.float32).save_pretrained(folder)
        llama(torch.float16).save_pretrained(folder, variant="fp16", max_shard_size=shard)
        return Made(folder)

    return make


def _saved_as(kind: str) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        _bert(kind).save_pretrained(folder)
        return Made(folder)

    return make


def _composite(folder: Path) -> Made:
    """Write a model of texts and images, whose text part is a model, too."""
    package = transformers()
    text = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
        "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["full_attention", "full_attention"],
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}  # fmt: skip
    config = package.Qwen3_5Config(text_config=text, vision_config=vision)
    package.Qwen3_5ForConditionalGeneration(config).save_pretrained(folder)
    return Made(folder)


def _head_beside_a_pooler(folder: Path) -> Made:
    """Write a model with a head, and the pooler that AutoModel would draw at random if it were not there."""
    from safetensors.torch import load_file, save_file

    _bert("BertForMaskedLM").save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    state |= {f"bert.pooler.dense.{name}": torch.randn(shape)
              for name, shape in (("weight", (32, 32)), ("bias", (32,)))}  # fmt: skip
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    edit(folder / "config.json", architectures=None)
    return Made(folder)


def _broken_config(folder: Path) -> Made:
    _bert().save_pretrained(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("gone")
    return Made(folder)


def _without_class(**changes: object) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        _bert().save_pretrained(folder)
        edit(folder / "config.json", architectures=None, **changes)
        return Made(folder)

    return make


def _index(change: Callable[[Path, dict[str, str]], object]) -> Callable[[Path], Made]:
    """Return a maker of shards, whose index ``change`` changes."""

    def make(folder: Path) -> Made:
        llama().save_pretrained(folder, max_shard_size="20KB")
        index = json.loads((folder / INDEX).read_text())
        change(folder, index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))
        return Made(folder)

    return make


def _elsewhere(weight_map: dict[str, str], name: str) -> str:
    return next(one for one in weight_map.values() if one != weight_map[name])


def _list_elsewhere(_: Path, weight_map: dict[str, str]) -> None:
    weight_map["model.norm.weight"] = _elsewhere(weight_map, "model.norm.weight")


def _twice(more: float) -> Callable[[Path, dict[str, str]], None]:
    def change(folder: Path, weight_map: dict[str, str]) -> None:
        from safetensors.torch import load_file, save_file

        name = "model.norm.weight"
        norm = load_file(folder / weight_map[name])[name]
        other = folder / _elsewhere(weight_map, name)
        save_file(load_file(other) | {name: norm + more}, other, {"format": "pt"})

    return change


def _lose_shard(folder: Path, weight_map: dict[str, str]) -> None:
    (folder / weight_map["model.norm.weight"]).unlink()


def _drop_tensor(folder: Path, weight_map: dict[str, str]) -> None:
    from safetensors.torch import load_file, save_file

    file = folder / weight_map["model.norm.weight"]
    left = {name: one for name, one in load_file(file).items() if name != "model.norm.weight"}
    save_file(left, file, {"format": "pt"})


def _break_link(folder: Path, weight_map: dict[str, str]) -> None:
    file = folder / weight_map["model.norm.weight"]
    file.unlink()
    file.symlink_to("../../blobs/0123")


def _named_weights(name: str, shard: str = "1GB") -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        llama().save_pretrained(folder, max_shard_size=shard)
        (folder / name).parent.mkdir(exist_ok=True)
        usual = "model.safetensors" if shard == "1GB" else INDEX
        (folder / usual).rename(folder / name)
        if shard == "1GB":
            llama().save_pretrained(folder)  # other values under the usual name
        edit(folder / "config.json", transformers_weights=name)
        return Made(folder)

    return make


def _named_weights_missing(folder: Path) -> Made:
    llama().save_pretrained(folder)
    edit(folder / "config.json", transformers_weights="other.safetensors")
    return Made(folder)


def _sentence_transformers(path: str, give: str = "") -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        from safetensors.torch import save_file

        _bert().save_pretrained(folder / path)
        kinds = {path: "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
        modules = [
            {"path": one, "type": f"sentence_transformers.models.{kind}"}
            for one, kind in kinds.items()
        ]
        (folder / "modules.json").write_text(json.dumps(modules))
        dense = {"linear.weight": torch.randn(8, 32), "linear.bias": torch.randn(8)}
        for name in ("1_Pooling", "2_Dense"):
            (folder / name).mkdir()
            (folder / name / "config.json").write_text('{"in_features": 32, "out_features": 8}')
        save_file(dense, folder / "2_Dense" / "model.safetensors", {"format": "pt"})
        return Made(folder / give, dense if give else None)

    return make


def _several_parts(folder: Path) -> Made:
    """Write the transformer into a folder of its own, as sentence-transformers did before version 2."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer import modules

    _bert().save_pretrained(folder / "0_Transformer")
    words = {
        word: at for at, word in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a"))
    }
    transformers().BertTokenizer(words).save_pretrained(folder / "0_Transformer")
    listed = []
    for at, kind in enumerate(("Transformer", "Pooling", "Dense", "Normalize")):
        place = f"{at}_{kind}"
        sizes = {"Pooling": (32,), "Dense": (32, 8)}.get(kind, ())
        if at:
            (folder / place).mkdir()
            getattr(modules, kind)(*sizes).save(str(folder / place))
        module = f"sentence_transformers.models.{kind}"
        listed.append({"idx": at, "name": str(at), "path": place, "type": module})
    (folder / "modules.json").write_text(json.dumps(listed))
    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    return Made(folder, model.state_dict(), is_folder=True)


def _cached(folder: Path, *references: str) -> tuple[Path, Any]:
    """Write a model without buffers as the Hub's client writes it; return its folder and the model."""
    package = transformers()
    config = package.T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4)
    model = package.T5ForConditionalGeneration(config)
    entry = folder / "models--owner--name"
    snapshot = entry / "snapshots" / ("a" * 40)
    model.save_pretrained(snapshot)
    (entry / "blobs").mkdir()
    (snapshot / "model.safetensors").rename(entry / "blobs" / "0123")
    (snapshot / "model.safetensors").symlink_to("../../blobs/0123")
    (entry / "refs").mkdir()
    for name in references:
        (entry / "refs" / name).write_text("a" * 40)
    return entry, model


def _of_cache(*references: str) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        entry, model = _cached(folder, *references)
        return Made(entry, model.state_dict(), is_folder=True)

    return make


def _without_blob(folder: Path) -> Made:
    entry, _ = _cached(folder, "main")
    (entry / "blobs" / "0123").unlink()
    return Made(entry)


def _code_of_a_known_class(folder: Path) -> Made:
    _bert().save_pretrained(folder)
    (folder / "modeling_mine.py").write_text("raise SystemExit('this code must not run')\n")
    edit(folder / "config.json", auto_map={"AutoModel": "modeling_mine.BertModel"})
    return Made(folder)


_FP16: Final = {"variant": "fp16"}
_NOTED: Final = ("inspect", "streaming", "predict", "recommend", "convert")


def _noted(words: str) -> dict[str, str]:
    return dict.fromkeys(_NOTED, words)


LAYOUTS: Final = [
    Layout("only the variant fp16", GROUP, _variant(), options=_FP16),
    Layout("the variant fp16 in shards", GROUP, _variant("20KB"), options=_FP16),
    Layout("the variant fp16 beside other weights", GROUP, _variant(beside=True), options=_FP16),
    Layout("only a variant, which nobody asks for", GROUP, _variant(), refused("name the variant: --set variant=fp16")),
    Layout(
        "another variant than the folder has", GROUP, _variant(beside=True),
        refused("no weights of the variant 'bf16'"), {"variant": "bf16"},
    ),
    Layout("a base model's class", GROUP, _saved_as("BertForPreTraining"), options={"model_class": "BertModel"}),
    Layout("an auto class", GROUP, _saved_as("BertForPreTraining"), options={"model_class": "transformers.AutoModelForMaskedLM"}),
    Layout("an auto class of another task", GROUP, _saved_as("BertForMaskedLM"), options={"model_class": "transformers.AutoModelForCausalLM"}),
    Layout("AutoModel of a model with heads", GROUP, _saved_as("BertForPreTraining"), options={"model_class": "AutoModel"}),
    Layout("the text part of a model of texts and images", GROUP, _composite, options={"model_class": "AutoModelForCausalLM"}),
    Layout(
        "an auto class that the model type has not", GROUP, _saved_as("BertModel"),
        refused("no AutoModelForCTC for the model type bert", all_but("inspect")), {"model_class": "AutoModelForCTC"},
    ),
    Layout(
        "a class whose weights are not in the file", GROUP, _saved_as("BertModel"),
        refused("classifier", all_but("inspect")), {"model_class": "BertForSequenceClassification"},
    ),
    Layout(
        "no architectures", GROUP, _without_class(),
        notes=_noted("BertModel, which AutoModel chooses") | dict.fromkeys(("inspect", "convert"), "so weighin takes that of AutoModel"),
    ),
    Layout(
        "no architectures, and the weights of a head", GROUP, _head_beside_a_pooler,
        notes=_noted("BertModel, which AutoModel chooses") | dict.fromkeys(("inspect", "convert"), "so weighin takes that of AutoModel"),
    ),
    Layout(
        "no architectures, and a model type that is not known", GROUP, _without_class(model_type="mine"),
        refused("name the class: --set model_class", all_but("inspect")),
    ),
    Layout(
        "an index that names a tensor of no shard", GROUP,
        _index(lambda _, weight_map: weight_map.update({"mtp.fc.weight": next(iter(weight_map.values()))})),
    ),
    Layout("an index that lacks a tensor of a shard", GROUP, _index(lambda _, weight_map: weight_map.pop("model.norm.weight"))),
    Layout("an index that names another shard of a tensor", GROUP, _index(_list_elsewhere)),
    Layout("a tensor in two shards, with equal values", GROUP, _index(_twice(0))),
    Layout("a tensor in two shards, with different values", GROUP, _index(_twice(1)), refused("is also in shard .*, with other values")),
    Layout("a missing shard", GROUP, _index(_lose_shard), refused("is missing")),
    Layout("a shard that is a broken link", GROUP, _index(_break_link), refused("a broken symbolic link")),
    Layout("a config.json that is a broken link", GROUP, _broken_config, refused("a broken symbolic link")),
    Layout("a tensor of the model in no shard", GROUP, _index(_drop_tensor), refused("model.norm.weight", all_but("inspect"))),
    Layout("weights that config.json names", GROUP, _named_weights("mine.safetensors")),
    Layout("weights in a folder that config.json names", GROUP, _named_weights("in/mine.safetensors")),
    Layout("an index that config.json names", GROUP, _named_weights("mine.safetensors.index.json", "20KB")),
    Layout(
        "weights that config.json names, and that are missing", GROUP, _named_weights_missing,
        refused("'transformers_weights' in config.json names are missing"),
    ),
    Layout(
        "sentence-transformers", GROUP, _sentence_transformers(""), options={"model_class": "BertModel"},
        notes=_noted("the transformer of a sentence-transformers folder"),
    ),
    Layout(
        "sentence-transformers with its transformer in a folder", GROUP, _several_parts,
        refused("of several parts: .*give the folder of one part", all_but("load")), packages=("sentence_transformers",),
    ),
    Layout(
        "the Dense part of sentence-transformers", GROUP, _sentence_transformers("", "2_Dense"),
        {"transformers": "transformers loads Hugging Face folders only"},
    ),
    Layout("a model's folder in the Hub's cache", GROUP, _of_cache("main")),
    Layout("a tag of a model in the Hub's cache", GROUP, _of_cache("v1.0"), options={"revision": "v1.0"}),
    Layout("a model in the Hub's cache of which only a tag is there", GROUP, _of_cache("v1.0"), refused("--set revision=v1.0")),
    Layout(
        "a model in the Hub's cache whose file was removed", GROUP, _without_blob,
        refused(
            r"a broken symbolic link to \.\./\.\./blobs/0123, which does not exist: a file of owner/name was"
            r" removed from the cache of the Hub.*hf download owner/name", VERBS,
        ),
    ),
    Layout("code in the folder for a class that transformers has", GROUP, _code_of_a_known_class),
]  # fmt: skip
