"""Folders in which a variant, a class, a file or a revision is to be chosen, and indexes that contradict."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from layouts import NO_FOLDER, Layout, Made, Maker, all_but, refused
from safetensors.torch import load_file
from small import PT, WEIGHTS, Tensors, config, folder_of, llama, rewrite, save, t5, transformers

GROUP: Final = "Choices in a folder of transformers"
INDEX: Final = f"{WEIGHTS}.index.json"
_NORM: Final = "model.norm.weight"


def _bert(kind: str = "BertModel") -> Any:
    package = transformers()
    config = package.BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=32,
    )  # fmt: skip
    return getattr(package, kind)(config)


def _saved_as(kind: str) -> Maker:
    return folder_of(partial(_bert, kind))


def _variant(shard: str = "1GB") -> Maker:
    return folder_of(partial(llama, torch.float16), variant="fp16", max_shard_size=shard)


def _variant_beside_others(folder: Path) -> Made:
    llama(torch.float32).save_pretrained(folder)
    return _variant()(folder)


def _composite() -> Any:
    """Return a model of texts and images, whose text part is a model, too."""
    package = transformers()
    text = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
        "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8, "linear_num_value_heads": 4,
        "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["full_attention", "full_attention"],
    }  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 4, "out_hidden_size": 32}  # fmt: skip
    config = package.Qwen3_5Config(text_config=text, vision_config=vision)
    return package.Qwen3_5ForConditionalGeneration(config)


def _add_pooler(folder: Path) -> None:
    """Add the pooler that AutoModel would draw at random if it were not there."""
    shapes = {"weight": (32, 32), "bias": (32,)}
    pooler = {f"bert.pooler.dense.{name}": torch.randn(shape) for name, shape in shapes.items()}
    rewrite(folder / WEIGHTS, lambda state: state | pooler)


def _break_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("gone")


def _index(change: Callable[[Path, dict[str, str]], object]) -> Maker:
    """Return a maker of shards, whose index ``change`` changes."""

    def changed(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(folder, index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return folder_of(llama, changed, max_shard_size="20KB")


def _elsewhere(weight_map: dict[str, str]) -> str:
    return next(one for one in weight_map.values() if one != weight_map[_NORM])


def _twice(more: float) -> Callable[[Path, dict[str, str]], None]:
    def change(folder: Path, weight_map: dict[str, str]) -> None:
        norm = load_file(folder / weight_map[_NORM])[_NORM]
        rewrite(folder / _elsewhere(weight_map), lambda state: state | {_NORM: norm + more})

    return change


def _drop_tensor(folder: Path, weight_map: dict[str, str]) -> None:
    def drop(state: Tensors) -> Tensors:
        return {name: one for name, one in state.items() if name != _NORM}

    rewrite(folder / weight_map[_NORM], drop)


def _break_link(folder: Path, weight_map: dict[str, str]) -> None:
    file = folder / weight_map[_NORM]
    file.unlink()
    file.symlink_to("../../blobs/0123")


def _named_weights(name: str, shard: str = "1GB") -> Maker:
    def change(folder: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / (WEIGHTS if shard == "1GB" else INDEX)).rename(folder / name)
        if shard == "1GB":
            llama().save_pretrained(folder)  # other values under the usual name

    return folder_of(llama, change, config(transformers_weights=name), max_shard_size=shard)


def _sentence_transformers(folder: Path) -> Made:
    _bert().save_pretrained(folder)
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Dense": "Dense"}
    modules = [
        {"path": one, "type": f"sentence_transformers.models.{kind}"} for one, kind in kinds.items()
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for name in ("1_Pooling", "2_Dense"):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text('{"in_features": 32, "out_features": 8}')
    dense = {"linear.weight": torch.randn(8, 32), "linear.bias": torch.randn(8)}
    save(dense, folder / "2_Dense" / WEIGHTS, metadata=PT)
    return Made(folder)


def _dense_part(folder: Path) -> Made:
    part = _sentence_transformers(folder).path / "2_Dense"
    return Made(part, load_file(part / WEIGHTS))


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


def _in_cache(*references: str) -> Maker:
    """Return the maker of a model without buffers, as the Hub's client writes it."""

    def make(folder: Path) -> Made:
        model, entry = t5(), folder / "models--owner--name"
        snapshot = entry / "snapshots" / ("a" * 40)
        model.save_pretrained(snapshot)
        (entry / "blobs").mkdir()
        (snapshot / WEIGHTS).rename(entry / "blobs" / "0123")
        (snapshot / WEIGHTS).symlink_to("../../blobs/0123")
        (entry / "refs").mkdir()
        for name in references:
            (entry / "refs" / name).write_text("a" * 40)
        return Made(entry, model.state_dict(), is_folder=True)

    return make


def _without_blob(folder: Path) -> Made:
    entry = _in_cache("main")(folder).path
    (entry / "blobs" / "0123").unlink()
    return Made(entry)


def _add_code(folder: Path) -> None:
    (folder / "modeling_mine.py").write_text("raise SystemExit('this code must not run')\n")
    config(auto_map={"AutoModel": "modeling_mine.BertModel"})(folder)


_FP16: Final = {"variant": "fp16"}
_NOTED: Final = ("inspect", "streaming", "predict", "recommend", "convert")


def _noted(words: str) -> dict[str, str]:
    return dict.fromkeys(_NOTED, words)


