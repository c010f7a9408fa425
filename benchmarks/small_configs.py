"""Make a small configuration of any type of transformers, by shrinking the type's default configuration.

Rules by the names of fields divide widths and reduce the numbers of layers, experts, tokens and positions,
also in nested configurations. No rule fits every type, so that there are several ways to shrink, and the first
one with which a class can be built counts.
"""

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any, Final

_TOKENS: Final = 128
_POSITIONS: Final = 128
_EXPERTS: Final = 4
_NARROW: Final = 32  # smaller numbers stay


@dataclass(frozen=True, slots=True)
class Way:
    """One way to shrink: the divisor of widths, the most layers of a stack, and the most positions.

    None leaves the default's numbers. With ``keeps_layer_lists``, a list with an element for each layer is cut
    to the new number of layers; otherwise it is left out, and the configuration computes it again.
    """

    divisor: int
    layers: int | None
    positions: int | None = _POSITIONS
    keeps_layer_lists: bool = True


WAYS: Final = (
    Way(16, 2), Way(16, 2, keeps_layer_lists=False), Way(8, 2), Way(16, 4),
    Way(16, 4, None, keeps_layer_lists=False), Way(32, 3), Way(4, 2), Way(16, None), Way(8, None, None),
    Way(4, None, None), Way(2, 2, None), Way(1, 2), Way(1, 2, None, keeps_layer_lists=False), Way(1, None, None),
)  # fmt: skip

_SKIPPED: Final = {"id2label", "label2id", "task_specific_params", "architectures"}
_NEEDED: Final[dict[str, Any]] = {"prediction_length": 8, "vocabulary_map": {"<image>": 4}}
"""Fields that have no default, but that models need."""
_PER_LAYER: Final = ("layer_types", "layers_block_type")
_HEADS: Final = (
    ("hidden_size", "num_attention_heads", "num_key_value_heads"),
    ("hidden_size", "num_heads", "num_key_value_heads"),
    ("embed_dim", "num_heads", ""),
    ("embed_dim", "num_attention_heads", ""),
    ("d_model", "num_attention_heads", ""),
    ("d_model", "encoder_attention_heads", ""),
    ("d_model", "decoder_attention_heads", ""),
)
_VOCABULARY: Final = re.compile(r"vocab_size|vocab$|codebook_size$|num_embeddings|num_embeds$")
_TOKEN: Final = re.compile(
    r"token_ids?$|token_index|_token$|^(boi|eoi|boa|eoa)_|vocab_offset|_tokens$"
)
_LAYERS: Final = re.compile(
    r"layers?$|depths?$|num_blocks|blocks_per_stage|stage_numb_of_layers|num_block_repeats|num_encoder_blocks_|^repeats$"
)
_LAYER_NUMBERS: Final = re.compile(
    r"indices$|indexes$|idxs$|_idx$|layer_ids|hook_ids|layers$|global_attention_blocks|feature_layers?$"
)
_EXPERT: Final = re.compile(r"num(_\w+)?_experts$|n_routed_experts$")
_CHOSEN: Final = re.compile(
    r"experts_per_tok|topk$|top_k$|^moe_k$|topk_group$|n_group$|expert_groups?$"
)
_POSITION: Final = re.compile(
    r"position_embeddings$|n_positions$|(source|target|audio|text)_positions$|context_length$|max_seq_len|max_length$"
    r"|seq_length$|posemb"
)
_WIDTH: Final = re.compile(
    r"hidden_(size|dim)|embed_dim|_channels$|intermediate_(size|dim)|ffn_dim"
)
_NO_WIDTH: Final = re.compile(
    r"_ids?$|index|image|patch|window|kernel|stride|rate|theta|temperature|position|length|frame|bins|bucket"
    r"|^num_(?!filters|pos_feats|mel)|^n_(?!embd|inner)|max_|min_|layer|depth|heads|group|ratio|resolution|time|chunk|seq"
    r"|label|offset|epoch|hop|context|points|quer|factor|level|scale|mel|fft|token|pool|sparse|steps?$"
    r"|sampl|duration|codes|coefficient|input_size|feature_size|spec_size|rel_|_pos|pretrain|crop|expan|mult"
    r"|num_labels|classes|grid|MODEL|threshold|interval|capacity|distance|iters|train|tile"
)


def small(default: Any, way: Way) -> dict[str, Any]:
    """Return a configuration's content, shrunk; ``default`` is the configuration of transformers."""
    return _shrunk(default.to_dict(), way)


def _shrunk(content: Mapping[str, Any], way: Way) -> dict[str, Any]:
    stages = [value for key, value in content.items() if _LAYERS.search(key) and _is_list(value)]
    layers = max(
        (value for key, value in content.items() if _LAYERS.search(key) and type(value) is int),
        default=0,
    )
    shrunk = {}
    for key, value in content.items():
        if key in _SKIPPED:
            continue
        if value is None and key in _NEEDED:
            shrunk[key] = _NEEDED[key]
        elif isinstance(value, Mapping):
            shrunk[key] = _shrunk(value, way) if "model_type" in value else dict(value)
        elif _is_list(value) and way.layers is not None:
            if key in ("stage_names", "out_features"):
                continue
            if not stages and (
                key in _PER_LAYER or (len(value) == layers and not _LAYERS.search(key))
            ):
                if way.keeps_layer_lists:
                    shrunk[key] = [_number(key, one, way) for one in value[: way.layers]]
            elif (
                not stages
                and _LAYER_NUMBERS.search(key)
                and layers
                and all(type(one) is int for one in value)
            ):
                last = min(way.layers, layers) - 1
                shrunk[key] = sorted({min(one, last) for one in value})
            else:
                shrunk[key] = [_number(key, one, way) for one in value]
        elif type(value) is int and any(len(stage) == value for stage in stages):
            shrunk[key] = value
        else:
            shrunk[key] = _number(key, value, way)
    return shrunk | dict(_fitting_heads(shrunk))


def _is_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value)


def _fitting_heads(shrunk: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the numbers of attention heads that divide the new widths, where the old ones do not."""
    for width, heads, groups in _HEADS:
        size, count, shared = (shrunk.get(key) for key in (width, heads, groups))
        if type(size) is int and type(count) is int and size % count:
            yield heads, gcd(size, count)
            if type(shared) is int:
                yield groups, gcd(size, count, shared)


def _number(key: str, value: Any, way: Way) -> Any:
    if isinstance(value, (list, tuple)):
        return [_number(key, one, way) for one in value]
    if type(value) is not int or value <= 1:
        return value
    if _TOKEN.search(key):
        return value if value < _TOKENS else 3 + value % (_TOKENS - 4)
    if (most := _most(key, way)) is not None:
        return min(value, most)
    is_width = value >= _NARROW and (_WIDTH.search(key) or not _NO_WIDTH.search(key))
    return value // way.divisor if is_width and value % way.divisor == 0 else value


def _most(key: str, way: Way) -> int | None:
    """Return the largest number for a field that counts something; None for other fields."""
    limits = (
        (_VOCABULARY, _TOKENS),
        (_EXPERT, _EXPERTS),
        (_CHOSEN, 1 if "group" in key else 2),
        (_LAYERS, way.layers or sys.maxsize),
        (_POSITION, way.positions or sys.maxsize),
    )
    return next((most for pattern, most in limits if pattern.search(key)), None)
