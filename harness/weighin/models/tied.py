"""Define a small model with tied weights and non-persistent buffers, which many loaders lose.

The output head shares its weight with the token embedding. The rotary tables are non-persistent
buffers, so that no checkpoint contains them. If a strategy (a way to load) unties the weight or
leaves the tables uninitialised, the outcome of the measurement is ``wrong_weights``.
"""

import torch
from torch import nn


class Rotary(nn.Module):
    """Cosines and sines of rotary positions (Su et al., 2021) as non-persistent buffers."""

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, context_length: int, head_dim: int) -> None:
        super().__init__()
        frequencies = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
        angles = torch.outer(torch.arange(context_length).float(), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = x.shape[-2]
        first, second = x.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
        return x * self.cos[:length] + turned * self.sin[:length]


class Block(nn.Module):
    """Rotary attention and feed-forward, each with an RMS norm before it and a residual connection."""

    def __init__(self, emb_dim: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm1 = nn.RMSNorm(emb_dim)
        self.qkv = nn.Linear(emb_dim, 3 * emb_dim, bias=False)
        self.out = nn.Linear(emb_dim, emb_dim, bias=False)
        self.norm2 = nn.RMSNorm(emb_dim)
        self.up = nn.Linear(emb_dim, 4 * emb_dim, bias=False)
        self.down = nn.Linear(4 * emb_dim, emb_dim, bias=False)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, self.n_heads, -1))
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        context = nn.functional.scaled_dot_product_attention(
            rotary(query), rotary(key), value, is_causal=True
        )
        x = x + self.out(context.transpose(1, 2).flatten(2))
        hidden: torch.Tensor = self.down(nn.functional.silu(self.up(self.norm2(x))))
        return x + hidden


class TiedModel(nn.Module):
    """Maps token ids (batch x length) to logits; ``head`` and ``embedding`` share one weight."""

    def __init__(
        self,
        *,
        vocab_size: int,
        emb_dim: int,
        n_layers: int,
        n_heads: int,
        context_length: int = 256,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, emb_dim)
        self.rotary = Rotary(context_length, emb_dim // n_heads)
        self.blocks = nn.ModuleList(Block(emb_dim, n_heads) for _ in range(n_layers))
        self.norm = nn.RMSNorm(emb_dim)
        self.head = nn.Linear(emb_dim, vocab_size, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(token_ids)
        for block in self.blocks:
            x = block(x, self.rotary)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def tied(**sizes: int) -> TiedModel:
    return TiedModel(**sizes).eval()


def example_inputs(*, vocab_size: int, **_: object) -> tuple[torch.Tensor, ...]:
    return ((torch.arange(16) * 7919 % vocab_size).unsqueeze(0),)