_BY_AUTO_MODEL: Final = _noted("BertModel, which AutoModel chooses") | dict.fromkeys(
    ("inspect", "convert"), "so weighin takes that of AutoModel"
)

LAYOUTS: Final = [
    Layout("only the variant fp16", GROUP, _variant(), options=_FP16),
    Layout("the variant fp16 in shards", GROUP, _variant("20KB"), options=_FP16),
    Layout("the variant fp16 beside other weights", GROUP, _variant_beside_others, options=_FP16),
    Layout("only a variant, which nobody asks for", GROUP, _variant(), refused("name the variant: --set variant=fp16")),
    Layout("another variant than the folder has", GROUP, _variant_beside_others, refused("no weights of the variant 'bf16'"), {"variant": "bf16"}),
    Layout("a base model's class", GROUP, _saved_as("BertForPreTraining"), options={"model_class": "BertModel"}),
    Layout("an auto class", GROUP, _saved_as("BertForPreTraining"), options={"model_class": "transformers.AutoModelForMaskedLM"}),
    Layout("an auto class of another task", GROUP, _saved_as("BertForMaskedLM"), options={"model_class": "transformers.AutoModelForCausalLM"}),
    Layout("AutoModel of a model with heads", GROUP, _saved_as("BertForPreTraining"), options={"model_class": "AutoModel"}),
    Layout("the text part of a model of texts and images", GROUP, folder_of(_composite), options={"model_class": "AutoModelForCausalLM"}),
    Layout(
        "an auto class that the model type has not", GROUP, _saved_as("BertModel"),
        refused("has the model type bert, for which transformers has no AutoModelForCTC", all_but("inspect")), {"model_class": "AutoModelForCTC"},
    ),
    Layout(
        "a class whose weights are not in the file", GROUP, _saved_as("BertModel"),
        refused("classifier", all_but("inspect")), {"model_class": "BertForSequenceClassification"},
    ),
    Layout("no architectures", GROUP, folder_of(_bert, config(architectures=None)), notes=_BY_AUTO_MODEL),
    Layout(
        "no architectures, and the weights of a head", GROUP,
        folder_of(partial(_bert, "BertForMaskedLM"), _add_pooler, config(architectures=None)), notes=_BY_AUTO_MODEL,
    ),
    Layout(
        "no architectures, and a model type that is not known", GROUP,
        folder_of(_bert, config(architectures=None, model_type="mine")),
        refused("name the class: --set model_class", all_but("inspect")),
    ),
    Layout(
        "an index that names a tensor of no shard", GROUP,
        _index(lambda _, weight_map: weight_map.update({"mtp.fc.weight": next(iter(weight_map.values()))})),
    ),
    Layout("an index that lacks a tensor of a shard", GROUP, _index(lambda _, weight_map: weight_map.pop(_NORM))),
    Layout("an index that names another shard of a tensor", GROUP, _index(lambda _, weight_map: weight_map.update({_NORM: _elsewhere(weight_map)}))),
    Layout("a tensor in two shards, with equal values", GROUP, _index(_twice(0))),
    Layout("a tensor in two shards, with different values", GROUP, _index(_twice(1)), refused("is also in shard .*, with other values")),
    Layout("a missing shard", GROUP, _index(lambda folder, weight_map: (folder / weight_map[_NORM]).unlink()), refused("is missing")),
    Layout("a shard that is a broken link", GROUP, _index(_break_link), refused("a broken symbolic link")),
    Layout("a config.json that is a broken link", GROUP, folder_of(_bert, _break_config), refused("a broken symbolic link")),
    Layout("a tensor of the model in no shard", GROUP, _index(_drop_tensor), refused("model.norm.weight", all_but("inspect"))),
    Layout("weights that config.json names", GROUP, _named_weights("mine.safetensors")),
    Layout("weights in a folder that config.json names", GROUP, _named_weights("in/mine.safetensors")),
    Layout("an index that config.json names", GROUP, _named_weights("mine.safetensors.index.json", "20KB")),
    Layout(
        "weights that config.json names, and that are missing", GROUP,
        folder_of(llama, config(transformers_weights="other.safetensors")),
        refused("'transformers_weights' in config.json names 'other.safetensors', which is not"),
    ),
    Layout(
        "sentence-transformers", GROUP, _sentence_transformers, options={"model_class": "BertModel"},
        notes=_noted("the transformer of a sentence-transformers folder"),
    ),
    Layout(
        "sentence-transformers with its transformer in a folder", GROUP, _several_parts,
        refused("of several parts: .*give the folder of one part", all_but("load")), packages=("sentence_transformers",),
    ),
    Layout("the Dense part of sentence-transformers", GROUP, _dense_part, NO_FOLDER),
    Layout("a model's folder in the Hub's cache", GROUP, _in_cache("main")),
    Layout("a tag of a model in the Hub's cache", GROUP, _in_cache("v1.0"), options={"revision": "v1.0"}),
    Layout("a model in the Hub's cache of which only a tag is there", GROUP, _in_cache("v1.0"), refused("--set revision=v1.0")),
    Layout(
        "a model in the Hub's cache whose file was removed", GROUP, _without_blob,
        refused(
            r"a broken symbolic link to \.\./\.\./blobs/0123, which does not exist: a file of owner/name was"
            r" removed from the cache of the Hub.*hf download owner/name",
        ),
    ),
    Layout("code in the folder for a class that transformers has", GROUP, folder_of(_bert, _add_code)),
]  # fmt: skip
