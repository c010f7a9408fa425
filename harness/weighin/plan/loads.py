"""Plan a run of loads or saves: expand its settings into cells, in the order in which they run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from weighin.cell import FORK, FORWARD, LATEST, NONE, TO_DEVICE, Cell, ModelSpec
from weighin.errors import ConfigError, HarnessError
from weighin.isolation.base import Isolation
from weighin.plan.task import Demand, Node, Planned, check_machines, choose
from weighin.settings.definition import Settings
from weighin.stream import formats, quantised
from weighin.stream import gguf_files as gguf
from weighin.stream.foreign import remembering
from weighin.stream.hugging_face_folder import adapter_of, code_of, folder_library
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
    isolation, note = choose(settings, nodes)
    dtypes, own = chosen.dtypes, chosen.own_formats
    planned = cells_of(settings, models, strategies, isolation.name, dtypes, own)
    with remembering():  # each repeat asks for the same checkpoint
        planned = [_of_this_run(each, checkpoint, chosen.selection, nodes) for each in planned]
    planned = [*{each.cell.id: each for each in planned}.values()]  # pt may have become pt_legacy
    _check_any_runs(planned)
    folders = [Path(code["folder"]) for model in models if (code := code_of(model))]
    adapters = [adapter for model in models if (adapter := adapter_of(model))]
    mounts = (*map(Path, settings.mounts), *folders, *adapters)
    if gone := [str(path) for path in mounts if not path.exists()]:
        raise ConfigError(f"mounts: {gone[0]}: there is no such file or folder", "correct the path")
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
        "releases": settings.releases,
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
    obstacles = _obstacles(cell, info, own_format)
    return Planned(cell, info, next((why for is_so, why in obstacles if is_so), ""))


def _obstacles(
    cell: Cell, info: StrategyInfo, own_format: str | None
) -> Sequence[tuple[object, str]]:
    """Return what can hinder a cell, and whether it does, beginning with what only another cell can change."""
    name, kind, is_save = info.name, cell.device.partition(":")[0], cell.operation == "save"
    is_of_folder, adapter = bool(info.pretrained), adapter_of(cell.model)
    able, of_gguf = ", ".join(info.formats), ""
    if cell.format == gguf.NAME:
        able += f"; to measure it with the dequantised weights: --format {info.formats[0]}"
        of_gguf = registry.missing_packages(("gguf", "accelerate"))  # transformers imports them
    obstacles: list[tuple[object, str]] = [
        (cell.format not in info.formats, f"{name} does not {'write' if is_save else 'read'} {cell.format}, only {able}"),
        (of_gguf and not cell.releases, f"{name} of a GGUF file {of_gguf}"),
        (cell.releases == LATEST and not info.packages, f"--with latest: {name} needs no package that weighin could install"),
        (cell.use and cell.ranks > 1, f"the use {cell.use} is measured in one process: --ranks 1"),
        (cell.use in (TO_DEVICE, FORK) and kind != "cpu", f"the use {cell.use} needs a model on the CPU"),
        (info.shares_load and cell.ranks == 1, f"{name} divides a load: it needs --ranks 2 or more"),
        (is_of_folder and folder_library(cell.model) != info.pretrained, f"{name} loads {_FOLDERS.get(info.pretrained)} only"),
        (kind not in info.devices, f"{name} does not {'save from' if is_save else 'load to'} {kind}"),
        (info.needs_adapter and not adapter, f"{name} needs an adapter to merge: --adapter ADAPTER"),
        (adapter and not (is_save or info.merges), "the model has an adapter; only --strategies streaming,peft_merge merge it"),
    ]  # fmt: skip
    if found := quantised.of_model(cell.model):
        weights = f"the weights are {found.summary}"
        able = "streaming and transformers" if found.dequantises else "transformers"
        obstacles += [
            (is_save, f"{weights}; weighin saves only weights that are not quantised"),
            (found.obstacle, f"{weights}; {found.obstacle}; {found.repair}"),
            (not info.loads(found), f"{weights}; only {able} can load them"),
        ]
    is_other = is_of_folder and own_format and cell.format != own_format
    of_folder = f"{name} loads only the folder's own files, of format {own_format}"
    missing = "" if cell.releases else info.missing
    return [*obstacles, (missing, f"{name} {missing}"), (is_other, of_folder)]


def _of_this_run(
    each: Planned, checkpoint: Path | None, selection: Selection, nodes: Sequence[Node]
) -> Planned:
    """Skip a cell that this run's machines or checkpoint cannot serve; refuse a strategy that reads another part of
    the checkpoint, or another format, than the run says.
    """
    if each.skip:
        return each
    if each.cell.use == TO_DEVICE:
        try:
            check_machines([Demand.of(each.cell)], nodes)
        except HarnessError as error:
            why = error.message.removeprefix("--device cuda: ")
            return replace(each, skip=f"{TO_DEVICE}: {why}")
    if not each.selection:
        return each
    own = formats.detect(checkpoint) if checkpoint else None
    if own == "pt_legacy" and each.cell.format == "pt":  # only copies for other strategies have it
        each = plan_cell(replace(each.cell, format=own), each.strategy)
    if each.selection != selection or each.cell.format != own:
        options = " ".join(each.selection.options)
        raise ConfigError(
            f"strategy {each.cell.strategy} has the option {options}, for which it must read your own file, but this run would convert it",
            f"give the option to the whole run, and leave --format out: --checkpoint PATH {options}",
        )
    return each


def _check_names(kinds: str, named_places: list[tuple[str, str]]) -> None:
    places: dict[str, str] = {}
    for name, place in named_places:
        if places.setdefault(name, place) != place:
            why = f"two {kinds} are called {name!r}: {places[name]} and {place}"
            raise ConfigError(why, "rename one of the two, or measure them in two runs")


def _check_any_runs(planned: Sequence[Planned]) -> None:
    if all(one.skip for one in planned):
        reasons = "; ".join(dict.fromkeys(one.skip for one in planned))
        why = f"weighin skips every measurement of the run: {reasons}"
        repair = "choose a strategy with your format and device: weighin list strategies"
        raise ConfigError(why, repair)
