"""Expand a suite into cells (single measurements), in the order in which they run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from weighin import formats
from weighin.cell import Cell, ModelSpec, Operation
from weighin.formats import gguf, quantised
from weighin.formats.adapters import adapter_of
from weighin.formats.pretrained_folder import folder_library
from weighin.formats.selection import Selection
from weighin.suite import uses
from weighin.suite.registry import StrategyInfo
from weighin.uses import FORWARD, NONE

if TYPE_CHECKING:
    from weighin.suite.config import Suite

_FOLDERS: Final = {
    "transformers": "Hugging Face folders",
    "diffusers": "parts of diffusers pipelines",
    "timm": "folders of timm",
}


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned cell. ``skip`` is the reason not to run the cell; it is empty for a cell to run."""

    cell: Cell
    strategy: StrategyInfo
    skip: str = ""

    @property
    def selection(self) -> Selection:
        """The part of the user's checkpoint that the strategy's options key and strip_prefix select."""
        options = self.cell.options if self.cell.operation == "load" else {}
        return Selection(options.get("key", ""), options.get("strip_prefix", ""))

    @classmethod
    def of(cls, cell: Cell, info: StrategyInfo, own_format: str | None = None) -> "Planned":
        """Plan a cell; skip the cell if its strategy lacks a package, or does not support the cell's settings.

        ``own_format`` is the format of the user's checkpoint for the model; None without one.
        """
        kind = cell.device.partition(":")[0]
        to, read = ("load to", "read") if cell.operation == "load" else ("save from", "write")
        skip = f"{info.name} {missing}" if (missing := info.missing) else ""
        if found := quantised.of_model(cell.model):
            skip = _obstacle(found, info, cell.operation) or skip
        if adapter_of(cell.model) and cell.operation == "load" and not info.merges:
            skip = "the model has an adapter; only --strategies streaming,peft_merge merge it"
        if info.needs_adapter and not adapter_of(cell.model):
            skip = f"{info.name} needs an adapter to merge into the model: --adapter ADAPTER"
        if kind not in info.devices:
            skip = f"{info.name} does not {to} {kind}"
        if info.pretrained and folder_library(cell.model) != info.pretrained:
            skip = f"{info.name} loads {_FOLDERS[info.pretrained]} only"
        if info.shares_load and cell.ranks == 1:
            skip = (
                f"{info.name} divides a load among several processes, so it needs --ranks 2 or more"
            )
        skip = uses.obstacle(cell) or skip
        if cell.format == gguf.NAME:
            from weighin.suite import packages  # imports what `weighin list` does not need

            if missing := packages.missing(packages.OF_FORMAT[gguf.NAME]):
                skip = f"{info.name} of a GGUF file {missing}"
        if cell.format not in info.formats:
            skip = f"{info.name} does not {read} {cell.format}, only {', '.join(info.formats)}"
            if cell.format == gguf.NAME:
                skip += f"; to measure it with the dequantised weights: --format {info.formats[0]}"
        if info.pretrained and own_format and cell.format != own_format:
            skip = skip or f"{info.name} loads only the folder's own files, of format {own_format}"
        return cls(cell, info, skip)


def _obstacle(found: quantised.Quantised, info: StrategyInfo, operation: Operation) -> str:
    from weighin.suite import packages  # imports what `weighin list` does not need

    if operation == "save":
        return f"the weights are {found.summary}; weighin saves only weights that are not quantised"
    if found.obstacle:
        return f"the weights are {found.summary}; {found.obstacle}; {found.repair}"
    if not info.loads(found):
        able = "streaming and transformers" if found.dequantises else "transformers"
        return f"the weights are {found.summary}; only {able} can load them"
    missing = packages.missing(() if found.own and not info.pretrained else found.packages)
    return (
        f"{info.name} {missing}, because the weights are quantised with {found.method}"
        if missing
        else ""
    )


def plan(
    suite: "Suite",
    models: Sequence[ModelSpec],
    strategies: Sequence[tuple[StrategyInfo, dict[str, Any]]],
    isolation: str,
    *,
    dtypes: Mapping[str, str] = MappingProxyType({}),
    own_formats: Mapping[str, str] = MappingProxyType({}),
) -> list[Planned]:
    """Return the cells of a suite without duplicates. Every cell runs before the first cell is
    repeated: A B C A B C.

    If the suite also asks for several ranks (processes), a strategy that divides a load among ranks
    gets no cell with one rank. ``dtypes`` has the dtype of each model, and ``own_formats`` the
    format of each user's checkpoint, by the model's title.

    Raises:
        UnknownName: the suite names a format or a use that does not exist.
        ConfigError: a file that the suite names as a use has no function ``use``, or a taken name.
    """
    wanted = [formats.known(name) for name in suite.format]
    axes: dict[str, Sequence[Any]] = {
        "ram_limit_bytes": suite.ram,
        "vram_limit_bytes": suite.vram,
        "disk_bytes_per_s": suite.disk,
        "disk_latency_ns": suite.disk_latency,
        "ranks": suite.ranks,
        "environment": suite.environment,
    }
    inner = (*axes.values(), uses.chosen(suite.uses), strategies)
    planned: dict[str, Planned] = {}
    for repeat, model, *values, use, (info, options) in product(
        range(suite.repeats), models, *inner
    ):
        fields = dict(zip(axes, values, strict=True))
        if info.shares_load and fields["ranks"] == 1 and max(suite.ranks) > 1:
            continue
        is_forward = use == FORWARD and suite.operation == "load"
        own = own_formats.get(model.title)
        for fmt in _formats(wanted, own, info):
            cell = Cell(
                model=model,
                strategy=info.name,
                isolation=isolation,
                device=suite.device,
                dtype=dtypes.get(model.title, "float32"),
                format=fmt,
                cache=suite.cache,
                options=options,
                passes=suite.passes if is_forward else 0,
                ram_high_bytes=suite.ram_high,
                repeat=repeat,
                operation=suite.operation,
                use="" if use in (FORWARD, NONE) else use,
                **fields,
            )
            planned[cell.id] = Planned.of(cell, info, own)
    return list(planned.values())


def _formats(wanted: Sequence[str], own: str | None, info: StrategyInfo) -> list[str]:
    """Return the formats in which one strategy loads or saves one model.

    If the suite names formats (``wanted``), the result has those that the strategy supports. If it
    supports none, the result is the first wanted format, whose cell is then skipped with a reason.
    Without ``wanted``, the result is the format of the user's checkpoint (``own``) if the strategy
    reads it or it is GGUF, and else the first format that the strategy declares.
    """
    if not wanted and own and (own in info.formats or own == gguf.NAME):
        # Without --format, a GGUF file is not dequantised: the result is up to 8 times as large.
        return [own]
    supported = [fmt for fmt in wanted if fmt in info.formats]
    return supported or [*wanted, *info.formats][:1]
