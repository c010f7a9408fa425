"""Turn a request of ``weighin bench`` into a ``Run``, or restore a ``Run`` from its folder."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from weighin import formats
from weighin.cell import ModelSpec
from weighin.errors import ConfigError, IsolationUnavailable, RecordError
from weighin.formats import quantised
from weighin.formats.adapters import adapter_of
from weighin.formats.pretrained_choice import AS_SAVED, FolderChoice
from weighin.formats.pretrained_folder import code_of
from weighin.formats.pretrained_library import library_of
from weighin.formats.selection import Selection
from weighin.isolation import preload, select
from weighin.records import run_folder
from weighin.records.coverage import resume_command
from weighin.run import command_request, trust
from weighin.run.machines import THIS_MACHINE, Machines
from weighin.run.settings import RunSettings
from weighin.run.task import Run, new_folder, write_plan
from weighin.suite import chosen_models, packages, registry, uses
from weighin.suite.config import Suite
from weighin.suite.matrix import Planned, plan
from weighin.uses import TO_DEVICE


@dataclass(frozen=True, slots=True)
class Request:
    """A suite (settings in a YAML file), and the command-line options that a suite cannot have.

    Attributes:
        settings: the command line's settings; ``start`` adds those of the suite and the models.
        kwargs: further arguments for every model's builder (the function that returns the model).
        folder: the folder of the new run; None for ``results/TIME-MODELS-LIMITS``.
        choice: which weights and which class to load from a Hugging Face folder.
    """

    suite: Suite
    settings: RunSettings = field(default_factory=RunSettings)
    kwargs: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None
    choice: FolderChoice = AS_SAVED


def start(request: Request, machines: Machines = THIS_MACHINE) -> tuple[Run, str]:
    """Plan a new run, write its plan, and return the run, and notes on models and isolation.

    ``machines`` is the machine or machines that will measure.

    Raises:
        ConfigError, UnknownName, IsolationUnavailable, RecordError: the run cannot start.
    """
    suite, settings = request.suite, request.settings
    chosen = chosen_models.choose(
        suite,
        kwargs=request.kwargs,
        checkpoint=settings.checkpoint,
        selection=settings.selection,
        choice=request.choice,
    )
    models = chosen.specs
    checkpoint = chosen.checkpoint.absolute() if chosen.checkpoint else None
    strategies = registry.chosen(suite, chosen.own_format)
    _check_names("models", [(spec.title, spec.builder) for spec in models])
    _check_names("strategies", [(info.name, str(info.path)) for info, _ in strategies])
    use_paths = uses.chosen(suite.uses)
    for name in suite.format:
        formats.known(name)  # raises for an unknown format before the isolation is tested
    machines.check_ram(suite.ram)
    _check_gpu(suite, machines)
    limited = settings.within is not None or any(limit is not None for limit in suite.ram)
    isolation, note = machines.choose(
        suite.isolation,
        limited=limited,
        base_image=settings.base_image,
        packages=_installed([info for info, _ in strategies], models, chosen.own_formats.values()),
    )
    note = "; ".join(filter(None, (note, *chosen.notes)))
    if suite.ram_high is not None:
        machines.check_soft_limit(isolation)
    planned = plan(
        suite,
        models,
        strategies,
        isolation.name,
        dtypes=chosen.dtypes,
        own_formats=chosen.own_formats,
    )
    planned = _without_gpu_uses(planned, machines)
    preload.check(suite.environment)
    _check_any_runs(planned)
    _check_own_selections(planned, chosen.selection, formats.loaded_as(checkpoint))
    planned = _without_refused(planned, checkpoint)
    folders = [Path(code["folder"]) for model in models if (code := code_of(model))]
    adapters = [adapter for model in models if (adapter := adapter_of(model))]
    mounts = (*map(Path, settings.mounts), *folders, *adapters)
    for path in mounts:
        if not path.exists():
            raise ConfigError(f"--mount {path}: there is no such file or folder")
    settings = replace(
        settings,
        checkpoint=checkpoint,
        checkpoints={title: str(path.absolute()) for title, path in chosen.checkpoints.items()},
        selection=chosen.selection,
        timeout_s=suite.timeout_s,
        steady=suite.steady,
        trace=suite.trace,
        strategy_paths={info.name: str(info.path) for info, _ in strategies},
        use_paths={name: path for name, path in use_paths.items() if path},
        python_path=tuple(chosen.python_path),
        mounts=tuple(str(path.absolute()) for path in mounts),
        storage=settings.storage.expanduser().absolute() if settings.storage else None,
    )
    labels = [replace(model, kwargs={}).title for model in models]
    labels += ["saving"] if suite.operation == "save" else []
    folder = new_folder(labels, suite.ram, is_search=settings.within is not None)
    return write_plan(request.folder or folder, planned, isolation, settings), note


def resume(folder: Path, *, trusted: bool = False) -> Run:
    """Restore a run of ``weighin bench`` or ``weighin run``, to measure its cells without a record.

    Raises:
        RecordError: the folder has no run that can be resumed, or a search of ``weighin floor``.
        ConfigError: a strategy's file is missing, every cell is skipped, or ``trusted`` is False
            and the plan names code that is neither weighin's nor installed.
    """
    run = restore(folder, trusted=trusted)
    if run.settings.within is not None:
        raise RecordError(
            f"{folder} contains a search for floors (weighin floor)",
            f"to resume the search: {resume_command('floor', folder)}",
        )
    return run


def restore(folder: Path, *, trusted: bool = False) -> Run:
    """Restore any run, also a search of ``weighin floor``, from its plan; see ``resume`` for errors."""
    found = run_folder.read_plan(folder)
    if not found.cells:
        raise RecordError(f"the run in {folder} plans no measurement", "start a new run")
    settings = RunSettings.from_json(found.settings)
    if settings.command:
        return command_request.restore(folder, found.cells, settings, trusted=trusted)
    if not trusted:
        trust.check(
            trust.foreign(found.cells, settings),
            place=folder / run_folder.PLAN,
            again=resume_command(settings.verb, folder),
        )
    infos = {
        name: registry.read_strategy(Path(path), found.cells[0].operation)
        for name, path in settings.strategy_paths.items()
    }
    try:
        cells: Sequence[Planned] = [Planned.of(cell, infos[cell.strategy]) for cell in found.cells]
    except KeyError as error:
        raise RecordError(
            f"{folder / run_folder.PLAN} lacks the path of the strategy {error}",
            "start a new run, because this run cannot be resumed without the path",
        ) from None
    _check_any_runs(cells)
    if settings.shard:
        cells = settings.shard.of(cells)
    isolation = select.named(
        found.cells[0].isolation,
        settings.base_image,
        _installed(
            infos.values(),
            [each.cell.model for each in cells],
            {each.cell.format for each in cells},
        ),
    )
    return Run(folder, cells, isolation, settings)


def _installed(
    infos: Iterable[registry.StrategyInfo], models: Sequence[ModelSpec], checkpoints: Iterable[str]
) -> tuple[str, ...]:
    """Return, sorted, the installed packages that these strategies, models and checkpoints need.

    ``checkpoints`` has the format of each checkpoint.
    """
    needed = [name for info in infos for name in info.packages]
    needed += [library.name for model in models if (library := library_of(model.builder))]
    found = [quantised.of_model(model) for model in models]
    needed += [name for one in found if one for name in one.packages]
    needed += [name for fmt in checkpoints for name in packages.OF_FORMAT.get(fmt, ())]
    return tuple(sorted(packages.versions(needed)))


def _check_own_selections(planned: list[Planned], selection: Selection, own: str | None) -> None:
    """Raise ConfigError if a strategy's own --key or --strip-prefix differs from the run's, or if
    the strategy reads another format than the user's checkpoint has.
    """
    for each in planned:
        if each.skip or not each.selection:
            continue
        options, asked = " ".join(each.selection.options), " ".join(selection.options)
        if each.selection != selection:
            raise ConfigError(
                f"strategy {each.cell.strategy} has the options {options}, but the run has"
                f" {asked or 'neither --key nor --strip-prefix'}",
                f"add --checkpoint PATH {options}, or change the strategy's options",
            )
        if each.cell.format != own:
            raise ConfigError(
                f"{each.cell.strategy} with the option {options} reads your checkpoint itself, whose"
                f" format is {own}, not {each.cell.format}",
                "leave --format out, or leave the strategy out",
            )


def _without_refused(planned: list[Planned], checkpoint: Path | None) -> list[Planned]:
    """Skip the cells of strategies whose torch.load(weights_only=True) refuses the user's checkpoint.

    Raises:
        ConfigError: every cell is skipped.
    """
    reads = [each.strategy.weights_only and bool(each.selection) for each in planned]
    if checkpoint is None or not any(reads):
        return planned
    selection = next(each.selection for each in planned if each.selection)
    refused = formats.read(checkpoint, selection)[1].refused
    skip = f"torch.load(weights_only=True) refuses {refused} in {checkpoint.name}; weights_only=False runs code from the file"  # fmt: skip
    planned = [
        replace(each, skip=each.skip or f"{each.strategy.name}: {skip}")
        if own and refused
        else each
        for own, each in zip(reads, planned, strict=True)
    ]
    _check_any_runs(planned)
    return planned


def _without_gpu_uses(planned: list[Planned], machines: Machines) -> list[Planned]:
    """Skip the cells that move a model to a GPU, if no machine has a GPU."""
    if not any(each.cell.use == TO_DEVICE and not each.skip for each in planned):
        return planned
    try:
        machines.check_gpu("cuda", ())
    except (ConfigError, IsolationUnavailable) as error:
        skip = f"{TO_DEVICE}: {error.message.removeprefix('--device cuda: ')}"
        return [replace(e, skip=e.skip or skip) if e.cell.use == TO_DEVICE else e for e in planned]
    return planned


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
    """Raise ConfigError if every cell is skipped, because the run would measure nothing."""
    if all(one.skip for one in planned):
        reasons = "; ".join(dict.fromkeys(one.skip for one in planned))
        raise ConfigError(
            f"weighin skips every measurement of the run: {reasons}",
            "choose another strategy, format or device: weighin list strategies shows the formats"
            " and devices of each strategy",
        )


def _check_gpu(suite: Suite, machines: Machines) -> None:
    """Raise an error if the GPU is missing, or if a GPU option is combined with the device cpu."""
    if suite.device != "cpu":
        machines.check_gpu(suite.device, suite.vram)
        return
    option = "--trace records the events of the CUDA allocator" if suite.trace else ""
    if any(limit is not None for limit in suite.vram):
        option = "--vram limits GPU memory"
    if option:
        raise ConfigError(
            f"{option}, but the device is cpu",
            "add --device cuda, or leave the option out",
        )
