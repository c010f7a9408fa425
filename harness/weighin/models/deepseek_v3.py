"""Define the tensors of DeepSeek-V3 as they are in the files that DeepSeek published (2024).

The matrices of attention and feed-forward are fp8, with one float32 scale for each block of
128 x 128 values. All other tensors are bfloat16, except the bias of the router, which is float32.
No load converts the dtype of the fp8 matrices, the scales or the router's bias. The last layer is
for multi-token prediction. The model only holds tensors, and has no forward pass.
"""

from dataclasses import dataclass
from math import ceil

import torch
from torch import nn

from weighin.models.parts import named

_BLOCK: int = 128


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the model, under the names of its ``config.json``."""

    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    n_shared_experts: int
    first_k_dense_replace: int
    num_hidden_layers: int
    num_nextn_predict_layers: int
    vocab_size: int


class _ScaledLinear(nn.Module):
    """A matrix in fp8, and the scale of each block in float32."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        blocks = (ceil(outputs / _BLOCK), ceil(inputs / _BLOCK))
        matrix = torch.empty(outputs, inputs, dtype=torch.float8_e4m3fn)
        scales = torch.empty(blocks, dtype=torch.float32)
        self.weight = nn.Parameter(matrix, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scales, requires_grad=False)


class _Router(nn.Module):
    """The router's matrix, and the bias of each expert in float32."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(sizes.n_routed_experts, sizes.hidden_size))
        bias = torch.zeros(sizes.n_routed_experts, dtype=torch.float32)
        self.e_score_correction_bias = nn.Parameter(bias)


def _feed_forward(dim: int, hidden: int) -> nn.ModuleDict:
    return named(
        gate_proj=_ScaledLinear(dim, hidden),
        up_proj=_ScaledLinear(dim, hidden),
        down_proj=_ScaledLinear(hidden, dim),
    )


def _mixture(sizes: Sizes) -> nn.ModuleDict:
    dim, hidden = sizes.hidden_size, sizes.moe_intermediate_size
    return named(
        experts=nn.ModuleList(_feed_forward(dim, hidden) for _ in range(sizes.n_routed_experts)),
        gate=_Router(sizes),
        shared_experts=_feed_forward(dim, hidden * sizes.n_shared_experts),
    )


def _attention(sizes: Sizes) -> nn.ModuleDict:
    dim, heads = sizes.hidden_size, sizes.num_attention_heads
    keys = sizes.kv_lora_rank
    query_dim = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
    return named(
        q_a_proj=_ScaledLinear(dim, sizes.q_lora_rank),
        q_a_layernorm=nn.RMSNorm(sizes.q_lora_rank),
        q_b_proj=_ScaledLinear(sizes.q_lora_rank, heads * query_dim),
        kv_a_proj_with_mqa=_ScaledLinear(dim, keys + sizes.qk_rope_head_dim),
        kv_a_layernorm=nn.RMSNorm(keys),
        kv_b_proj=_ScaledLinear(keys, heads * (sizes.qk_nope_head_dim + sizes.v_head_dim)),
        o_proj=_ScaledLinear(heads * sizes.v_head_dim, dim),
    )


def _layer(sizes: Sizes, number: int) -> nn.ModuleDict:
    dim = sizes.hidden_size
    is_dense = number < sizes.first_k_dense_replace
    layer = named(
        self_attn=_attention(sizes),
        mlp=_feed_forward(dim, sizes.intermediate_size) if is_dense else _mixture(sizes),
        input_layernorm=nn.RMSNorm(dim),
        post_attention_layernorm=nn.RMSNorm(dim),
    )
    if number >= sizes.num_hidden_layers:  # for multi-token prediction
        layer["embed_tokens"] = nn.Embedding(sizes.vocab_size, dim)
        layer["enorm"] = nn.RMSNorm(dim)
        layer["hnorm"] = nn.RMSNorm(dim)
        layer["eh_proj"] = nn.Linear(2 * dim, dim, bias=False)
        layer["shared_head"] = named(
            norm=nn.RMSNorm(dim), head=nn.Linear(dim, sizes.vocab_size, bias=False)
        )
    return layer


def deepseek_v3(*, dtype: str, **sizes: int) -> nn.Module:
    """Return DeepSeek-V3 in evaluation mode; tensors that are bfloat16 in the files get torch's
    default dtype.

    ``sizes`` are the fields of ``Sizes``. The function ignores ``dtype``, which weighin itself
    reads for ``--dtype auto``.
    """
    del dtype
    known = Sizes(**sizes)
    layers = known.num_hidden_layers + known.num_nextn_predict_layers
    model = named(
        model=named(
            embed_tokens=nn.Embedding(known.vocab_size, known.hidden_size),
            layers=nn.ModuleList(_layer(known, number) for number in range(layers)),
            norm=nn.RMSNorm(known.hidden_size),
        ),
        lm_head=nn.Linear(known.hidden_size, known.vocab_size, bias=False),
    ).eval()
    model.keeps_dtypes = True  # type: ignore[assignment]  # a flag for construct(), not a module
    return model
