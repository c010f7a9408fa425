"""Define modules whose constructors read values of weights, or compute buffers from them."""

import copy
from typing import Any

import torch
from torch import nn


class ReadsItem(nn.Module):
    """Stores a number that the constructor reads from a weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size, 2))
        self.first = self.weight[0, 0].item()
        self.sign = "positive" if self.weight.sum() > 1 else "negative"


class ReadsList(nn.Module):
    """Stores a list of a weight's elements."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, 2)
        self.numbers = self.linear.weight.tolist()


class ForwardInConstructor(nn.Module):
    """Runs a forward pass in the constructor, and uses the output's size and values."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(size, 3), nn.ReLU(), nn.Linear(3, 2))
        with torch.no_grad():
            seen = self.inner(torch.ones(1, size))
        self.register_buffer("seen", seen, persistent=False)
        self.outer = nn.Linear(seen.shape[-1], 1)


class Factorised(nn.Module):
    """Initialises its tensors with the QR factors of a random matrix."""

    def __init__(self, size: int) -> None:
        super().__init__()
        q, r = torch.linalg.qr(torch.randn(size + 1, size))
        self.q = nn.Parameter(q)
        self.register_buffer("r", r, persistent=False)


class CopiesParameter(nn.Module):
    """A target network that the constructor copies from the online one, and no checkpoint contains."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.online = nn.Linear(size, 2)
        target = torch.empty(2, size)
        with torch.no_grad():
            target.copy_(self.online.weight)
        self.register_buffer("target", target, persistent=False)


class InPlaceOnData(nn.Module):
    """Changes weight.data in place, and computes a buffer from the result."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(size + 1, 2, padding_idx=0)
        self.embedding.weight.data.uniform_(-1, 1)
        self.embedding.weight.data[1].fill_(3)
        self.embedding.weight.data.clamp_(min=-0.5)
        self.register_buffer("norm", self.embedding.weight.data.norm(), persistent=False)


class ConstantBuffer(nn.Module):
    """Buffers and a plain tensor that torch.nn.init fills."""

    def __init__(self, size: int, *, persistent: bool = False) -> None:
        super().__init__()
        self.register_buffer("scale", nn.init.constant_(torch.empty(size), 0.5), persistent)
        self.register_buffer("ones", nn.init.ones_(torch.empty(size, 2)), persistent=False)
        self.plain = nn.init.eye_(torch.empty(size, size))


class RandomBuffer(nn.Module):
    """Random features that the constructor draws after the random values of a weight."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)
        self.register_buffer("features", torch.randn(size, 3), persistent=False)
        self.register_buffer("drawn", nn.init.normal_(torch.empty(size)), persistent=False)
        self.order = torch.randperm(size + 2)
        self.last = nn.Linear(size, 1)
        self.register_buffer("noise", torch.rand(size), persistent=False)


class ComputedBuffer(nn.Module):
    """Buffers computed from a parameter, some of them in the checkpoint and some not."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(size, 2))
        self.register_buffer("norms", self.weight.detach().norm(dim=1))
        self.register_buffer("doubled", self.weight.detach() * 2, persistent=False)
        self.register_buffer("where", torch.arange(size, device=self.weight.device), False)
        self.register_buffer("like", torch.ones_like(self.weight), persistent=False)
        self.plain = self.weight.detach().clone()


class SharedBuffers(nn.Module):
    """A buffer under two names, a buffer within another's memory, and a view of a parameter."""

    def __init__(self, size: int) -> None:
        super().__init__()
        whole = torch.arange(4.0 * size)
        self.register_buffer("whole", whole)
        self.register_buffer("again", whole)
        self.register_buffer("part", whole[1 : size + 1], persistent=False)
        self.weight = nn.Parameter(torch.randn(size, 3))
        self.register_buffer("column", self.weight.detach()[:, 1])
        self.row = self.weight.detach()[0]
        self.register_buffer("nothing", None)


class FlatViews(nn.Module):
    """Parameters that are views at offsets of one flat tensor, as in some optimizers and FSDP."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.flat = torch.randn(6 * size + 1)
        self.first = nn.Parameter(self.flat[1 : 2 * size + 1].view(2, size))
        self.second = nn.Parameter(self.flat[2 * size + 1 : 4 * size + 1])
        self.register_buffer("third", self.flat[3 * size + 1 :])


class Quantised(nn.Module):
    """A linear layer with int8 weights, and scales in buffers."""

    scale: torch.Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        values = torch.randint(-128, 128, (2, size), dtype=torch.int8)
        self.weight = nn.Parameter(values, requires_grad=False)
        self.register_buffer("packed", torch.randint(0, 256, (size,), dtype=torch.uint8))
        self.register_buffer("scale", torch.rand(2, 1, dtype=torch.float16))
        self.register_buffer("zero", torch.zeros(2, dtype=torch.int64), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ (self.weight.float() * self.scale.float()).T


class Rotary(nn.Module):
    """Position tables and a causal mask, which are computed and not saved."""

    def __init__(self, size: int) -> None:
        super().__init__()
        inverse = 1.0 / (10000 ** (torch.arange(0, 2 * size, 2).float() / (2 * size)))
        self.register_buffer("inv_freq", inverse, persistent=False)
        angles = torch.outer(torch.arange(5).float(), inverse)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), False)
        self.register_buffer("mask", torch.tril(torch.ones(4, 4)).bool(), persistent=False)
        self.bias = nn.Parameter(torch.full((size,), -1.0))


class Deepcopied(nn.Module):
    """Layers that are deep copies of one, and a copy of its weight in a plain list."""

    def __init__(self, size: int) -> None:
        super().__init__()
        layer = nn.Linear(size, size)
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(2))
        self.average = [copy.deepcopy(layer.weight)]


class Large(nn.Module):
    """Tensors larger than a huge page."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(512 + size, 1030))
        self.halves = nn.Parameter(torch.zeros(1025, 1024 + size, dtype=torch.bfloat16))
        self.register_buffer("steps", torch.zeros(270_000 + size, dtype=torch.int64))
        self.turned = nn.Parameter(torch.zeros(1100, 512 + size).t())
        self.register_buffer("table", torch.arange(600_000.0), persistent=False)


class SubclassedParameter(nn.Parameter):
    """A subclass of Parameter, by which some libraries mark their parameters."""

    _no_weight_decay: bool


class Marked(nn.Module):
    """Parameters of a subclass, with attributes, frozen, and also in a plain list."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = SubclassedParameter(torch.randn(size, 2))
        self.weight._no_weight_decay = True
        bias: Any = nn.Parameter(torch.zeros(size), requires_grad=False)
        bias.sizes = [torch.ones(2)]
        self.bias: nn.Parameter = bias
        self.kept = [self.weight, {"bias": self.bias}]
        self.register_parameter("none", None)


CONSTRUCTING = {
    kind.__name__: kind
    for kind in (
        ReadsItem, ReadsList, ForwardInConstructor, Factorised, CopiesParameter, InPlaceOnData,
        ConstantBuffer, RandomBuffer, ComputedBuffer, SharedBuffers, FlatViews, Quantised, Rotary,
        Deepcopied, Large, Marked,
    )
}  # fmt: skip
