"""List modules of torch, each with a builder and the inputs of a forward pass."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.nn.utils import parametrizations

Build = Callable[[int], nn.Module]
Inputs = Callable[[int], tuple[torch.Tensor, ...]]


def _channels_last(size: int) -> nn.Module:
    conv: Any = nn.Conv2d(2, size, (3, 2))  # torch's types do not know memory_format here
    return cast(nn.Module, conv.to(memory_format=torch.channels_last))


def _encoder(size: int) -> nn.Module:
    layer = nn.TransformerEncoderLayer(4, 2, size, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def _tied_autoencoder(size: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(size, size, bias=False), nn.Linear(size, size))
    model[1].weight = model[0].weight
    return model


def _rows(width: int | None = None) -> Inputs:
    return lambda size: (torch.linspace(-1, 1, 2 * (width or size)).reshape(2, -1),)


def _steps(size: int) -> tuple[torch.Tensor, ...]:
    return (torch.linspace(-1, 1, 3 * 2 * size).reshape(3, 2, size),)


def _words(size: int) -> tuple[torch.Tensor, ...]:
    return (torch.tensor([[0, 1], [1, 0]]),)


def _image(size: int) -> tuple[torch.Tensor, ...]:
    return (torch.linspace(-1, 1, 2 * 16).reshape(1, 2, 4, 4),)


def _tokens(size: int) -> tuple[torch.Tensor, ...]:
    return (torch.linspace(-1, 1, 24).reshape(2, 3, 4),)


STANDARD: dict[str, tuple[Build, Inputs | None]] = {
    "Linear": (lambda n: nn.Linear(n, 2), _rows()),
    "Bilinear": (lambda n: nn.Bilinear(n, n, 1), lambda n: _rows()(n) * 2),
    "Conv2d": (lambda n: nn.Conv2d(2, n, 3), _image),
    "Conv2d channels last": (_channels_last, _image),
    "BatchNorm1d": (nn.BatchNorm1d, _rows()),
    "LayerNorm": (nn.LayerNorm, _rows()),
    "Embedding": (lambda n: nn.Embedding(n + 1, 2, padding_idx=0), _words),
    "LSTM": (lambda n: nn.LSTM(n, 4, 2, bidirectional=True, proj_size=2), _steps),
    "GRU": (lambda n: nn.GRU(n, 2), _steps),
    "RNNCell": (lambda n: nn.RNNCell(n, 2), _rows()),
    "MultiheadAttention": (lambda n: nn.MultiheadAttention(4, 2, kdim=n, vdim=n, add_bias_kv=True), None),
    "TransformerEncoder": (_encoder, _tokens),
    "weight_norm": (lambda n: parametrizations.weight_norm(nn.Linear(n, 2)), _rows()),
    "weight_norm old": (lambda n: nn.utils.weight_norm(nn.Linear(n, 2)), _rows()),
    "orthogonal": (lambda n: parametrizations.orthogonal(nn.Linear(n, n)), _rows()),
    "spectral_norm": (lambda n: parametrizations.spectral_norm(nn.Linear(n, 2)), _rows()),
    "spectral_norm old": (lambda n: nn.utils.spectral_norm(nn.Linear(n, 2)), _rows()),
    "LazyLinear": (nn.LazyLinear, _rows(3)),
    "LazyBatchNorm1d": (lambda n: nn.LazyBatchNorm1d(), _rows()),
    "ParameterList": (lambda n: nn.ParameterList([nn.Parameter(torch.randn(n)), torch.ones(2)]), None),
    "ParameterDict": (lambda n: nn.ParameterDict({"a b": nn.Parameter(torch.randn(n, 2)), "key": torch.ones(1)}), None),
    "tied autoencoder": (_tied_autoencoder, _rows()),
    "same module twice": (lambda n: nn.ModuleList([nn.Linear(n, n)] * 2), None),
    "half precision": (lambda n: nn.Linear(n, 2).to(torch.bfloat16), _rows()),
    "double precision": (lambda n: nn.Linear(n, 2, dtype=torch.float64), _rows()),
    "evaluated": (lambda n: nn.Sequential(nn.BatchNorm1d(n), nn.Dropout()).eval(), _rows()),
}  # fmt: skip
