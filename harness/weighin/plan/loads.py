"""Plan a run of loads or saves: expand its settings into cells, in the order in which they run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from weighin.cell import FORK, FORWARD, NONE, TO_DEVICE, Cell, ModelSpec
from weighin.errors import ConfigError, HarnessError
from weighin.isolation.base import Isolation
from weighin.isolation.visible import preloaded
from weighin.plan.task import Node, Planned, check_machines, choose
from weighin.settings.definition import Settings
from weighin.stream import formats, quantised
from weighin.stream import gguf_files as gguf
from weighin.stream.foreign import remembering
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
    planned = cells_of(
        settings,
        models,
        strategies,
        isolation.name,
        dtypes=chosen.dtypes,
        own_formats=chosen.own_formats,
    )
    with remembering():  # each repeat asks for the same checkpoint
        planned = [_of_this_run(each, checkpoint, chosen.selection, nodes) for each in planned]
    _check_any_runs(planned)
    for name in (name for variables in settings.environment for name in preloaded(variables)):
        # In both cases, the dynamic linker would at most print a line.
        wrong = ""
        if not Path(name).is_absolute():
            wrong = f"{name!r} is not an absolute path"
        elif not Path(name).is_file():
            wrong = f"there is no file {name}"
        if wrong:
            raise ConfigError(
                f"LD_PRELOAD: {wrong}",
                "install the library, or write its whole path: `ldconfig -p` lists this machine's",
            )
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
    return Planned(cell, info, next(_obstacles(cell, info, own_format), ""))


def _obstacles(cell: Cell, info: StrategyInfo, own_format: str | None) -> Iterator[str]:
    """Yield why a cell cannot be run, beginning with what nothing but another cell can change."""
    kind, is_save = cell.device.partition(":")[0], cell.operation == "save"
    if cell.format not in info.formats:
        only = f"only {', '.join(info.formats)}"
        if cell.format == gguf.NAME:
            only += f"; to measure it with the dequantised weights: --format {info.formats[0]}"
        yield f"{info.name} does not {'write' if is_save else 'read'} {cell.format}, {only}"
    if cell.format == gguf.NAME and (missing := registry.missing_packages(("gguf", "accelerate"))):
        yield f"{info.name} of a GGUF file {missing}"  # transformers imports them
    if cell.use and cell.ranks > 1:
        yield f"weighin measures the use {cell.use} only in one process: --ranks 1"
    if cell.use == TO_DEVICE and kind != "cpu":
        yield "to-device moves a model from the CPU to the GPU, but the model is on the GPU already"
    if cell.use == FORK and kind != "cpu":
        yield "a forked process cannot use a model on the GPU"
    if info.shares_load and cell.ranks == 1:
        yield f"{info.name} divides a load among several processes, so it needs --ranks 2 or more"
    if info.pretrained and folder_library(cell.model) != info.pretrained:
        yield f"{info.name} loads {_FOLDERS[info.pretrained]} only"
    if kind not in info.devices:
        yield f"{info.name} does not {'save from' if is_save else 'load to'} {kind}"
    yield from _obstacles_of_weights(cell, info)
    if info.missing:
        yield f"{info.name} {info.missing}"
    if info.pretrained and own_format and cell.format != own_format:
        yield f"{info.name} loads only the folder's own files, of format {own_format}"


def _obstacles_of_weights(cell: Cell, info: StrategyInfo) -> Iterator[str]:
    is_save, adapter = cell.operation == "save", adapter_of(cell.model)
    if info.needs_adapter and not adapter:
        yield f"{info.name} needs an adapter to merge into the model: --adapter ADAPTER"
    if adapter and not (is_save or info.merges):
        yield "the model has an adapter; only --strategies streaming,peft_merge merge it"
    if found := quantised.of_model(cell.model):
        weights = f"the weights are {found.summary}"
        if is_save:
            yield f"{weights}; weighin saves only weights that are not quantised"
        if found.obstacle:
            yield f"{weights}; {found.obstacle}; {found.repair}"
        if not info.loads(found):
            able = "streaming and transformers" if found.dequantises else "transformers"
            yield f"{weights}; only {able} can load them"


def _of_this_run(
    each: Planned, checkpoint: Path | None, selection: Selection, nodes: Sequence[Node]
) -> Planned:
    """Skip a cell that this run's machines or checkpoint cannot serve; refuse a strategy whose own --key or
    strip_prefix, or whose format, differs from the run's.
    """
    if each.skip:
        return each
    if each.cell.use == TO_DEVICE:
        try:
            check_machines([], "cuda", (None,), nodes)
        except HarnessError as error:
            return replace(
                each, skip=f"{TO_DEVICE}: {error.message.removeprefix('--device cuda: ')}"
            )
    if not each.selection:
        return each
    name, options = each.cell.strategy, " ".join(each.selection.options)
    if each.selection != selection:
        asked = " ".join(selection.options) or "neither --key nor strip_prefix"
        raise ConfigError(
            f"strategy {name} has the options {options}, but the run has {asked}",
            f"add --checkpoint PATH {options}, or change the strategy's options",
        )
    if each.cell.format != (own := formats.loaded_as(checkpoint)):
        raise ConfigError(
            f"{name} with the option {options} reads your checkpoint itself, whose format is {own},"
            f" not {each.cell.format}",
            "leave --format out, or leave the strategy out",
        )
    if not (checkpoint and each.strategy.weights_only):
        return each
    if refused := formats.read(checkpoint, selection).refused:
        why = f"torch.load(weights_only=True) refuses {refused} in {checkpoint.name}; weights_only=False runs code from the file"  # fmt: skip
        return replace(each, skip=f"{name}: {why}")
    return each


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
