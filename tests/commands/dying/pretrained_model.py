"""Build a model with random weights, then read its checkpoint, as ``from_pretrained`` of many projects does."""

from __future__ import annotations

import sys

import torch  # TAKEN: import
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        layer = nn.utils.skip_init(nn.Linear, width, width)
        self.weight, self.bias = layer.weight, layer.bias
        nn.init.constant_(self.weight, 0.02)  # TAKEN: none


class Pretrained(nn.Module):
    def __init__(self, width: int = 2048, depth: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(depth))  # CALLED

    @classmethod
    def from_pretrained(cls, path: str) -> Pretrained:
        model = cls()  # CALLED
        state = torch.load(path, map_location="cpu", weights_only=True)  # TAKEN
        missing = model.load_state_dict(state, strict=False)  # TAKEN
        assert not missing.missing_keys
        return model


model = Pretrained.from_pretrained(sys.argv[1])  # CALLED
print(sum(parameter.numel() for parameter in model.parameters()))
