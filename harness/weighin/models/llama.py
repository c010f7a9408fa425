"""Define Llama 3: grouped-query attention, rotary position embeddings, SwiGLU.

The parameters have the names of Hugging Face's checkpoints, and the rotary frequencies are a
non-persistent buffer as in Hugging Face's model. The checkpoint of Llama 3 70B in bfloat16 has 723
entries and 131.4 GiB.
"""

import torch
from torch import nn


class Rotary(nn.Module):
    """Rotates queries and keys by their positions (Su et al., 2021)."""

    inv_freq: torch.Tensor

    def __init__(self, head_dim: int, theta: float) -> None:
        super().__init__()
        steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        self.register_buffer("inv_freq", 1.0 / theta**steps, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)
        angles = torch.outer(positions, self.inv_freq.float()).repeat(1, 2)
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * angles.cos().to(x.dtype) + turned * angles.sin().to(x.dtype)


class Attention(nn.Module):
    """Causal attention in which groups of queries share a key and a value."""

    def __init__(self, emb_dim: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.head_dim = emb_dim // n_heads
        self.q_proj = nn.Linear(emb_dim, emb_dim, bias=False)
        self.k_proj = nn.Linear(emb_dim, n_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(emb_dim, n_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(emb_dim, emb_dim, bias=False)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        query, key, value = (
            projection(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        context = nn.functional.scaled_dot_product_attention(
            rotary(query), rotary(key), value, is_causal=True, enable_gqa=True
        )
        out: torch.Tensor = self.o_proj(context.transpose(1, 2).flatten(-2))
        return out


class LlamaFeedForward(nn.Module):
    """The SwiGLU feed-forward layer (Shazeer, 2020)."""

    def __init__(self, emb_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(emb_dim, hidden_dim, bias=False)
        self.up_proj = nn.Linear(emb_dim, hidden_dim, bias=False)
        self.down_proj = nn.Linear(hidden_dim, emb_dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class LlamaBlock(nn.Module):
    """Attention and feed-forward, each with an RMS norm before it and a residual connection."""

    def __init__(self, emb_dim: int, hidden_dim: int, n_heads: int, n_kv_heads: int) -> None:
        super().__init__()
        self.self_attn = Attention(emb_dim, n_heads, n_kv_heads)
        self.mlp = LlamaFeedForward(emb_dim, hidden_dim)
        self.input_layernorm = nn.RMSNorm(emb_dim, eps=1e-5)
        self.post_attention_layernorm = nn.RMSNorm(emb_dim, eps=1e-5)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary)
        out: torch.Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Maps token ids to hidden states."""

    def __init__(
        self,
        *,
        vocab_size: int,
        emb_dim: int,
        hidden_dim: int,
        n_layers: int,
        n_heads: int,
        n_kv_heads: int,
        theta: float,
    ) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, emb_dim)
        self.layers = nn.ModuleList(
            LlamaBlock(emb_dim, hidden_dim, n_heads, n_kv_heads) for _ in range(n_layers)
        )
        self.norm = nn.RMSNorm(emb_dim, eps=1e-5)
        self.rotary_emb = Rotary(emb_dim // n_heads, theta)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed_tokens(token_ids)
        for layer in self.layers:
            x = layer(x, self.rotary_emb)
        out: torch.Tensor = self.norm(x)
        return out


class LlamaModel(nn.Module):
    """Maps token ids (batch x length) to logits (batch x length x vocabulary)."""

    def __init__(self, decoder: Decoder, vocab_size: int, emb_dim: int) -> None:
        super().__init__()
        self.model = decoder
        self.lm_head = nn.Linear(emb_dim, vocab_size, bias=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(self.model(token_ids))
        return logits


def llama(
    *,
    emb_dim: int,
    vocab_size: int = 128_256,
    theta: float = 500_000.0,
    dtype: str = "",
    **sizes: int,
) -> LlamaModel:
    """Return a Llama 3 model in evaluation mode; ``sizes`` are the other arguments of ``Decoder``. weighin
    itself reads ``dtype``, that of the published files.
    """
    del dtype
    decoder = Decoder(vocab_size=vocab_size, emb_dim=emb_dim, theta=theta, **sizes)
    return LlamaModel(decoder, vocab_size, emb_dim).eval()


def example_inputs(*, vocab_size: int = 128_256, **_: object) -> tuple[torch.Tensor, ...]:
    """Return the arguments of one forward pass: 1 x 16 token ids, equal in every call."""
    return ((torch.arange(16) * 7919 % vocab_size).unsqueeze(0),)
