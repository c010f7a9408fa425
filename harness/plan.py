"""A matrix becomes cells, in the order in which they run, with the reason where one is skipped."""

from dataclasses import dataclass
from itertools import product
from typing import Any

from harness.cell import CacheState, Cell, ModelSpec
from harness.registry import StrategyInfo


@dataclass(frozen=True, slots=True)
class Planned:
    """A cell that is to run, or not: ``skip`` is the reason, empty where it runs."""

    cell: Cell
    strategy: StrategyInfo
    skip: str = ""

    @classmethod
    def of(cls, cell: Cell, info: StrategyInfo) -> "Planned":
        """Return the cell with the reason why its strategy cannot run it, if there is one."""
        kind = cell.device.partition(":")[0]
        skip = "" if kind in info.devices else f"{info.name} does not load to {kind}"
        return cls(cell, info, skip)


@dataclass(frozen=True, slots=True)
class Matrix:
    """What to combine. ``ram_limits`` in bytes; None is no limit."""

    models: tuple[ModelSpec, ...]
    strategies: tuple[tuple[StrategyInfo, dict[str, Any]], ...]
    ram_limits: tuple[int | None, ...]
    isolation: str
    device: str = "cpu"
    cache: CacheState = "cold"
    repeats: int = 1


def plan(matrix: Matrix) -> list[Planned]:
    """Return the cells of a matrix, each once. Repeats are interleaved: A B C A B C, never A A."""
    planned = [
        _planned(matrix, repeat, model, limit, info, options)
        for repeat, model, limit, (info, options) in product(
            range(matrix.repeats), matrix.models, matrix.ram_limits, matrix.strategies
        )
    ]
    return list({one.cell.id: one for one in planned}.values())


def _planned(
    matrix: Matrix,
    repeat: int,
    model: ModelSpec,
    limit: int | None,
    info: StrategyInfo,
    options: dict[str, Any],
) -> Planned:
    cell = Cell(
        model=model,
        strategy=info.name,
        isolation=matrix.isolation,
        ram_limit_bytes=limit,
        device=matrix.device,
        format=info.formats[0],
        cache=matrix.cache,
        options=options,
        repeat=repeat,
    )
    return Planned.of(cell, info)
