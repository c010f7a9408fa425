"""Hugging Face folders: ``load_pretrained`` gives what ``from_pretrained`` gives, or says why not."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import planned, refused
from model_differences import differences
from nightly import nightly
from safetensors.torch import load_file, save_file

from weighin import load_pretrained
from weighin.checkpoint import cache
from weighin.checkpoint.convert import Conversion
from weighin.checkpoint.truth import index
from weighin.models.pretrained import example_inputs, from_config, pretrained_class
from weighin.predict import client
from weighin.stream.pretrained_folder import (
    BUILDER,
    cached_snapshot,
    own_dtype,
    path_of,
    read_folder,
)
from weighin.suite import registry

MOE = "Qwen3MoeForCausalLM"
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
DECODER = SMALL | {"intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 128}
VIT = SMALL | {"intermediate_size": 64, "image_size": 32, "patch_size": 8}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": 128}
CLVP = SMALL | {"hidden_size": 128, "intermediate_size": 64, "projection_dim": 128}
DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "kv_lora_rank": 16, "q_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
MARIAN = {
    "d_model": 32, "vocab_size": 128, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "pad_token_id": 0, "decoder_start_token_id": 0, "max_position_embeddings": 32,
}  # fmt: skip
FOLDERS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tied": ("LlamaForCausalLM", DECODER | {"tie_word_embeddings": True}, {}),
    "shards": ("LlamaForCausalLM", DECODER, {"max_shard_size": "20KB"}),
    "experts": (MOE, DECODER | EXPERTS, {}),
    "encoder-decoder": ("T5ForConditionalGeneration", T5, {}),
    "encoder": ("BertForMaskedLM", SMALL | {"intermediate_size": 64}, {}),
    "vision": ("ViTForImageClassification", VIT, {}),
    "positions": ("GPTJForCausalLM", GPT2 | {"rotary_dim": 4}, {}),
    "kept in float32": ("DeepseekV3ForCausalLM", DECODER | DEEPSEEK, {}),
    "computed weights": ("MarianMTModel", MARIAN, {}),
    "one of several part configurations": ("ClvpEncoder", CLVP, {}),
    "gpt2": ("GPT2LMHeadModel", GPT2 | {"bos_token_id": 1, "eos_token_id": 2}, {}),
}
Make = Callable[[str], Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Return a function that saves a folder of ``FOLDERS``, once."""
    root = tmp_path_factory.mktemp("pretrained")

    def saved(name: str) -> Path:
        if not (root / name).exists():
            architecture, settings, options = FOLDERS[name]
            kind = pretrained_class(architecture)
            torch.manual_seed(0)
            model = kind(kind.config_class(**settings))
            if name == "shards":
                model = model.to(torch.bfloat16)
            model.save_pretrained(root / name, **options)
        return root / name

    return saved


@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16, torch.float16, *nightly(torch.float32)])
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_loads_as_from_pretrained_loads_it(
    make: Make, name: str, dtype: torch.dtype | str
) -> None:
    folder = make(name)
    found = read_folder(folder)
    wanted = pretrained_class(found.wanted).from_pretrained(folder, dtype=dtype)
    model = load_pretrained(folder, dtype=dtype)
    assert type(model) is type(wanted)
    assert model.training is False
    assert differences(model, wanted) == []
    inputs = example_inputs(found.wanted, found.config) or {}
    inputs = {key: v.to(model.dtype) if v.is_floating_point() else v for key, v in inputs.items()}
    if name == "one of several part configurations" and model.dtype != torch.float32:
        return  # its own forward pass mixes dtypes
    with torch.inference_mode():
        assert torch.equal(model(**inputs)[0], wanted(**inputs)[0])


def test_a_folder_is_a_model_whose_arguments_are_its_configuration(make: Make) -> None:
    spec = registry.model(str(make("tied")))
    assert (spec.name, spec.builder, spec.title) == ("tied", BUILDER, "tied")
    assert spec.kwargs["architecture"] == "LlamaForCausalLM"
    assert own_dtype(registry.model(str(make("shards")))) == "bfloat16"
    assert own_dtype(registry.model("gpt2-tiny")) == "float32"


def test_a_file_outside_of_a_folder_is_indexed_by_the_models_own_keys(
    make: Make, tmp_path: Path
) -> None:
    spec = registry.model(str(make("tied")))
    model = from_config(**spec.kwargs)
    file, entry = tmp_path / "weights.pt", tmp_path / "entry"
    entry.mkdir()
    torch.save(model.state_dict(), file)
    made = index(spec, checkpoint=file, fmt="pt", folder=entry)
    names = {one.name for one in made.tensors if one.kind != "non_persistent_buffer"}
    assert names == set(model.state_dict())


