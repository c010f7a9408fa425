"""Expand a matrix into cells, in the order in which they run."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, Final

from weighin.cell import CacheState, Cell, ModelSpec, Operation
from weighin.formats import gguf, quantised
from weighin.formats.adapters import adapter_of
from weighin.formats.pretrained_folder import folder_library
from weighin.formats.selection import Selection
from weighin.suite import uses
from weighin.suite.registry import StrategyInfo
from weighin.uses import FORWARD, NONE

_FOLDERS: Final = {
    "transformers": "Hugging Face folders",
    "diffusers": "parts of diffusers pipelines",
    "timm": "folders of timm",
}


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned cell. ``skip`` is the reason not to run the cell, or empty for a cell to run."""

    cell: Cell
    strategy: StrategyInfo
    skip: str = ""

    @property
    def selection(self) -> Selection:
        """The weights that the strategy itself selects in the user's checkpoint, by its options."""
        options = self.cell.options if self.cell.operation == "load" else {}
        return Selection(options.get("key", ""), options.get("strip_prefix", ""))

    @classmethod
    def of(cls, cell: Cell, info: StrategyInfo) -> "Planned":
        """Plan a cell; skip it if its strategy does not support the device or format, or lacks a package."""
        kind = cell.device.partition(":")[0]
        to, read = ("load to", "read") if cell.operation == "load" else ("save from", "write")
        skip = f"{info.name} {missing}" if (missing := info.missing) else ""
        if found := quantised.of_model(cell.model):
            skip = _obstacle(found, info, cell.operation) or skip
        if adapter_of(cell.model) and cell.operation == "load" and not info.merges:
            skip = "the model has an adapter; only --strategies streaming,peft_merge merge it"
        if info.needs_adapter and not adapter_of(cell.model):
            skip = f"{info.name} merges an adapter into the model: --adapter ADAPTER"
        if kind not in info.devices:
            skip = f"{info.name} does not {to} {kind}"
        if info.pretrained and folder_library(cell.model) != info.pretrained:
            skip = f"{info.name} loads {_FOLDERS[info.pretrained]} only"
        if info.shares_load and cell.ranks == 1:
            skip = f"{info.name} divides a load among several ranks: --ranks 2"
        skip = uses.obstacle(cell) or skip
        if cell.format == gguf.NAME and (missing := _missing_for_gguf()):
            skip = f"{info.name} of a GGUF file {missing}"
        if cell.format not in info.formats:
            skip = f"{info.name} does not {read} {cell.format}, only {', '.join(info.formats)}"
            if cell.format == gguf.NAME:
                skip += f"; to measure it with the dequantised weights: --format {info.formats[0]}"
        return cls(cell, info, skip)


def _obstacle(found: quantised.Quantised, info: StrategyInfo, operation: Operation) -> str:
    """Return why a strategy cannot load or save quantised weights; empty if it can."""
    from weighin.suite import packages  # as in StrategyInfo.missing

    if operation == "save":
        return f"the weights are {found.summary}; a save needs the weights themselves"
    if found.obstacle:
        return f"the weights are {found.summary}; {found.obstacle}; {found.repair}"
    if not info.loads(found):
        able = "streaming and transformers load" if found.dequantises else "transformers loads"
        return f"the weights are {found.summary}; only --strategies {able} them"
    missing = packages.missing(() if found.own and not info.pretrained else found.packages)
    return (
        f"{info.name} {missing}, because the weights are quantised with {found.method}"
        if missing
        else ""
    )


def _missing_for_gguf() -> str:
    """Return which packages transformers lacks for a GGUF file, and how to install them."""
    from weighin.suite import packages  # as in StrategyInfo.missing

    return packages.missing(("gguf", "accelerate"))


@dataclass(frozen=True, slots=True)
class CellMatrix:
    """The values to combine. ``ram_limits`` and ``vram_limits`` are in bytes; None is no limit.

    ``formats`` are the requested checkpoint formats: each strategy runs with every requested format
    that it supports. If no format is requested, each strategy runs with the model's one in
    ``own_formats``, which is the format of the user's checkpoint, or else with the first format that the
    strategy declares. ``own_formats`` and ``dtypes`` are by the models' titles. ``passes`` is the number of forward
    passes of the use "forward".
    """

    models: tuple[ModelSpec, ...]
    strategies: tuple[tuple[StrategyInfo, dict[str, Any]], ...]
    ram_limits: tuple[int | None, ...]
    isolation: str
    device: str = "cpu"
    dtypes: Mapping[str, str] = field(default_factory=dict)
    cache: CacheState = "cold"
    repeats: int = 1
    passes: int = 1
    ram_high_bytes: int | None = None
    formats: tuple[str, ...] = ()
    operation: Operation = "load"
    vram_limits: tuple[int | None, ...] = (None,)
    own_formats: Mapping[str, str] = field(default_factory=dict)
    environments: tuple[dict[str, str], ...] = ({},)
    ranks: tuple[int, ...] = (1,)
    uses: tuple[str, ...] = (FORWARD,)


def plan(matrix: CellMatrix) -> list[Planned]:
    """Return the cells of a matrix without duplicates. Repeats are interleaved: A B C A B C.

    Strategies that divide a load among ranks have no cell of one rank beside those of several.
    """
    planned = [
        _planned(matrix, repeat, model, limits, info, options, fmt, environment, ranks, use)
        for repeat, model, *limits, ranks, environment, use, (info, options) in product(
            range(matrix.repeats),
            matrix.models,
            matrix.ram_limits,
            matrix.vram_limits,
            matrix.ranks,
            matrix.environments,
            matrix.uses,
            matrix.strategies,
        )
        if ranks > 1 or not info.shares_load or max(matrix.ranks) == 1
        for fmt in _formats(matrix, model, info)
    ]
    return list({each.cell.id: each for each in planned}.values())


def _formats(matrix: CellMatrix, model: ModelSpec, info: StrategyInfo) -> list[str]:
    """Return the formats for one model and strategy.

    If the strategy supports no requested format, return the first requested format, so that the
    cell is planned as skipped with a reason.
    """
    own = matrix.own_formats.get(model.title)
    if not matrix.formats and own and (own in info.formats or own == gguf.NAME):
        return [
            own
        ]  # a GGUF file is dequantised only if asked for: it takes up to 8 times its size
    supported = [fmt for fmt in matrix.formats if fmt in info.formats]
    return supported or [*matrix.formats, *info.formats][:1]


def _planned(
    matrix: CellMatrix,
    repeat: int,
    model: ModelSpec,
    limits: list[int | None],
    info: StrategyInfo,
    options: dict[str, Any],
    fmt: str,
    environment: dict[str, str],
    ranks: int,
    use: str,
) -> Planned:
    is_forward = use == FORWARD and matrix.operation == "load"
    cell = Cell(
        model=model,
        strategy=info.name,
        isolation=matrix.isolation,
        ram_limit_bytes=limits[0],
        vram_limit_bytes=limits[1],
        device=matrix.device,
        dtype=matrix.dtypes.get(model.title, "float32"),
        format=fmt,
        cache=matrix.cache,
        options=options,
        passes=matrix.passes if is_forward else 0,
        ram_high_bytes=matrix.ram_high_bytes,
        repeat=repeat,
        operation=matrix.operation,
        environment=environment,
        ranks=ranks,
        use="" if use in (FORWARD, NONE) else use,
    )
    planned = Planned.of(cell, info)
    own = matrix.own_formats.get(model.title)
    if info.pretrained and own and fmt != own and not planned.skip:
        return replace(planned, skip=f"{info.name} loads the folder's own files, in format {own}")
    return planned
