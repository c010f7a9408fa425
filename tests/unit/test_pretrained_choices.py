"""Where a folder leaves a choice, the dtype, the file and the ties are those of ``from_pretrained``."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from weighin import load_pretrained
from weighin.checkpoint.convert import Conversion
from weighin.errors import ConfigError
from weighin.formats.pretrained_folder import own_dtype, read_folder
from weighin.models.description import auto_dtype
from weighin.models.pretrained import pretrained_class
from weighin.stream import formats
from weighin.suite import registry

SETTINGS = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
    "intermediate_size": 64, "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
Save = Callable[..., Path]


@pytest.fixture
def save(tmp_path: Path) -> Save:
    """Return a function that saves a small random decoder into a new folder."""

    def saved(dtype: torch.dtype = torch.bfloat16, shard: str = "1GB", **settings: Any) -> Path:
        kind = pretrained_class("LlamaForCausalLM")
        torch.manual_seed(0)
        model = kind(kind.config_class(**SETTINGS, **settings)).to(dtype)
        model.save_pretrained(tmp_path / "model", max_shard_size=shard)
        return tmp_path / "model"

    return saved


def change(folder: Path, act: Callable[[dict[str, Any]], object]) -> None:
    """Change ``config.json``."""
    config = json.loads((folder / "config.json").read_text())
    act(config)
    (folder / "config.json").write_text(json.dumps(config))


def assert_equal(folder: Path) -> None:
    """Compare names, dtypes, values and ties with the model that ``from_pretrained`` leaves."""
    kind = pretrained_class(read_folder(folder).wanted)
    wanted, model = kind.from_pretrained(folder), load_pretrained(folder)
    theirs, ours = (one.state_dict(keep_vars=True) for one in (wanted, model))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    assert (ours[HEAD] is ours[EMBEDDING]) == (theirs[HEAD] is theirs[EMBEDDING])


@pytest.mark.parametrize("shard", ["1GB", "20KB"])
@pytest.mark.parametrize("named", [None, "absent"])
def test_a_dtype_that_no_config_names_is_that_of_the_weights(
    save: Save, shard: str, named: str | None
) -> None:
    folder = save(shard=shard)
    change(folder, lambda config: config.pop("dtype"))
    if named is None:
        change(folder, lambda config: config.update(dtype=None, torch_dtype=None))
    assert_equal(folder)
    assert own_dtype(registry.model(str(folder))) == "bfloat16"


def test_the_first_floating_dtype_of_the_file_counts(save: Save) -> None:
    folder = save(torch.float32)
    change(folder, lambda config: config.pop("dtype"))
    file = folder / "model.safetensors"
    state = load_file(file)
    state["model.norm.weight"] = state["model.norm.weight"].half()
    save_file(state, file, {"format": "pt"})
    assert_equal(folder)
    state[HEAD] = state[HEAD].half()  # the first name
    save_file(state, file, {"format": "pt"})
    assert_equal(folder)
    assert auto_dtype(read_folder(folder)) == "float16"


@pytest.mark.parametrize("dtype", [{"": "bfloat16"}, {"text_config": "bfloat16"}, "float64"])
def test_other_spellings_of_a_dtype(save: Save, dtype: object) -> None:
    folder = save(torch.float32)
    change(folder, lambda config: config.update(dtype=dtype))
    assert_equal(folder)


@pytest.mark.parametrize("dtype", ["torch.bfloat16", "auto", "float8_e4m3fn", 16])
def test_a_dtype_that_from_pretrained_refuses_is_refused_with_its_reason(
    save: Save, dtype: object
) -> None:
    folder = save()
    change(folder, lambda config: config.update(dtype=dtype))
    with pytest.raises(ConfigError) as caught:
        load_pretrained(folder)
    assert str(caught.value) == (
        f"config.json names the dtype {dtype!r}: no model can have this dtype, and from_pretrained fails, too\n"
        "write one of float32, bfloat16, float16, float64 into config.json"
    )


def test_dtypes_of_parts_have_no_effect(tmp_path: Path) -> None:
    kind = pretrained_class("LlavaForConditionalGeneration")
    text = {"model_type": "llama", **SETTINGS}
    vision = {
        "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    torch.manual_seed(0)
    config = kind.config_class(text_config=text, vision_config=vision, image_token_index=127)
    kind(config).save_pretrained(tmp_path / "model")

    def name_parts(config: dict[str, Any]) -> None:
        config["text_config"]["dtype"], config["vision_config"]["dtype"] = "bfloat16", "float16"

    change(tmp_path / "model", name_parts)
    wanted = kind.from_pretrained(tmp_path / "model")
    model = load_pretrained(tmp_path / "model")
    assert {one.dtype for one in model.parameters()} == {torch.float32}
    for (name, ours), theirs in zip(model.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_tied_head_that_differs_in_the_file_stays_apart(save: Save) -> None:
    folder = save(tie_word_embeddings=False)
    change(folder, lambda config: config.update(tie_word_embeddings=True))
    assert_equal(folder)
    state = load_pretrained(folder).state_dict()
    assert not torch.equal(state[HEAD], state[EMBEDDING])


def test_a_tied_head_that_is_stored_twice_with_equal_values_is_tied(save: Save) -> None:
    folder = save(tie_word_embeddings=True)
    file = folder / "model.safetensors"
    state = load_file(file)
    save_file(state | {HEAD: state[EMBEDDING].clone()}, file, {"format": "pt"})
    assert_equal(folder)
    assert "apart" not in registry.model(str(folder)).kwargs


def test_a_tied_head_without_its_embedding_is_tied(save: Save) -> None:
    folder = save(tie_word_embeddings=True)
    file = folder / "model.safetensors"
    state = load_file(file)
    state[HEAD] = state.pop(EMBEDDING)
    save_file(state, file, {"format": "pt"})
    assert_equal(folder)


def test_the_whole_file_counts_beside_an_index_of_shards(save: Save, tmp_path: Path) -> None:
    folder = save(shard="20KB")
    other = save_file_of(folder, tmp_path)
    shutil.copy(other, folder / "model.safetensors")
    assert_equal(folder)
    assert formats.detect(folder) == "safetensors"
    Conversion(folder, tmp_path / "made.safetensors").write()
    wanted, made = load_file(other), load_file(tmp_path / "made.safetensors")
    assert all(torch.equal(made[name], wanted[name]) for name in wanted)


def save_file_of(folder: Path, target: Path) -> Path:
    """Write a file with the tensors of a folder and other values."""
    state = {name: one + 1 for name, one in load_pretrained(folder).state_dict().items()}
    save_file(state, target / "other.safetensors", {"format": "pt"})
    return target / "other.safetensors"
