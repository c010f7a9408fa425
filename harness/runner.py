"""Runs a plan cell by cell: prepares what cells share, measures each one, records it at once."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from harness import environment, journal, stopping
from harness.cell import Cell, Job
from harness.checkpoint import cache, layouts
from harness.errors import ConfigError, HarnessError, Interrupted
from harness.isolation import Isolation, Running
from harness.measuring import Setting, measure
from harness.plan import Planned
from harness.record import SCHEMA, Memory, Outcome, Result
from harness.text import one_line
from harness.units import format_bytes, format_exact
from harness.worker.protocol import ACKNOWLEDGEMENT, decode_event

_PROBE_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Progress:
    """What the run tells while it works; each field is called with what happens next."""

    preparing: Callable[[str, float | None], None] = lambda _text, _share: None
    starting: Callable[[Cell], None] = lambda _: None
    phase: Callable[[str], None] = lambda _: None
    finished: Callable[[Result], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Run:
    """One run to perform: cells, where their records go, and what they load.

    A run that ``is_new`` leaves no folder where it fails before its first record.
    """

    folder: Path
    planned: Sequence[Planned]
    isolation: Isolation
    seed: int = 0
    checkpoint: Path | None = None
    timeout_s: float = 600.0
    steady: bool = False
    is_new: bool = False


def run(task: Run, progress: Progress) -> list[Result]:
    """Run every cell that has no record yet; returns the results of all, in the plan's order.

    Raises:
        HarnessError: what keeps cells from being run at all. What happens inside a cell is its
            outcome, and the run goes on.
    """
    try:
        _run(task, progress)
    except Interrupted:
        raise  # it can be resumed, even before its first cell
    except HarnessError:
        if task.is_new:
            journal.discard_unmeasured(task.folder)
        raise
    return list(journal.read(task.folder).results)


def _run(task: Run, progress: Progress) -> None:
    task.isolation.check()
    with _only_run(), stopping.stoppable():
        for line in task.isolation.remove_stale():
            progress.preparing(f"removed what a dead run left: {line}", None)
        done = journal.read(task.folder).results
        todo = {cell.id for cell in journal.pending([p.cell for p in task.planned], done)}
        remaining = [planned for planned in task.planned if planned.cell.id in todo]
        if any(not planned.skip for planned in remaining):
            _run_remaining(task, remaining, progress)
        else:
            for planned in remaining:
                journal.append(task.folder, _skipped(planned, {}))


def _run_remaining(task: Run, remaining: list[Planned], progress: Progress) -> None:
    prepared = _prepare_checkpoints(task, remaining, progress)
    progress.preparing(f"preparing {task.isolation.name}", None)
    task.isolation.prepare()
    (task.folder / "samples").mkdir(exist_ok=True)
    first = next(planned for planned in remaining if not planned.skip)
    progress.preparing("importing torch once, to know what an import needs", None)
    baseline = _probe(task, _job(task, first, prepared))
    _check_limits(remaining, baseline)
    setting = Setting(
        isolation=task.isolation,
        run=task.folder,
        environment=_environment(task.isolation),
        steady=task.steady,
        on_phase=progress.phase,
    )
    for planned in remaining:
        stopping.check()
        if planned.skip:
            result = _skipped(planned, setting.environment)
        else:
            progress.starting(planned.cell)
            result = _measure(task, setting, planned, prepared)
        with stopping.put_off():
            journal.append(task.folder, result)
        progress.finished(result)


def _measure(
    task: Run,
    setting: Setting,
    planned: Planned,
    prepared: dict[tuple[str, str], cache.Prepared],
) -> Result:
    checkpoint = prepared[_checkpoint_key(planned.cell)]
    files = layouts.files(checkpoint.path)
    model_bytes = checkpoint.manifest().model_bytes(planned.cell.dtype)
    return measure(setting, _job(task, planned, prepared), files, model_bytes)


def _prepare_checkpoints(
    task: Run, planned: Sequence[Planned], progress: Progress
) -> dict[tuple[str, str], cache.Prepared]:
    """Make or find the checkpoint of every model in every format that some cell needs."""
    prepared: dict[tuple[str, str], cache.Prepared] = {}
    for one in planned:
        key = _checkpoint_key(one.cell)
        if not one.skip and key not in prepared:
            prepared[key] = cache.ensure(
                one.cell.model,
                one.cell.format,
                seed=task.seed,
                checkpoint=task.checkpoint,
                progress=progress.preparing,
                python_path=_python_path(one.cell),
            )
            for warning in prepared[key].warnings:
                progress.preparing(warning, None)
    return prepared


def _job(task: Run, planned: Planned, prepared: dict[tuple[str, str], cache.Prepared]) -> Job:
    checkpoint = prepared[_checkpoint_key(planned.cell)]
    return Job(
        cell=planned.cell,
        checkpoint=str(checkpoint.path),
        manifest=str(checkpoint.manifest_path),
        strategy_path=str(planned.strategy.path),
        python_path=_python_path(planned.cell),
        timeout_s=task.timeout_s,
    )


def _python_path(cell: Cell) -> tuple[str, ...]:
    """Return where a user's own builder is imported from: the folder that the run started in."""
    return () if cell.model.builder.startswith("harness.models.") else (str(Path.cwd()),)