def test_a_model_of_the_hub_is_found_in_the_cache_alone(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    assert refused(registry.model, "Some/Model") == (
        f"Some/Model is not in the Hub's cache {tmp_path}, and weighin downloads no model\nhf download Some/Model"
    )
    entry = tmp_path / "models--Some--Model"
    shutil.copytree(make("tied"), entry / "snapshots" / "0123")
    (entry / "refs").mkdir()
    (entry / "refs" / "main").write_text("0123")
    snapshot = entry / "snapshots" / "0123"
    (entry / "blobs").mkdir()
    for file in [*snapshot.iterdir()]:  # the Hub's client writes links
        (entry / "blobs" / file.name.encode().hex()).write_bytes(file.read_bytes())
        file.unlink()
        file.symlink_to(Path("../../blobs") / file.name.encode().hex())
    assert cached_snapshot("Some/Model") == path_of(Path("Some/Model")) == snapshot
    spec = registry.model("Some/Model")
    assert spec.name == "Some/Model"
    prepared = cache.ensure(spec, "safetensors", checkpoint=read_folder(snapshot).checkpoint)
    assert prepared.path == snapshot / "model.safetensors"
    assert load_pretrained("Some/Model").config.architectures == ["LlamaForCausalLM"]


def test_formats_that_weighin_writes_from_converted_keys_are_predicted(make: Make) -> None:
    folder = make("experts")
    found = read_folder(folder)
    spec = registry.model(str(folder))
    pairs = [(registry.strategy(name), dict[str, Any]()) for name in ("baseline", "dcp")]
    cells = planned((spec,), pairs, own_formats={spec.title: "safetensors"})
    for one in client.predict(cells, checkpoint=found.checkpoint):
        assert not one.cannot
        assert one.host_anon_peak_bytes


@pytest.mark.parametrize(
    ("shape", "text"),
    [
        (None, "has no values for model.norm.weight of this "),
        ((5,), "keys: 1 of another shape (model.norm.weight)"),
    ],
)
def test_a_folder_that_its_library_refuses_is_not_predicted(
    make: Make, tmp_path: Path, shape: tuple[int, ...] | None, text: str
) -> None:
    folder = shutil.copytree(make("experts"), tmp_path / "folder")
    state = load_file(folder / "model.safetensors")
    del state["model.norm.weight"]
    state |= {"model.norm.weight": torch.zeros(shape)} if shape else {}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    spec = registry.model(str(folder))
    cells = planned((spec,), [(registry.strategy("baseline"), dict[str, Any]())])
    assert text in refused(client.predict, cells, checkpoint=read_folder(folder).checkpoint)


def test_keys_of_a_model_are_not_those_of_another_file(make: Make, tmp_path: Path) -> None:
    folder = shutil.copytree(make("tied"), tmp_path / "model")
    torch.save(load_pretrained(folder).state_dict(), folder / "pytorch_model.bin")
    conversion = Conversion(folder / "pytorch_model.bin", tmp_path / "out.pt", model_keys=True)
    assert "from_pretrained" in refused(conversion.write)


# What else of the model equals from_pretrained: its name, and what it saves


def saved_keys(model: Any, folder: Path) -> set[str]:
    model.save_pretrained(folder)
    return set(load_file(folder / "model.safetensors"))


@pytest.mark.parametrize("keys", ["of the file", "of the model"])
def test_a_loaded_model_is_saved_with_the_keys_that_its_file_has(
    make: Make, tmp_path: Path, keys: str
) -> None:
    folder, kind = shutil.copytree(make("experts"), tmp_path / "experts"), pretrained_class(MOE)
    reference = kind.from_pretrained(folder)
    if keys == "of the model":
        save_file(reference.state_dict(), folder / "model.safetensors", {"format": "pt"})
        reference = kind.from_pretrained(folder)
    found = saved_keys(load_pretrained(folder), tmp_path / "found")
    assert found == saved_keys(reference, tmp_path / "wanted")


def test_a_loaded_model_has_the_names_and_no_other_attributes_than_from_pretrained_gives(
    make: Make,
) -> None:
    def names(model: Any) -> dict[str, str]:
        modules = {path: getattr(one, "name_or_path", "") for path, one in model.named_modules()}
        return modules | {"config": model.config.name_or_path}

    model = load_pretrained(make("experts"))
    reference = pretrained_class(MOE).from_pretrained(make("experts"))
    assert names(model) == names(reference)
    assert names(model)["config"] == str(make("experts"))
    assert vars(model).keys() <= vars(reference).keys()
