"""Define the tensors of gpt-oss as they are in the files that OpenAI published (2025).

The matrices of the experts have the format MXFP4. A tensor ``blocks`` holds blocks of 32 values of
4 bits, two in each byte. A tensor ``scales`` holds one byte for each block. ``blocks`` and
``scales`` are uint8, and no load converts their dtype. All other tensors are bfloat16. The model
only holds tensors, and has no forward pass.
"""

import torch
from torch import nn

from weighin.models.parts import named

_BLOCK: int = 32  # the number of values that share one scale
_BLOCK_BYTES: int = 16


class _Experts(nn.Module):
    """The stacked matrices of a layer's experts, each as blocks, scales and a bias."""

    def __init__(self, n_experts: int, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self._add("gate_up_proj", n_experts, 2 * hidden_dim, dim)
        self._add("down_proj", n_experts, dim, hidden_dim)

    def _add(self, name: str, n_experts: int, outputs: int, inputs: int) -> None:
        shape = (n_experts, outputs, inputs // _BLOCK)
        for kind, sizes in (("blocks", (*shape, _BLOCK_BYTES)), ("scales", shape)):
            stored = torch.empty(sizes, dtype=torch.uint8)
            self.register_parameter(f"{name}_{kind}", nn.Parameter(stored, requires_grad=False))
        self.register_parameter(f"{name}_bias", nn.Parameter(torch.zeros(n_experts, outputs)))


class _Attention(nn.ModuleDict):
    """The projections, and an attention sink for each head: a logit that belongs to no token."""

    def __init__(self, dim: int, head_dim: int, n_heads: int, n_kv_heads: int) -> None:
        queries, keys = n_heads * head_dim, n_kv_heads * head_dim
        super().__init__(
            {
                "q_proj": nn.Linear(dim, queries),
                "k_proj": nn.Linear(dim, keys),
                "v_proj": nn.Linear(dim, keys),
                "o_proj": nn.Linear(queries, dim),
            }
        )
        self.sinks = nn.Parameter(torch.zeros(n_heads))


def gpt_oss(
    *, dtype: str, dim: int, hidden_dim: int, head_dim: int, n_heads: int, n_kv_heads: int,
    n_layers: int, n_experts: int, vocab_size: int,
) -> nn.Module:  # fmt: skip
    """Return the model in evaluation mode; all but the uint8 tensors have torch's default dtype.

    The function ignores ``dtype``, which weighin itself reads for ``--dtype auto``.
    """
    del dtype
    layers = (
        named(
            self_attn=_Attention(dim, head_dim, n_heads, n_kv_heads),
            mlp=named(
                router=nn.Linear(dim, n_experts), experts=_Experts(n_experts, dim, hidden_dim)
            ),
            input_layernorm=nn.RMSNorm(dim),
            post_attention_layernorm=nn.RMSNorm(dim),
        )
        for _ in range(n_layers)
    )
    return named(
        model=named(
            embed_tokens=nn.Embedding(vocab_size, dim),
            layers=nn.ModuleList(layers),
            norm=nn.RMSNorm(dim),
        ),
        lm_head=nn.Linear(dim, vocab_size, bias=False),
    ).eval()
