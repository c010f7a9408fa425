"""Run a plan: prepare the shared resources, measure each cell, and record it at once."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from weighin import formats
from weighin.cell import Cell, Job
from weighin.checkpoint import cache
from weighin.checkpoint.entries import discard
from weighin.errors import CheckpointError, ConfigError, FormatLimit, HarnessError
from weighin.isolation import delegation
from weighin.isolation.base import Isolation, Running
from weighin.probes import environment
from weighin.probes.cgroup import limits_around
from weighin.protocol import ACKNOWLEDGEMENT, decode_event
from weighin.record import SCHEMA, Memory, Outcome, Result
from weighin.records import coverage, run_folder
from weighin.run import interrupts, model_fault, save_target
from weighin.run.bytecode import compile_code
from weighin.run.cell_runner import CellMeasurement, Setting, take
from weighin.run.events import checked
from weighin.run.run_lock import only_run
from weighin.run.settings import RunSettings
from weighin.suite import packages, user_code
from weighin.suite.matrix import Planned
from weighin.text import one_line
from weighin.units import format_bytes, format_exact

_PROBE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Progress:
    """Callbacks that report the progress of a run; each is called when its step begins or ends.

    ``nodes`` gets the current step of each node, by the node's name, when a step of a fleet begins.
    """

    preparing: Callable[[str, float | None], None] = lambda _text, _share: None
    building: Callable[[str], None] = lambda _: None
    starting: Callable[[Cell], None] = lambda _: None
    phase: Callable[[str], None] = lambda _: None
    narrowed: Callable[[str], None] = lambda _: None
    nodes: Callable[[Mapping[str, str]], None] = lambda _: None
    finished: Callable[[Result], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Run:
    """One run to perform: its cells, the folder for their records, and its settings.

    If a run that ``is_new`` fails before its first record, its folder is removed. ``patience_s`` is
    the longest time to wait for another run on this machine to end. If ``is_probed``, an earlier run
    with the same limits has tested a worker on this machine, and this run does not repeat the test.
    """

    folder: Path
    planned: Sequence[Planned]
    isolation: Isolation
    settings: RunSettings = field(default_factory=RunSettings)
    is_new: bool = False
    patience_s: float = 0
    is_probed: bool = False


Following = Callable[[Sequence[Result]], Planned | None]
"""A function that chooses the next cell from all results of the run so far; None ends the run."""


def run(task: Run, progress: Progress, following: Following | None = None) -> list[Result]:
    """Run every cell without a record in the plan's order, and return the results of all cells.

    If ``following`` is given, it chooses each cell, and the plan only determines which checkpoints
    are prepared.

    Raises:
        HarnessError: no cell can be run. A failure inside a cell becomes the cell's outcome
            instead, and the run continues.
    """
    with discarding(task):
        _run(task, progress, following)
    return list(run_folder.read(task.folder).results)


@contextmanager
def discarding(task: Run) -> Iterator[None]:
    """Remove the folder of a new run if an error in this block stops it before its first record."""
    try:
        yield
    except HarnessError:  # Interrupted too: without a record there is nothing to resume
        if task.is_new:
            run_folder.discard_unmeasured(task.folder)
        raise


def prepare(task: Run, progress: Progress) -> None:
    """Prepare this machine for the cells of a run, and test a worker, without measuring a cell.

    Raises:
        HarnessError: no cell can be run here.
    """
    task.isolation.check()
    with (
        interrupts.stoppable(),
        only_run(task.patience_s, lambda text: progress.preparing(text, None)),
    ):
        _remove_leftovers(task, progress)
        if any(not each.skip for each in task.planned):
            _set_up(task, task.planned, progress)


def _remove_leftovers(task: Run, progress: Progress) -> None:
    for line in [*task.isolation.remove_stale(), *save_target.remove_leftovers()]:
        progress.preparing(f"removed a leftover of a dead run: {line}", None)


def _run(task: Run, progress: Progress, following: Following | None) -> None:
    task.isolation.check()
    with (
        interrupts.stoppable(),  # first, so that a run can be stopped while it waits for the lock
        only_run(task.patience_s, lambda text: progress.preparing(text, None)),
    ):
        _remove_leftovers(task, progress)
        results = list(run_folder.read(task.folder).results)
        if following is None:
            todo = {cell.id for cell in coverage.pending([p.cell for p in task.planned], results)}
            needed = [planned for planned in task.planned if planned.cell.id in todo]
            cells = iter(needed)
        else:
            needed = list(task.planned)
            cells = _chosen(following, results)
        bench: _Bench | None = None
        for planned in cells:
            interrupts.check()
            if bench is None and any(not each.skip for each in needed):
                bench = _set_up(task, needed, progress)
            with run_folder.room(task.folder):
                if planned.skip or bench is None:
                    known_environment = bench.setting.environment if bench else {}
                    measured = CellMeasurement(skipped(planned, known_environment))
                else:
                    progress.starting(planned.cell)
                    measured = bench.measure(planned)
                with interrupts.put_off():
                    result = run_folder.append(task.folder, measured.result)
                    results.append(result)
                    progress.finished(result)
                    replace(measured, result=result).finish(task.folder)


def _chosen(following: Following, results: Sequence[Result]) -> Iterator[Planned]:
    while (planned := following(results)) is not None:
        yield planned


@dataclass(frozen=True, slots=True)
class _Bench:
    """The prepared resources that all cells of a run share."""

    task: Run
    setting: Setting
    prepared: dict[tuple[str, str], cache.Prepared]
    refused: dict[tuple[str, str], str]
    model_faults: dict[str, str | None] = field(default_factory=dict)

    def measure(self, planned: Planned) -> CellMeasurement:
        key = _checkpoint_key(self.task, planned.cell)
        if why := self.refused.get(key):
            return CellMeasurement(skipped(replace(planned, skip=why), self.setting.environment))
        checkpoint = self.prepared[key]
        job = _job(self.task, planned, self.prepared)
        files = formats.files(Path(job.checkpoint))
        model_bytes = checkpoint.manifest().model_bytes(planned.cell.dtype)
        if (
            checkpoint.in_place
            and (keys := checkpoint.manifest().keys)
            and not planned.strategy.maps_keys
        ):
            why = (
                f"needs {keys}, as from_pretrained does, and {planned.strategy.name} expects the model's own"
                " keys: give another --format, or write these keys: weighin convert FOLDER TARGET --keys model"
            )
            return CellMeasurement(skipped(replace(planned, skip=why), self.setting.environment))
        setting = _with_packages(self.setting, planned)
        if planned.cell.operation == "load":
            measured = take(setting, job, files, model_bytes)
            measured = replace(measured, result=self._blaming(measured.result, job))
        else:
            with save_target.target(model_bytes) as folder:
                measured = take(setting, replace(job, target=str(folder)), files, model_bytes)
                result = save_target.with_warnings(measured.result, folder)
            measured = replace(measured, result=result)
        return self._restored(measured, key) if measured.changed else measured

    def _restored(self, measured: CellMeasurement, key: tuple[str, str]) -> CellMeasurement:
        """Make a cached checkpoint again that changed in a cell; stop the run at a user's own."""
        checkpoint = self.prepared[key]
        if checkpoint.in_place:
            cell = measured.result.cell
            trouble = CheckpointError(
                f"{checkpoint.path} changed while {cell.strategy} was measured",
                "restore it from a copy, and do not let this strategy write to it",
            )
            return replace(measured, trouble=measured.trouble or trouble)
        discard(checkpoint.manifest_path.parent, checkpoint.format)
        self.prepared[key] = _ensure(self.task, measured.result.cell, key[1])
        return measured

    def _blaming(self, result: Result, job: Job) -> Result:
        """Return the result; ok if only the model's own forward pass fails, after any load."""
        if not model_fault.is_right_load(result):
            return result
        cell = result.cell
        key = f"{cell.model.title} {cell.dtype} {cell.device}"
        if key not in self.model_faults:
            checkpoint = self.task.settings.checkpoint or Path(job.checkpoint)
            self.model_faults[key] = model_fault.failure(
                job, checkpoint, self.task.settings.selection
            )
        how = self.model_faults[key]
        return model_fault.blamed(result, how) if how else result


