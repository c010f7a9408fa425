"""Compute from the tensors' sizes how much memory each strategy should need, by its constant PEAK.

The expected memory does not include the memory of ``import torch``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from weighin.formats.per_key import module_of
from weighin.formats.storages import Footprint
from weighin.suite.registry import StrategyInfo

SHARD_BYTES: Final = 5 * 1024**3  # the default size of a shard of weighin convert


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected memory of one strategy for one checkpoint.

    Attributes:
        layouts: the formats that the strategy reads.
        anonymous_bytes: the expected peak without ``import torch``; None for a strategy without PEAK.
        mapped_bytes: the size of the mapped file pages, which the kernel can reclaim; None likewise.
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
    largest = max(sizes.values(), default=0)
    needs = []
    for info in strategies:
        if info.shares_load:
            continue
        is_read = layout in info.formats
        in_file = storages if storages and is_read else None
        memory = {
            "model": total,
            "storages": in_file.storage_bytes if in_file else total,
            "tensor": largest,
            "layer": max(layers.values(), default=0),
            "shard": min(total, max(SHARD_BYTES, largest)),
        }
        mapped = in_file.used_bytes if in_file else total
        if not info.peak:
            needs.append(Expected(info.name, info.formats, None, None))
            continue
        of_format = info.formats.index(layout) if is_read and len(info.peak) > 1 else 0
        words = info.peak[of_format].split(" + ")
        anonymous_bytes = sum(memory[word] for word in words if word != "mapped")
        mapped_bytes = mapped if "mapped" in words else 0
        needs.append(Expected(info.name, info.formats, anonymous_bytes, mapped_bytes))
    return needs
