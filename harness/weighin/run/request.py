"""What ``weighin bench`` was asked for becomes a ``Run``; an interrupted one becomes it again."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from shlex import quote
from typing import Any

from weighin import formats as layouts
from weighin.errors import ConfigError, Interrupted, IsolationUnavailable, RecordError, StillRunning
from weighin.isolation import select
from weighin.probes import environment
from weighin.records import run_folder
from weighin.run import gpu_check, trust
from weighin.run.runner import Run
from weighin.suite import registry
from weighin.suite.config import Suite
from weighin.suite.matrix import CellMatrix, Planned, plan
from weighin.units import format_bytes, format_exact


@dataclass(frozen=True, slots=True)
class Request:
    """A matrix, and what of the command line is not a part of any suite."""

    suite: Suite
    kwargs: dict[str, Any] = field(default_factory=dict)
    checkpoint: Path | None = None
    seed: int = 0
    folder: Path | None = None
    base_image: str | None = None
    within: float | None = None
    """How closely floors are searched: the largest step, as a share of the floor. None: a bench."""

    @property
    def verb(self) -> str:
        return "bench" if self.within is None else "floor"


def start(request: Request) -> tuple[Run, str]:
    """Plan a new run and write its plan; returns it, and a note on how it is isolated.

    Raises:
        ConfigError, UnknownName, IsolationUnavailable, RecordError: nothing was started.
    """
    suite = request.suite
    models = tuple(registry.model(name, request.kwargs or None) for name in suite.models)
    strategies = registry.chosen(suite)
    _check_names("models", [(spec.title, spec.builder) for spec in models])
    _check_names("strategies", [(info.name, str(info.path)) for info, _ in strategies])
    formats = tuple(layouts.named(name).NAME for name in suite.format)
    _check_machine(suite.ram)
    _check_gpu(suite)
    limited = request.within is not None or any(limit is not None for limit in suite.ram)
    isolation, note = select.choose(suite.isolation, limited=limited, base_image=request.base_image)
    if suite.ram_high is not None:
        select.check_soft_limit(isolation)
    planned = plan(
        CellMatrix(
            models=models,
            strategies=strategies,
            ram_limits=tuple(suite.ram),
            vram_limits=tuple(suite.vram),
            isolation=isolation.name,
            device=suite.device,
            dtype=suite.dtype,
            cache=suite.cache,
            repeats=suite.repeats,
            passes=suite.passes,
            ram_high_bytes=suite.ram_high,
            formats=formats,
            operation=suite.operation,
        )
    )
    checkpoint = request.checkpoint.resolve() if request.checkpoint else None
    folder = request.folder or Path("results") / _name(request)
    _check_folder(folder, request.verb)
    settings = {
        "seed": request.seed,
        "checkpoint": str(checkpoint) if checkpoint else None,
        "timeout_s": suite.timeout_s,
        "steady": suite.steady,
        "trace": suite.trace,
        "base_image": request.base_image,
        "strategy_paths": {info.name: str(info.path) for info, _ in strategies},
    }
    if request.within is not None:
        settings["within"] = request.within
    run_folder.write_plan(folder, [one.cell for one in planned], settings)
    run = Run(
        folder=folder,
        planned=planned,
        isolation=isolation,
        seed=request.seed,
        checkpoint=checkpoint,
        timeout_s=suite.timeout_s,
        steady=suite.steady,
        trace=suite.trace,
        is_new=True,
    )
    return run, note


def resume(folder: Path, *, trusted: bool = False) -> Run:
    """Return a run that was planned before, to go on with the cells that have no record.

    Raises:
        RecordError: the folder is no run, or a search for floors.
        ConfigError: a strategy of its plan is gone, or its code is foreign and not ``trusted``.
    """
    run, settings = restore(folder, trusted=trusted)
    if "within" in settings:
        raise RecordError(
            f"{folder} is a search for floors",
            f"go on with it: weighin floor --resume {quote(str(folder))}",
        )
    return run


def restore(folder: Path, *, trusted: bool = False) -> tuple[Run, dict[str, Any]]:
    """Return a run that was planned before, and its settings; raises as ``resume`` does."""
    known = run_folder.read_plan(folder)
    if not known.cells:
        raise RecordError(f"{folder} plans no cell", "start a new run")
    settings = known.settings
    try:
        if not trusted:
            verb = "floor" if "within" in settings else "bench"
            trust.check(
                trust.foreign(known.cells, settings["strategy_paths"], settings["base_image"]),
                place=folder / run_folder.PLAN,
                again=f"weighin {verb} --resume {quote(str(folder))}",
            )
        infos = {
            name: registry.read_strategy(Path(path), known.cells[0].operation)
            for name, path in settings["strategy_paths"].items()
        }
        checkpoint = settings["checkpoint"]
        run = Run(
            folder=folder,
            planned=[Planned.of(cell, infos[cell.strategy]) for cell in known.cells],
            isolation=select.named(known.cells[0].isolation, settings["base_image"]),
            seed=settings["seed"],
            checkpoint=Path(checkpoint) if checkpoint else None,
            timeout_s=settings["timeout_s"],
            steady=settings["steady"],
            trace=settings.get("trace", False),  # plans of 0.1 lack it
        )
    except KeyError as error:
        raise RecordError(
            f"{folder / run_folder.PLAN} lacks the setting {error}",
            "start a new run: this one cannot be resumed",
        ) from None
    return run, settings


@contextmanager
def resumable(verb: str, task: Run) -> Iterator[None]:
    """Let a stop inside, and what keeps a run from going on, say how to go on with it."""
    again = f"weighin {verb} --resume {quote(str(task.folder))}"
    paths = {one.strategy.name: str(one.strategy.path) for one in task.planned}
    if trust.foreign([one.cell for one in task.planned], paths):
        again += " --trust"
    try:
        yield
    except Interrupted as stopped:
        raise Interrupted(stopped.message, f"go on with it: {again}") from None
    except (RecordError, IsolationUnavailable, StillRunning) as error:
        if (task.folder / run_folder.RECORDS).exists() and "--resume" not in error.repair:
            error.repair += f"; then go on: {again}"
        raise


def _check_names(kinds: str, found: list[tuple[str, str]]) -> None:
    places: dict[str, str] = {}
    for name, place in found:
        if places.setdefault(name, place) != place:
            raise ConfigError(
                f"two {kinds} are called {name!r}: {places[name]} and {place}",
                "a record tells them apart by their names: rename one, or measure them in two runs",
            )


def _check_machine(limits: list[int | None]) -> None:
    total = environment.total_ram_bytes()
    for limit in limits:
        if limit is not None and limit > total:
            raise ConfigError(
                f"--ram {format_exact(limit)} is more than this machine has ({format_bytes(total)})",
                "give a smaller limit, or leave --ram out to limit nothing",
            )


def _check_gpu(suite: Suite) -> None:
    """Refuse a GPU that is not there before a checkpoint is made for it."""
    if suite.device != "cpu":
        gpu_check.check(suite.device, suite.vram)
        return
    asked = [
        *(["--vram limits a GPU"] if any(limit is not None for limit in suite.vram) else []),
        *(["--trace notes what a GPU's allocator does"] if suite.trace else []),
    ]
    if asked:
        raise ConfigError(
            f"{asked[0]}, and the device is cpu", "add --device cuda, or leave it out"
        )


def _check_folder(folder: Path, verb: str) -> None:
    if (folder / run_folder.PLAN).exists() or (folder / run_folder.RECORDS).exists():
        raise RecordError(
            f"{folder} already holds a run",
            f"go on with it: weighin {verb} --resume {quote(str(folder))}; or name another folder with --out",
        )


def _name(request: Request) -> str:
    limits = [limit for limit in request.suite.ram if limit is not None]
    words = [datetime.now().astimezone().strftime("%Y%m%dT%H%M%S"), *request.suite.models]
    words += ["saving"] if request.suite.operation == "save" else []
    words += [format_exact(limit) for limit in limits] if request.within is None else ["floor"]
    return "-".join(words).replace(os.sep, "_").replace(":", "_")