def _set_up(task: Run, needed: Sequence[Planned], progress: Progress) -> _Bench:
    compile_code()
    if task.isolation.name == "cgroup":
        _check_limits_around(needed)
    prepared, refused = _prepare_checkpoints(task, needed, progress)
    needed = [each for each in needed if _checkpoint_key(task, each.cell) not in refused]
    progress.preparing(f"preparing {task.isolation.name}", None)
    task.isolation.prepare(progress.building)
    with run_folder.writing(samples := task.folder / "samples"):
        samples.mkdir(exist_ok=True)
    for line in _added_code(task, needed, prepared):
        progress.preparing(line, None)
    first = next(planned for planned in needed if not planned.skip)
    if not task.is_probed:
        progress.preparing("importing torch once, to measure the memory that an import needs", None)
        baseline = _probe(task, _job(task, first, prepared))
        _check_limits(needed, baseline)
    setting = Setting(
        isolation=task.isolation,
        run=task.folder,
        environment=_environment(task.isolation),
        steady=task.settings.steady,
        on_phase=progress.phase,
    )
    return _Bench(task, setting, prepared, refused)


def _prepare_checkpoints(
    task: Run, planned: Sequence[Planned], progress: Progress
) -> tuple[dict[tuple[str, str], cache.Prepared], dict[tuple[str, str], str]]:
    """Find or generate the checkpoint of every model in every format that some cell needs.

    Returns:
        the checkpoints, and the reasons why a model's checkpoint cannot be written in a format.

    Raises:
        FormatLimit: none of the checkpoints can be written.
    """
    prepared: dict[tuple[str, str], cache.Prepared] = {}
    refused: dict[tuple[str, str], FormatLimit] = {}
    for each in planned:
        key = _checkpoint_key(task, each.cell)
        if each.skip or key in prepared or key in refused:
            continue
        try:
            prepared[key] = _ensure(task, each.cell, key[1], progress.preparing)
        except FormatLimit as error:
            refused[key] = error
            continue
        for warning in prepared[key].warnings:
            progress.preparing(warning, None)
    if refused and not prepared:
        raise next(iter(refused.values()))
    return prepared, {key: error.message for key, error in refused.items()}


