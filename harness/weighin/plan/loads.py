"""Plan a run of loads or saves: expand its settings into cells, in the order in which they run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from weighin.cell import FORWARD, NONE, TO_DEVICE, Cell, ModelSpec, Operation
from weighin.errors import ConfigError, IsolationUnavailable
from weighin.isolation.base import Isolation
from weighin.isolation.visible import preloaded
from weighin.plan.task import Node, Planned, check_gpu, choose
from weighin.settings.definition import Settings
from weighin.stream import formats, quantised
from weighin.stream import gguf_files as gguf
from weighin.stream.pretrained_folder import adapter_of, code_of, folder_library
from weighin.stream.pretrained_library import Selection
from weighin.suite import chosen_models, registry
from weighin.suite.registry import StrategyInfo

_FOLDERS: Final = {
    "transformers": "Hugging Face folders",
    "diffusers": "parts of diffusers pipelines",
    "timm": "folders of timm",
}


def plan(
    settings: Settings, nodes: Sequence[Node]
) -> tuple[list[Planned], Isolation, Settings, str]:
    """Return a new run's cells and isolation, its settings with all paths, and a note for the user."""
    chosen = chosen_models.choose(settings)
    models = chosen.specs
    checkpoint = chosen.checkpoint.absolute() if chosen.checkpoint else None
    strategies = registry.chosen(settings, chosen.own_format)
    _check_names("models", [(spec.title, spec.builder) for spec in models])
    _check_names("strategies", [(info.name, str(info.path)) for info, _ in strategies])
    use_paths = registry.chosen_uses(settings.uses)
    for name in settings.format:
        formats.known(name)  # raises for an unknown format before the isolation is tested
    isolation, note = choose(settings, nodes)
    own = {"dtypes": chosen.dtypes, "own_formats": chosen.own_formats}
    planned = cells_of(settings, models, strategies, isolation.name, **own)
    try:
        if any(each.cell.use == TO_DEVICE and not each.skip for each in planned):
            check_gpu("cuda", (None,), nodes)
    except (ConfigError, IsolationUnavailable) as error:
        no_gpu = f"{TO_DEVICE}: {error.message.removeprefix('--device cuda: ')}"
        planned = [
            replace(each, skip=each.skip or no_gpu) if each.cell.use == TO_DEVICE else each
            for each in planned
        ]
    _check_preloaded(settings.environment)
    _check_own_selections(planned, chosen.selection, formats.loaded_as(checkpoint))
    planned = _without_refused(planned, checkpoint)
    _check_any_runs(planned)
    folders = [Path(code["folder"]) for model in models if (code := code_of(model))]
    adapters = [adapter for model in models if (adapter := adapter_of(model))]
    mounts = (*map(Path, settings.mounts), *folders, *adapters)
    for path in mounts:
        if not path.exists():
            raise ConfigError(f"mounts: {path}: there is no such file or folder")
    found = {
        "checkpoint": checkpoint,
        "checkpoints": {title: str(path.absolute()) for title, path in chosen.checkpoints.items()},
        "key": chosen.selection.key,
        "strip_prefix": chosen.selection.strip_prefix,
        "strategy_paths": {info.name: str(info.path) for info, _ in strategies},
        "use_paths": {name: path for name, path in use_paths.items() if path},
        "python_path": tuple(chosen.python_path),
        "mounts": tuple(str(path.absolute()) for path in mounts),
        "storage": settings.storage.expanduser().absolute() if settings.storage else None,
    }
    note = "; ".join(filter(None, (note, *chosen.notes)))
    return planned, isolation, settings.model_copy(update=found), note


def restore(cells: Sequence[Cell], settings: Settings) -> list[Planned]:
    infos = {
        name: registry.read_strategy(Path(path), cells[0].operation)
        for name, path in settings.strategy_paths.items()
    }
    planned = [plan_cell(cell, infos[cell.strategy]) for cell in cells]
    _check_any_runs(planned)
    return planned


def cells_of(
    settings: Settings,
    models: Sequence[ModelSpec],
    strategies: Sequence[tuple[StrategyInfo, dict[str, Any]]],
    isolation: str,
    *,
    dtypes: Mapping[str, str] = MappingProxyType({}),
    own_formats: Mapping[str, str] = MappingProxyType({}),
) -> list[Planned]:
    """Return the cells of a run without duplicates, all before the first is repeated: A B C A B C. ``dtypes`` and
    ``own_formats`` (of the user's checkpoint) are by the model's title. A strategy that supports none of the
    wanted formats has a cell of the first one, which is skipped with a reason.
    """
    wanted = [formats.known(name) for name in settings.format]
    axes: dict[str, Sequence[Any]] = {
        "ram_limit_bytes": settings.ram,
        "vram_limit_bytes": settings.vram,
        "disk_bytes_per_s": settings.disk,
        "disk_latency_ns": settings.disk_latency,
        "ranks": settings.ranks,
        "environment": settings.environment,
    }
    inner = (*axes.values(), registry.chosen_uses(settings.uses), strategies)
    found: dict[str, Planned] = {}
    for repeat, model, *values, use, (info, options) in product(
        range(settings.repeats), models, *inner
    ):
        fields = dict(zip(axes, values, strict=True))
        if info.shares_load and fields["ranks"] == 1 and max(settings.ranks) > 1:
            continue
        is_forward = use == FORWARD and settings.operation == "load"
        own, able = own_formats.get(model.title), [fmt for fmt in wanted if fmt in info.formats]
        if not wanted and own and (own in info.formats or own == gguf.NAME):
            able = [own]  # a GGUF file is not dequantised: the result is up to 8 times as large
        for fmt in able or [*wanted, *info.formats][:1]:
            cell = Cell(
                model=model,
                strategy=info.name,
                isolation=isolation,
                device=settings.device,
                dtype=dtypes.get(model.title, "float32"),
                format=fmt,
                cache=settings.cache,
                options=options,
                passes=settings.passes if is_forward else 0,
                ram_high_bytes=settings.ram_high,
                repeat=repeat,
                operation=settings.operation,
                use="" if use in (FORWARD, NONE) else use,
                **fields,
            )
            found[cell.id] = plan_cell(cell, info, own)
    return list(found.values())