def _probe(task: Run, job: Job) -> Memory:
    """Run a worker as far as its baseline, without a limit; returns what it holds there.

    It also reads torch's libraries into the page cache, which would else be charged to the first
    cell, and finds out whether workers run at all before any cell is recorded.
    """
    unlimited = replace(job, cell=replace(job.cell, ram_limit_bytes=None, cache="cold"))
    deadline = time.monotonic() + _PROBE_TIMEOUT_S
    with stopping.put_off(), closing(task.isolation.start(unlimited)) as running:
        while line := _receive(running, deadline):
            event = decode_event(line) or {"event": ""}
            if event["event"] == "baseline":
                return Memory(**event["memory"])
            if event["event"] == "phase":
                running.channel.send(ACKNOWLEDGEMENT)
            if event["event"] == "failed":
                raise ConfigError(f"no cell can run: {event['message']}")
        said = running.channel.chatter.decode(errors="replace").strip().splitlines()
    raise HarnessError(
        f"a worker under {task.isolation.name} ends before it has imported torch"
        + (f": {one_line(said[-1])}" if said else ""),
        "weighin doctor says what works on this machine",
    )


def _receive(running: Running, deadline: float) -> bytes | None:
    try:
        with stopping.allowed():
            return running.channel.receive(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        raise HarnessError(
            f"a worker has not imported torch within {_PROBE_TIMEOUT_S:.0f} s",
            "free the machine of other work, and try again",
        ) from None


def _check_limits(planned: Sequence[Planned], baseline: Memory) -> None:
    """Refuse limits that say nothing: below a bare import, or above the machine."""
    for limit in {one.cell.ram_limit_bytes for one in planned} - {None}:
        assert limit is not None
        need = baseline.anon_bytes + baseline.shmem_bytes  # files can be read again: they need none
        if limit < need:
            raise ConfigError(
                f"--ram {format_exact(limit)} is less than `import torch` alone takes here"
                f" ({format_bytes(need)})",
                f"give at least {format_bytes(2 * need)}, and room for the weights",
            )


def _skipped(planned: Planned, found: dict[str, Any]) -> Result:
    return Result(
        schema=SCHEMA,
        cell=planned.cell,
        outcome=Outcome.SKIPPED,
        message=planned.skip,
        started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        environment=found,
    )


def _environment(isolation: Isolation) -> dict[str, Any]:
    return environment.machine() | environment.code() | {"isolation": isolation.describe()}


def _checkpoint_key(cell: Cell) -> tuple[str, str]:
    return cell.model.name, cell.format


@contextmanager
def _only_run() -> Iterator[None]:
    """Hold the lock of the one run that measures: two at once would measure each other."""
    path = cache.folder() / "measuring.lock"
    lock = FileLock(path, blocking=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise HarnessError(
            f"another run is measuring on this machine (it holds {path})",
            "wait until it has ended: two runs at once would measure each other",
        ) from None
    except OSError as error:
        raise ConfigError(
            f"cannot write to the cache {cache.folder()}: {error.strerror}",
            "choose another folder: WEIGHIN_CACHE=/path weighin ...",
        ) from None
    try:
        yield
    finally:
        lock.release()
