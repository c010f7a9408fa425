"""Loads of strangers' folders that were silently other models: ties as transformers ties.

Adapters are in checkpoints/test_drawn_adapters.py, parts of tensors in test_two_ranks.py.
"""

from pathlib import Path
from typing import Any, Final

import pytest
import torch
from safetensors.torch import save_file

from weighin import load_pretrained
from weighin.models.pretrained import pretrained_class
from weighin.stream.tensors import tied_names

SIZES: Final = {
    "LlamaForCausalLM": {
        "vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
    },
    "T5ForConditionalGeneration": {"vocab_size": 160, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4},
    "BartForConditionalGeneration": {
        "vocab_size": 96, "d_model": 32, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "max_position_embeddings": 94, "pad_token_id": 1,
    },
    "BertForMaskedLM": {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64,
    },
    "GPT2LMHeadModel": {"vocab_size": 64, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4},
}  # fmt: skip


def built(kind: str, **changes: Any) -> Any:
    chosen = pretrained_class(kind)
    torch.manual_seed(0)
    return chosen(chosen.config_class(**SIZES[kind] | changes)).bfloat16()


TIED: Final[dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, int]]]]] = {
    "a control": ("LlamaForCausalLM", {"tie_word_embeddings": True, "vocab_size": 160}, {}),
    "vocabulary as large as the hidden layer": ("LlamaForCausalLM", {"tie_word_embeddings": True}, {}),
    "a third matrix": ("LlamaForCausalLM", {"tie_word_embeddings": True, "vocab_size": 160}, {"medusa_head.0.1.weight": (160, 64)}),
    "T5 with another head": ("T5ForConditionalGeneration", {}, {"lm_head.weight": (160, 32)}),
    "BART with another head": ("BartForConditionalGeneration", {}, {"lm_head.weight": (96, 32)}),
    "BART": ("BartForConditionalGeneration", {}, {}),
    "BERT": ("BertForMaskedLM", {}, {}),
    "BERT with another head": ("BertForMaskedLM", {}, {"cls.predictions.decoder.weight": (64, 32)}),
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