def plan_cell(cell: Cell, info: StrategyInfo, own_format: str | None = None) -> Planned:
    """Plan a cell, which is skipped if its strategy does not support its settings. ``own_format`` is that of the
    user's checkpoint.
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
        skip = f"{info.name} divides a load among several processes, so it needs --ranks 2 or more"
    skip = registry.obstacle_of_use(cell) or skip
    if cell.format == gguf.NAME and (
        missing := registry.missing_packages(registry.OF_FORMAT[gguf.NAME])
    ):
        skip = f"{info.name} of a GGUF file {missing}"
    if cell.format not in info.formats:
        skip = f"{info.name} does not {read} {cell.format}, only {', '.join(info.formats)}"
        if cell.format == gguf.NAME:
            skip += f"; to measure it with the dequantised weights: --format {info.formats[0]}"
    if info.pretrained and own_format and cell.format != own_format:
        skip = skip or f"{info.name} loads only the folder's own files, of format {own_format}"
    return Planned(cell, info, skip)


def _obstacle(found: quantised.Quantised, info: StrategyInfo, operation: Operation) -> str:
    if operation == "save":
        return f"the weights are {found.summary}; weighin saves only weights that are not quantised"
    if found.obstacle:
        return f"the weights are {found.summary}; {found.obstacle}; {found.repair}"
    if not info.loads(found):
        able = "streaming and transformers" if found.dequantises else "transformers"
        return f"the weights are {found.summary}; only {able} can load them"
    return ""


def _check_own_selections(planned: list[Planned], selection: Selection, own: str | None) -> None:
    """Refuse a strategy whose own --key or strip_prefix, or whose format, differs from the run's."""
    for each in planned:
        if each.skip or not each.selection:
            continue
        options, asked = " ".join(each.selection.options), " ".join(selection.options)
        if each.selection != selection:
            raise ConfigError(
                f"strategy {each.cell.strategy} has the options {options}, but the run has"
                f" {asked or 'neither --key nor strip_prefix'}",
                f"add --checkpoint PATH {options}, or change the strategy's options",
            )
        if each.cell.format != own:
            raise ConfigError(
                f"{each.cell.strategy} with the option {options} reads your checkpoint itself, whose"
                f" format is {own}, not {each.cell.format}",
                "leave --format out, or leave the strategy out",
            )


def _without_refused(planned: list[Planned], checkpoint: Path | None) -> list[Planned]:
    """Skip the cells of strategies whose torch.load(weights_only=True) refuses the user's checkpoint."""
    reading = {
        each.cell.id: each.selection
        for each in planned
        if not each.skip and each.strategy.weights_only and each.selection
    }
    if checkpoint is None or not reading:
        return planned
    selection = next(iter(reading.values()))  # of all of them
    if not (refused := formats.read(checkpoint, selection).refused):
        return planned
    why = f"torch.load(weights_only=True) refuses {refused} in {checkpoint.name}; weights_only=False runs code from the file"  # fmt: skip
    return [
        replace(each, skip=f"{each.strategy.name}: {why}") if each.cell.id in reading else each
        for each in planned
    ]


def _check_preloaded(environments: Sequence[Mapping[str, str]]) -> None:
    """Refuse an LD_PRELOAD of which the dynamic linker would only print a line."""
    for name in chain.from_iterable(map(preloaded, environments)):
        if not Path(name).is_absolute():
            raise ConfigError(
                f"LD_PRELOAD: {name!r} is not an absolute path",
                "write the library's whole path, which begins with /",
            )
        if not Path(name).is_file():
            raise ConfigError(
                f"LD_PRELOAD: there is no file {name}",
                "install the library, or write its path into the variable: `ldconfig -p` lists this"
                " machine's libraries",
            )


def _check_names(kinds: str, named_places: list[tuple[str, str]]) -> None:
    places: dict[str, str] = {}
    for name, place in named_places:
        if places.setdefault(name, place) != place:
            raise ConfigError(
                f"two {kinds} are called {name!r}: {places[name]} and {place}",
                "rename one of the two, or measure them in two runs, because a record identifies"
                f" {kinds} by name",
            )


def _check_any_runs(planned: Sequence[Planned]) -> None:
    if all(one.skip for one in planned):
        reasons = "; ".join(dict.fromkeys(one.skip for one in planned))
        raise ConfigError(
            f"weighin skips every measurement of the run: {reasons}",
            "choose another strategy, format or device: weighin list strategies shows the formats"
            " and devices of each strategy",
        )
