"""What each of our strategies is expected to need, by arithmetic: nothing is measured here.

The same words stand in each strategy's docstring. Beside it, every process has what a bare
``import torch`` holds.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from weighin.formats.per_module import module_of
from weighin.suite.registry import StrategyInfo

Piece = Literal["tensor", "layer", "shard"]

SHARD_BYTES: Final = 5 * 1024**3  # what convert makes unless it is told otherwise


@dataclass(frozen=True, slots=True)
class ExpectedMemory:
    """Anonymous memory on the CPU: copies of all weights and the largest piece of one kind.

    Attributes:
        mapped: whether the weights stay pages of the file beside that.
    """

    copies: int
    piece: Piece | None = None
    mapped: bool = False


_NEEDS: Final = {
    "baseline": ExpectedMemory(2),
    "sequential": ExpectedMemory(2),
    "meta_copy": ExpectedMemory(2),
    "load_assign": ExpectedMemory(1),
    "mmap_assign": ExpectedMemory(0, mapped=True),
    "per_param": ExpectedMemory(1, "tensor"),
    "per_param_mmap": ExpectedMemory(0, mapped=True),
    "per_module": ExpectedMemory(1, "layer"),
    "dcp": ExpectedMemory(1, "tensor"),
    "safetensors_mmap": ExpectedMemory(0, mapped=True),
    "safetensors_copy": ExpectedMemory(1, mapped=True),
    "sharded": ExpectedMemory(1, mapped=True),
    "streaming": ExpectedMemory(1),
}
_NEEDS_OF_BIN_SHARDS: Final = ExpectedMemory(1, "shard")


@dataclass(frozen=True, slots=True)
class Expected:
    """What one strategy should need for one checkpoint.

    Attributes:
        layouts: what it reads.
        anonymous_bytes: its expected peak above a bare import; None for a strategy of others.
        mapped_bytes: pages of the file beside it, which the kernel can take back.
    """

    strategy: str
    layouts: tuple[str, ...]
    anonymous_bytes: int | None
    mapped_bytes: int | None


def expected(
    strategies: Iterable[StrategyInfo], layout: str, sizes: dict[str, int]
) -> list[Expected]:
    """Return what each strategy should need for weights of these names and bytes.

    ``sizes`` has each tensor that is tied to no earlier one; ``layout`` is the checkpoint's own.
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
    found = []
    for info in strategies:
        need = _NEEDS.get(info.name)
        if info.name == "sharded" and layout == "sharded_pt":
            need = _NEEDS_OF_BIN_SHARDS
        found.append(
            Expected(
                strategy=info.name,
                layouts=info.formats,
                anonymous_bytes=None if need is None else need.copies * total + largest[need.piece],
                mapped_bytes=None if need is None else total * need.mapped,
            )
        )
    return found
