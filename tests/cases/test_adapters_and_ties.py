"""Loads of strangers' folders that were silently other models: ties, adapters and parts of tensors.

Each case makes its folder, and compares weighin's model with that of transformers and peft.
"""

import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import save_file

from weighin import load_pretrained
from weighin.checkpoint.convert import Conversion
from weighin.checkpoint.inspect import inspect
from weighin.errors import CheckpointError
from weighin.models.pretrained import pretrained_class
from weighin.stream.pretrained_library import FolderChoice
from weighin.stream.tensors import tied_names

SIZES: Final = {
    "LlamaForCausalLM": {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    },
    "T5ForConditionalGeneration": {
        "vocab_size": 160, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
    },
    "BartForConditionalGeneration": {
        "vocab_size": 96, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "max_position_embeddings": 94, "pad_token_id": 1,
    },
    "BertForMaskedLM": {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64,
    },
    "GPT2LMHeadModel": {
        "vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4,
    },
}  # fmt: skip
NARROW: Final = {"target_modules": ["q_proj"]}


def built(kind: str, **changes: Any) -> Any:
    chosen = pretrained_class(kind)
    torch.manual_seed(0)
    return chosen(chosen.config_class(**SIZES[kind] | changes)).bfloat16()


TIED: Final[dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, int]]]]] = {
    "a control": ("LlamaForCausalLM", {"tie_word_embeddings": True, "vocab_size": 160}, {}),
    "vocabulary as large as the hidden layer": (
        "LlamaForCausalLM", {"tie_word_embeddings": True}, {},
    ),
    "a third matrix": (
        "LlamaForCausalLM", {"tie_word_embeddings": True, "vocab_size": 160},
        {"medusa_head.0.1.weight": (160, 64)},
    ),
    "T5 with another head": ("T5ForConditionalGeneration", {}, {"lm_head.weight": (160, 32)}),
    "BART with another head": ("BartForConditionalGeneration", {}, {"lm_head.weight": (96, 32)}),
    "BART": ("BartForConditionalGeneration", {}, {}),
    "BERT": ("BertForMaskedLM", {}, {}),
    "BERT with another head": (
        "BertForMaskedLM", {}, {"cls.predictions.decoder.weight": (64, 32)},
    ),
    "GPT-2 with as many positions as tokens": ("GPT2LMHeadModel", {}, {}),
}  # fmt: skip


@pytest.mark.parametrize("case", TIED)
def test_the_same_weights_are_tied_as_by_transformers(tmp_path: Path, case: str) -> None:
    kind, changes, more = TIED[case]
    model = built(kind, **changes)
    model.save_pretrained(tmp_path)
    state = {name: one.clone().contiguous() for name, one in model.state_dict().items()}
    others = {name: torch.randn(shape).bfloat16() for name, shape in more.items()}
    save_file(state | others, tmp_path / "model.safetensors", {"format": "pt"})
    wanted, found = type(model).from_pretrained(tmp_path, dtype="auto"), load_pretrained(tmp_path)
    assert sorted(map(sorted, tied_names(found))) == sorted(map(sorted, tied_names(wanted)))
    ours = found.state_dict()
    assert all(torch.equal(one, ours[name]) for name, one in wanted.state_dict().items())
    print(f"{case}: equal, {len(tied_names(found))} tied")


ADAPTERS: Final[dict[str, Callable[[dict[str, Any]], object]]] = {
    "as saved": lambda config: None,
    "narrow targets": lambda config: config.update(NARROW),
    "another rank": lambda config: config.update(r=4),
    "no alpha": lambda config: config.pop("lora_alpha"),
    "no rank": lambda config: config.pop("r"),
    "rank 0": lambda config: config.update(r=0),
    "a rank in quotes": lambda config: config.update(r="8"),
    "one layer": lambda config: config.update(layers_to_transform=[1]),
    "layer 0": lambda config: config.update(layers_to_transform=0),
    "an excluded module": lambda config: config.update(exclude_modules=["v_proj"]),
    "a pattern": lambda config: config.update(target_modules=r".*\.1\.self_attn\.(q|v)_proj"),
    "all linear layers": lambda config: config.update(target_modules="all-linear"),
    "another alpha for one module": lambda config: config.update(alpha_pattern={"v_proj": 3}),
    "another rank for one module": lambda config: config.update(rank_pattern={"v_proj": 2}),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
@pytest.mark.parametrize("case", ADAPTERS)
def test_an_adapter_is_merged_or_refused_as_by_peft(tmp_path: Path, case: str) -> None:
    peft = pytest.importorskip("peft", reason="pip install peft")
    base, adapter = tmp_path / "base", tmp_path / "adapter"
    model = built("LlamaForCausalLM")
    model.save_pretrained(base)
    settings = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
    made = peft.get_peft_model(model, settings)
    for name, parameter in made.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn_like(parameter) * 0.1
    made.save_pretrained(adapter)
    file = adapter / "adapter_config.json"
    config = json.loads(file.read_text())
    ADAPTERS[case](config)
    file.write_text(json.dumps(config))
    choice = FolderChoice(adapter=str(adapter))
    merged = tmp_path / "merged.safetensors"
    conversion = Conversion(base, merged, model_keys=True, choice=choice)
    plain = type(model).from_pretrained(base, dtype="auto")
    try:
        with warnings.catch_warnings(action="ignore"):
            wanted = peft.PeftModel.from_pretrained(plain, adapter).merge_and_unload().state_dict()
    except Exception as error:
        with pytest.raises(
            CheckpointError, match=f"--adapter .*: peft fails: {type(error).__name__}"
        ):
            load_pretrained(base, adapter=adapter)
        with pytest.raises(CheckpointError, match="--adapter "):
            conversion.write()
        print(f"{case}: refused, because peft fails: {type(error).__name__}")
        return
    ours = load_pretrained(base, adapter=adapter).state_dict()
    assert not [name for name, one in wanted.items() if not torch.equal(one, ours[name])]
    conversion.write()
    written = load_pretrained_of(merged)
    assert not [name for name, one in wanted.items() if not torch.equal(one, written[name])]
    print(f"{case}: equal")


def load_pretrained_of(file: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(file)


def test_the_shards_of_two_ranks_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    save = [sys.executable, str(Path(__file__).with_name("sharded_save.py")), str(folder)]
    ranks = [subprocess.Popen([*save, str(rank)]) for rank in (0, 1)]
    assert [each.wait(120) for each in ranks] == [0, 0]
    files = sorted(folder.glob("*.safetensors"))
    assert len(files) == 2
    for file in files:
        with pytest.raises(CheckpointError, match="a shard of torch's distributed checkpoint"):
            Conversion(file, tmp_path / "made.pt").write()
        with pytest.raises(CheckpointError, match="a shard of torch's distributed checkpoint"):
            inspect(file)
        print(f"{file.name}: refused")
    assert not (tmp_path / "made.pt").exists()
