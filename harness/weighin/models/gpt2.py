"""Define GPT-2 as a public notebook on memory-efficient weight loading does.

This model differs from the published GPT-2. The output head is not tied to the embedding. Query,
key and value have separate projections. Each layer has its causal mask as a persistent buffer, so
that the checkpoint contains the masks. The checkpoint of GPT-2 XL has 821 entries and 6.290 GiB.
"""

from typing import Any

import torch
from torch import nn


class LayerNorm(nn.Module):
    """Normalise the last dimension; the parameters are called ``scale`` and ``shift``."""

    def __init__(self, emb_dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(emb_dim))
        self.shift = nn.Parameter(torch.zeros(emb_dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, keepdim=True, unbiased=False)
        normed: torch.Tensor = (x - mean) / torch.sqrt(variance + 1e-5)
        return self.scale * normed + self.shift


class MultiHeadAttention(nn.Module):
    """Causal self-attention; the mask is a persistent buffer with context_length**2 floats."""

    mask: torch.Tensor

    def __init__(
        self, emb_dim: int, context_length: int, n_heads: int, drop_rate: float, qkv_bias: bool
    ) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.W_query = nn.Linear(emb_dim, emb_dim, bias=qkv_bias)
        self.W_key = nn.Linear(emb_dim, emb_dim, bias=qkv_bias)
        self.W_value = nn.Linear(emb_dim, emb_dim, bias=qkv_bias)
        self.out_proj = nn.Linear(emb_dim, emb_dim)
        self.dropout = nn.Dropout(drop_rate)
        mask = torch.triu(torch.ones(context_length, context_length), diagonal=1)
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[1]
        query, key, value = (
            projection(x).unflatten(2, (self.n_heads, -1)).transpose(1, 2)
            for projection in (self.W_query, self.W_key, self.W_value)
        )
        scores = query @ key.transpose(2, 3)
        scores = scores.masked_fill(self.mask[:length, :length].bool(), -torch.inf)
        weights = self.dropout(torch.softmax(scores / key.shape[-1] ** 0.5, dim=-1))
        out: torch.Tensor = self.out_proj((weights @ value).transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """Two linear layers with a hidden dimension of four times the embedding dimension."""

    def __init__(self, emb_dim: int) -> None:
        super().__init__()
        up, down = nn.Linear(emb_dim, 4 * emb_dim), nn.Linear(4 * emb_dim, emb_dim)
        self.layers = nn.Sequential(up, nn.GELU(approximate="tanh"), down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class TransformerBlock(nn.Module):
    """Attention and feed-forward, each with a norm before it and a residual connection."""

    def __init__(
        self, emb_dim: int, context_length: int, n_heads: int, drop_rate: float, qkv_bias: bool
    ) -> None:
        super().__init__()
        self.att = MultiHeadAttention(emb_dim, context_length, n_heads, drop_rate, qkv_bias)
        self.ff = FeedForward(emb_dim)
        self.norm1 = LayerNorm(emb_dim)
        self.norm2 = LayerNorm(emb_dim)
        self.drop_shortcut = nn.Dropout(drop_rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_shortcut(self.att(self.norm1(x)))
        out: torch.Tensor = x + self.drop_shortcut(self.ff(self.norm2(x)))
        return out


class GPTModel(nn.Module):
    """Maps token ids (batch x length) to logits (batch x length x vocabulary)."""

    def __init__(
        self,
        *,
        emb_dim: int,
        n_layers: int,
        n_heads: int,
        vocab_size: int = 50_257,
        context_length: int = 1024,
        drop_rate: float = 0.1,
        qkv_bias: bool = True,
    ) -> None:
        super().__init__()
        self.tok_emb = nn.Embedding(vocab_size, emb_dim)
        self.pos_emb = nn.Embedding(context_length, emb_dim)
        self.drop_emb = nn.Dropout(drop_rate)
        blocks = (
            TransformerBlock(emb_dim, context_length, n_heads, drop_rate, qkv_bias)
            for _ in range(n_layers)
        )
        self.trf_blocks = nn.Sequential(*blocks)
        self.final_norm = LayerNorm(emb_dim)
        self.out_head = nn.Linear(emb_dim, vocab_size, bias=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(token_ids.shape[1], device=token_ids.device)
        x = self.drop_emb(self.tok_emb(token_ids) + self.pos_emb(positions))
        logits: torch.Tensor = self.out_head(self.final_norm(self.trf_blocks(x)))
        return logits


def gpt2(**sizes: Any) -> GPTModel:
    return GPTModel(**sizes).eval()


def example_inputs(
    *, vocab_size: int = 50_257, context_length: int = 1024, **_: object
) -> tuple[torch.Tensor, ...]:
    length = min(16, context_length)
    return ((torch.arange(length) * 7919 % vocab_size).unsqueeze(0),)
