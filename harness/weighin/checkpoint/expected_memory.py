"""Compute from the tensors' sizes how much memory each strategy (a way to load) should need.

The expected memory does not include the memory of ``import torch``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from weighin.formats.per_module import module_of
from weighin.formats.storages import Footprint
from weighin.suite.registry import StrategyInfo

Piece = Literal["tensor", "layer", "shard"]

SHARD_BYTES: Final = 5 * 1024**3  # the default size of a shard of weighin convert


@dataclass(frozen=True, slots=True)
class ExpectedMemory:
    """The memory of a load on the CPU, as a number of copies of the checkpoint's tensors and
    storages.

    Attributes:
        tensors: the number of copies of all tensors in anonymous memory; the model is one copy.
        storages: the number of copies of all storages in anonymous memory. A state dict that
            ``torch.load`` returned is one copy.
        piece: what is in anonymous memory in addition to these copies: the largest tensor, layer or
            shard; None for nothing.
        mapped: whether the file is also mapped into memory.
    """

    tensors: int
    storages: int = 0
    piece: Piece | None = None
    mapped: bool = False


_NEEDS: Final = {
    "baseline": ExpectedMemory(1, 1),
    "sequential": ExpectedMemory(1, 1),
    "meta_copy": ExpectedMemory(1, 1),
    "load_assign": ExpectedMemory(0, 1),
    "mmap_assign": ExpectedMemory(0, mapped=True),
    "per_param": ExpectedMemory(1, piece="tensor"),
    "per_param_mmap": ExpectedMemory(0, mapped=True),
    "per_module": ExpectedMemory(1, piece="layer"),
    "dcp": ExpectedMemory(1, piece="tensor"),
    "safetensors_mmap": ExpectedMemory(0, mapped=True),
    "safetensors_copy": ExpectedMemory(1, mapped=True),
    "sharded": ExpectedMemory(1, mapped=True),
    "safetensors_load_model": ExpectedMemory(1, mapped=True),
    "safetensors_pread": ExpectedMemory(1),
    "prefetch_mmap": ExpectedMemory(0, mapped=True),
    "eager": ExpectedMemory(2),
    "runai": ExpectedMemory(1),
    "fastsafetensors": ExpectedMemory(1),
    "tensorizer": ExpectedMemory(1),
    "streaming": ExpectedMemory(1),
    "transformers": ExpectedMemory(0, mapped=True),
    "diffusers": ExpectedMemory(0, mapped=True),
    "accelerate": ExpectedMemory(0, mapped=True),
}
_NEEDS_WITH_FORMAT: Final = {
    ("sharded", "sharded_pt"): ExpectedMemory(1, piece="shard"),
    ("accelerate", "pt"): ExpectedMemory(0, 1),
    ("accelerate", "sharded_pt"): ExpectedMemory(0, 1),
    ("transformers", "gguf"): ExpectedMemory(1, piece="tensor"),
}
"""The pairs of a strategy and a format that need other memory than ``_NEEDS`` says."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected memory of one strategy for one checkpoint.

    Attributes:
        layouts: the formats that the strategy reads.
        anonymous_bytes: the expected peak without ``import torch``; None for a user's strategy.
        mapped_bytes: the size of the mapped file pages, which the kernel can reclaim; None for a
            user's strategy.
    """

    strategy: str
    layouts: tuple[str, ...]
    anonymous_bytes: int | None
    mapped_bytes: int | None


def expected(
    strategies: Iterable[StrategyInfo],
    layout: str,
    sizes: dict[str, int],
    storages: Footprint | None = None,
) -> list[Expected]:
    """Return the expected memory of each strategy that loads in one process.

    ``layout`` is the checkpoint's format. ``sizes`` maps the names of tensors to their sizes in
    bytes, with one name for tied tensors. ``storages`` has the sizes of the storages in the
    checkpoint's files; None if the strategies load converted files, in which the storages and the
    tensors have equal sizes.
    """
    total = sum(sizes.values())
    layers: dict[str, int] = {}
    for name, size in sizes.items():
        layers[module_of(name)] = layers.get(module_of(name), 0) + size
    largest = {
        None: 0,
        "tensor": max(sizes.values(), default=0),
        "layer": max(layers.values(), default=0),
        "shard": min(total, max(SHARD_BYTES, max(sizes.values(), default=0))),
    }
    needs = []
    for info in strategies:
        if info.shares_load:
            continue
        need = _NEEDS_WITH_FORMAT.get((info.name, layout), _NEEDS.get(info.name))
        stored = used = total
        if storages and layout in info.formats:
            stored, used = storages.storage_bytes, storages.used_bytes
        anonymous = mapped = None
        if need is not None:
            anonymous = need.tensors * total + need.storages * stored + largest[need.piece]
            mapped = need.mapped * used
        needs.append(Expected(info.name, info.formats, anonymous, mapped))
    return needs
