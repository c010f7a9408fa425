"""Compute the memory that each of weighin's strategies is expected to need, from tensor sizes alone.

Each strategy's docstring states the same expectation. The memory of ``import torch`` is not
included.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from weighin.formats.per_module import module_of
from weighin.formats.storages import Footprint
from weighin.suite.registry import StrategyInfo

Piece = Literal["tensor", "layer", "shard"]

SHARD_BYTES: Final = 5 * 1024**3  # the default of weighin convert


@dataclass(frozen=True, slots=True)
class ExpectedMemory:
    """The memory of a load on the CPU, in terms of the checkpoint's tensors and storages.

    Attributes:
        tensors: the number of copies of all tensors in anonymous memory, of which one is the model.
        storages: the number of copies of all storages in anonymous memory: a state dict that
            ``torch.load`` returned, whose storages the model may keep.
        piece: the kind of piece whose largest example is in anonymous memory in addition.
        mapped: whether the file's pages are mapped in addition.
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
"""The memory of strategies that need more for some formats than for the others."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected memory of one strategy for one checkpoint.

    Attributes:
        layouts: the formats that the strategy reads.
        anonymous_bytes: the expected peak without ``import torch``; None for a user's strategy.
        mapped_bytes: the size of mapped file pages in addition, which the kernel can reclaim.
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

    ``sizes`` maps the names of tensors to their sizes in bytes, without tied duplicates; ``layout`` is
    the checkpoint's format. ``storages`` has the sizes of the storages in the checkpoint's files.
    ``storages`` is None if strategies load converted files, whose storages have no more and no less
    than the tensors.
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
        own = storages if storages and layout in info.formats else None
        needs.append(
            Expected(
                strategy=info.name,
                layouts=info.formats,
                anonymous_bytes=None
                if need is None
                else need.tensors * total
                + need.storages * (own.storage_bytes if own else total)
                + largest[need.piece],
                mapped_bytes=None
                if need is None
                else need.mapped * (own.used_bytes if own else total),
            )
        )
    return needs