def _ensure(
    task: Run, cell: Cell, fmt: str, progress: cache.Report | None = None
) -> cache.Prepared:
    return cache.ensure(
        cell.model,
        fmt,
        seed=task.settings.seed,
        checkpoint=task.settings.checkpoint,
        selection=task.settings.selection,
        progress=progress,
        python_path=_python_path(task, cell),
    )


def _job(task: Run, planned: Planned, prepared: dict[tuple[str, str], cache.Prepared]) -> Job:
    checkpoint = prepared[_checkpoint_key(task, planned.cell)]
    selects = (
        planned.selection and task.settings.checkpoint
    )  # in the user's own file, not in a cached copy
    return Job(
        cell=planned.cell,
        checkpoint=str(task.settings.checkpoint if selects else checkpoint.path),
        manifest=str(checkpoint.manifest_path),
        strategy_path=str(planned.strategy.path),
        python_path=_python_path(task, planned.cell),
        mounts=task.settings.mounts,
        timeout_s=task.settings.timeout_s,
        trace=task.settings.trace,
    )


def _added_code(
    task: Run, needed: Sequence[Planned], prepared: dict[tuple[str, str], cache.Prepared]
) -> dict[str, None]:
    jobs = {
        planned.cell.model.builder: _job(task, planned, prepared)
        for planned in needed
        if not planned.skip
    }
    return dict.fromkeys(line for job in jobs.values() for line in task.isolation.added_code(job))


def _python_path(task: Run, cell: Cell) -> tuple[str, ...]:
    """Return the import path for a user's builder, which is empty for a builder of weighin.

    With an empty import path, no module of a user can hide a module of weighin.
    """
    return () if user_code.is_ours(cell.model.builder) else task.settings.python_path


