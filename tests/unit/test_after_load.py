"""``from_pretrained`` changes some weights after reading them: both values are named, and neither is wrong."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from weighin import load_pretrained, load_streaming
from weighin.checkpoint import cache
from weighin.checkpoint.checksum import checksum
from weighin.models.pretrained import from_config, pretrained_class, written_after_load
from weighin.stream.pretrained_folder import read_folder
from weighin.suite import registry
from weighin.worker.loading import WrongWeights, check_values

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
TEXT = SMALL | {"vocab_size": 128}
Make = Callable[[str], Path]

KINDS: Mapping[str, tuple[str, dict[str, Any], str]] = {
    "chinese_clip": ("ChineseCLIPModel", {
        "text_config": TEXT | {"max_position_embeddings": 64},
        "vision_config": SMALL | {"image_size": 32, "patch_size": 8}, "projection_dim": 16,
    }, "text_model.embeddings.word_embeddings.weight"),
    "funnel": ("FunnelModel", {
        "vocab_size": 128, "d_model": 32, "n_head": 4, "d_head": 8, "d_inner": 64,
        "block_sizes": [1, 1], "num_decoder_layers": 1, "pad_token_id": 2,
    }, "embeddings.word_embeddings.weight"),
    "youtu": ("YoutuForCausalLM", TEXT | {
        "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "pad_token_id": 3, "tie_word_embeddings": False,
    }, "model.embed_tokens.weight"),
    "llama": ("LlamaForCausalLM", TEXT | {"num_key_value_heads": 2, "pad_token_id": 3}, ""),
}  # fmt: skip
"""The class, its settings, and the tensor whose padding row ``from_pretrained`` sets to zero."""
CHANGED = sorted(name for name, (_, _, tensor) in KINDS.items() if tensor)


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Return a function that saves a small model whose weights are all random, also padding rows."""
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))

    def saved(name: str) -> Path:
        architecture, settings, _ = KINDS[name]
        kind = pretrained_class(architecture)
        torch.manual_seed(0)
        model = kind(kind.config_class(**settings))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_()
        model.save_pretrained(tmp_path / name)
        return tmp_path / name

    return saved


@pytest.mark.parametrize("name", sorted(KINDS))
def test_load_pretrained_changes_the_same_tensors_and_these_are_found_without_changing_them(
    make: Make, name: str
) -> None:
    folder = make(name)
    before = torch.get_rng_state()
    model = load_pretrained(folder, dtype="bfloat16")
    assert torch.equal(torch.get_rng_state(), before)
    assert written_after_load(model) == ({KINDS[name][2]} - {""})
    wanted = pretrained_class(KINDS[name][0]).from_pretrained(folder, dtype=torch.bfloat16)
    ours, theirs = ({**one.state_dict(), **dict(one.named_buffers())} for one in (model, wanted))
    assert ours.keys() == theirs.keys()
    for key, tensor in theirs.items():
        assert torch.equal(ours[key], tensor), key


@pytest.mark.parametrize("name", CHANGED)
def test_the_values_of_the_file_and_of_from_pretrained_are_both_right(
    make: Make, name: str
) -> None:
    folder, tensor = make(name), KINDS[name][2]
    spec = registry.model(str(folder))
    prepared = cache.ensure(spec, "safetensors", checkpoint=read_folder(folder).checkpoint)
    manifest = prepared.manifest()
    assert [one.name for one in manifest.tensors if one.file_checksums] == [tensor]
    of_file = load_streaming(lambda: from_config(**spec.kwargs), folder)
    theirs = pretrained_class(KINDS[name][0]).from_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    assert any(torch.equal(of_file.state_dict()[tensor], one) for one in stored.values())
    assert not torch.equal(of_file.state_dict()[tensor], theirs.state_dict()[tensor])
    for model in (of_file, theirs):
        check_values(sums(model, manifest), manifest, torch.float32)
    with torch.no_grad():
        of_file.state_dict()[tensor][5] += 1
    with pytest.raises(WrongWeights, match=f"1 tensor with other values .* checkpoint: {tensor}"):
        check_values(sums(of_file, manifest), manifest, torch.float32)


def sums(model: torch.nn.Module, manifest: Any) -> dict[str, str]:
    tensors = {**model.state_dict(), **dict(model.named_buffers())}
    return {one.name: checksum(tensors[one.name]) for one in manifest.tensors}


def test_a_checkpoint_that_weighin_writes_has_the_values_of_from_pretrained(make: Make) -> None:
    folder = make("youtu")
    spec = registry.model(str(folder))
    prepared = cache.ensure(spec, "pt", checkpoint=read_folder(folder).checkpoint)
    assert "file_checksums" in json.loads(prepared.manifest_path.read_text())["tensors"][0]
    assert not any(one.file_checksums for one in prepared.manifest().tensors)
    wanted = load_pretrained(folder).state_dict()
    state = torch.load(prepared.path, weights_only=True)
    assert all(torch.equal(state[name], tensor) for name, tensor in wanted.items())
