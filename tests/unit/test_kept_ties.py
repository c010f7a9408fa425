"""Weights are tied as from_pretrained ties them, whatever other matrices have the same shape.

Each drawn folder has sizes that coincide, such as a vocabulary as large as a hidden layer, and a
file that has all or some of the tied names, with equal values or not.
"""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from model_differences import state_differences
from nightly import nightly
from safetensors.torch import save_file

from weighin import load_pretrained
from weighin.errors import CheckpointError
from weighin.models.description import described
from weighin.models.pretrained import from_config, pretrained_class
from weighin.stream.hugging_face_folder import read_folder
from weighin.stream.pretrained_library import WHOLE
from weighin.stream.tensors import tied_names

DRAWS: Final = int(os.environ.get("WEIGHIN_DRAWS", "12"))
Size = Callable[[], int]


def _encoder(size: Size, hidden: int) -> dict[str, Any]:
    return {
        "vocab_size": size(), "hidden_size": hidden, "intermediate_size": size(),
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": size(),
        "type_vocab_size": random.Random(hidden).choice((2, hidden)),
    }  # fmt: skip


def _both(size: Size, hidden: int) -> dict[str, Any]:
    sides = {
        f"{side}_{name}": value
        for side in ("encoder", "decoder")
        for name, value in (("layers", 1), ("attention_heads", 4), ("ffn_dim", size()))
    }
    ends = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    return {
        "vocab_size": size(), "d_model": hidden, "max_position_embeddings": size(), **sides, **ends,
    }  # fmt: skip


KINDS: Final[dict[str, Callable[[Size, int], dict[str, Any]]]] = {
    "LlamaForCausalLM": lambda size, hidden: {
        "vocab_size": size(), "hidden_size": hidden, "intermediate_size": size(), "head_dim": 16,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "GPT2LMHeadModel": lambda size, hidden: {
        "vocab_size": size(), "n_positions": size(), "n_embd": hidden, "n_inner": size(), "n_layer": 2, "n_head": 4,
    },
    "OPTForCausalLM": lambda size, hidden: {
        "vocab_size": size(), "hidden_size": hidden, "ffn_dim": size(), "num_hidden_layers": 2,
        "num_attention_heads": 4, "word_embed_proj_dim": hidden, "max_position_embeddings": size(),
    },
    "BertForPreTraining": _encoder,
    "RobertaForMaskedLM": _encoder,
    "AlbertForMaskedLM": lambda size, hidden: _encoder(size, hidden) | {"embedding_size": size()},
    "ElectraForMaskedLM": lambda size, hidden: _encoder(size, hidden) | {"embedding_size": size()},
    "BartForConditionalGeneration": _both,
    "MarianMTModel": _both,
    "T5ForConditionalGeneration": lambda size, hidden: {
        "vocab_size": size(), "d_model": hidden, "d_kv": 16, "d_ff": size(), "num_layers": 2, "num_heads": 4,
    },
}  # fmt: skip
"""Classes that tie each in another way, and their settings."""


def fold(model: Any, draw: random.Random) -> dict[str, torch.Tensor]:
    """Return a state dict for a file, in which tied names have a tensor each, or are left out."""
    state = {name: one.clone().contiguous() for name, one in model.state_dict().items()}
    for names in tied_names(model):
        fate = draw.choice(("all", "all", "some", "other", "rounded"))
        if fate == "some":
            for name in draw.sample(names, draw.randrange(len(names))):
                del state[name]
        elif fate == "other":
            for name in draw.sample(names, draw.randrange(1, len(names))):
                state[name] = state[name] + 1
        elif fate == "rounded":
            name = draw.choice(names)
            state[name] = state[name].to(draw.choice((torch.bfloat16, torch.float16)))
    rows, columns = model.get_input_embeddings().weight.shape
    if draw.random() < 0.5:
        state["medusa_head.0.1.weight"] = torch.randn(rows, columns)
    return state


@pytest.mark.parametrize("number", [*range(min(DRAWS, 3)), *nightly(*range(3, DRAWS))])
@pytest.mark.parametrize("kind", KINDS)
def test_ties_are_those_of_from_pretrained(tmp_path: Path, kind: str, number: int) -> None:
    draw = random.Random(f"{kind}-{number}")
    chosen = pretrained_class(kind)
    sizes = draw.sample((64, 96, 128), draw.choice((1, 1, 2)))
    config = chosen.config_class(
        **KINDS[kind](lambda: draw.choice(sizes), 64), tie_word_embeddings=draw.random() < 0.9
    )
    torch.manual_seed(number)
    model = chosen(config)
    model.config.architectures = [kind]
    model.config.save_pretrained(tmp_path)
    state = fold(model, draw)
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float16))
    wanted, info = chosen.from_pretrained(tmp_path, dtype=dtype, output_loading_info=True)
    if info["missing_keys"]:
        with pytest.raises(CheckpointError, match="lacks weights of"):
            load_pretrained(tmp_path, dtype=dtype)
        return
    found = load_pretrained(tmp_path, dtype=dtype)
    assert sorted(tied_names(found)) == sorted(tied_names(wanted))
    folder = read_folder(tmp_path)
    told = described(folder, WHOLE)
    if told["dtype"] == str(dtype).removeprefix("torch."):
        built = from_config(told["architecture"], folder.config, ties=told.get("ties"))
        assert sorted(tied_names(built)) == sorted(tied_names(wanted))
    assert state_differences(found.state_dict(), wanted.state_dict()) == []