def _probe(task: Run, job: Job) -> Memory:
    """Run a worker without a limit up to its baseline, and return its memory at the baseline.

    The probe also reads torch's libraries into the page cache, so that the first cell is not
    charged for them, and shows before the first record whether workers can run at all.
    """
    cell = replace(job.cell, ram_limit_bytes=None, cache="cold", operation="load", ranks=1)
    unlimited = replace(job, cell=cell)
    deadline = time.monotonic() + _PROBE_TIMEOUT_S
    with interrupts.put_off(), closing(task.isolation.start(unlimited)) as running:
        while line := _receive(running, deadline):
            event = checked(decode_event(line) or {"event": ""}) or {"event": ""}
            if event["event"] == "baseline":
                return Memory(**event["memory"])
            if event["event"] == "phase":
                running.channel.send(ACKNOWLEDGEMENT)
            if event["event"] == "failed":
                raise ConfigError(f"no cell can run: {event['message']}")
        stderr_lines = running.channel.stderr_tail.decode(errors="replace").strip().splitlines()
    raise HarnessError(
        f"a worker under {task.isolation.name} ended before it had imported torch"
        + (f": {one_line(stderr_lines[-1])}" if stderr_lines else ""),
        "weighin doctor says what works on this machine",
    )


def _receive(running: Running, deadline: float) -> bytes | None:
    try:
        with interrupts.allowed():
            return running.channel.receive(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        raise HarnessError(
            f"a worker did not import torch within {_PROBE_TIMEOUT_S:.0f} s",
            "stop other work on this machine, and try again",
        ) from None


def _check_limits(planned: Sequence[Planned], baseline: Memory) -> None:
    """Reject limits below ``baseline``, the memory of a worker that has only imported torch."""
    for limit, ranks in {(each.cell.ram_limit_bytes, each.cell.ranks) for each in planned}:
        # File-backed pages can be evicted.
        need = (baseline.anon_bytes + baseline.shmem_bytes) * ranks
        if limit is not None and limit < need:
            of_ranks = f" in {ranks} ranks" if ranks > 1 else ""
            raise ConfigError(
                f"--ram {format_exact(limit)} is less than `import torch` alone needs here{of_ranks}"
                f" ({format_bytes(need)})",
                f"give at least {format_bytes(2 * need)} plus the size of the weights",
            )


def _check_limits_around(planned: Sequence[Planned]) -> None:
    """Reject limits above that of a cgroup around the cells, because the kernel kills there first."""
    root = delegation.groups_root()
    limits = limits_around(root) if root else []
    asked = max((each.cell.ram_limit_bytes or 0 for each in planned), default=0)
    if limits and asked > limits[0][0]:
        raise ConfigError(
            f"--ram {format_exact(asked)} is more than the limit of the cgroup around the cells,"
            f" {limits[0][1]} ({format_bytes(limits[0][0])})",
            "give less, or raise that limit, for example the memory limit of the container",
        )


def skipped(planned: Planned, known_environment: dict[str, Any]) -> Result:
    """Return the result of a cell that is not run, with the reason."""
    return Result(
        schema=SCHEMA,
        cell=planned.cell,
        outcome=Outcome.SKIPPED,
        message=planned.skip,
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        environment=known_environment,
    )


def _with_packages(setting: Setting, planned: Planned) -> Setting:
    """Add the versions of a strategy's packages, which are the same in a container as here."""
    if not planned.strategy.packages:
        return setting
    found = {"packages": packages.versions(planned.strategy.packages)}
    return replace(setting, environment=setting.environment | found)


def _environment(isolation: Isolation) -> dict[str, Any]:
    return environment.machine() | environment.code() | {"isolation": isolation.describe()}


def _checkpoint_key(task: Run, cell: Cell) -> tuple[str, str]:
    """Return the title and format of the checkpoint that a cell reads.

    A save builds its model from ``task.settings.checkpoint`` in that checkpoint's own format, or without a
    ``task.settings.checkpoint`` from a generated pt checkpoint.
    """
    if cell.operation == "load":
        return cell.model.title, cell.format
    return cell.model.title, formats.detect(
        task.settings.checkpoint
    ).NAME if task.settings.checkpoint else "pt"
