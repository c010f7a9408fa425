"""Runs a plan cell by cell: prepares what cells share, measures each one, records it at once."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from harness import environment, journal
from harness.cell import Cell, Job
from harness.checkpoint import cache, layouts
from harness.errors import ConfigError, HarnessError, Interrupted
from harness.isolation import Isolation
from harness.measuring import Setting, measure
from harness.plan import Planned
from harness.record import SCHEMA, Memory, Outcome, Result
from harness.units import format_bytes
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
    """One run to perform: cells, where their records go, and what they load."""

    folder: Path
    planned: Sequence[Planned]
    isolation: Isolation
    seed: int = 0
    checkpoint: Path | None = None
    timeout_s: float = 600.0
    steady: bool = False


def run(task: Run, progress: Progress) -> list[Result]:
    """Run every cell that has no record yet; returns the results of all, in the plan's order.

    Raises:
        HarnessError: what keeps cells from being run at all. What happens inside a cell is its
            outcome, and the run goes on.
    """
    task.isolation.check()
    with _only_run(), _stoppable():
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
    return list(journal.read(task.folder).results)


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
        if planned.skip:
            result = _skipped(planned, setting.environment)
        else:
            progress.starting(planned.cell)
            result = _measure(task, setting, planned, prepared)
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
    return measure(setting, _job(task, planned, prepared), files, checkpoint.model_bytes)


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
    with closing(task.isolation.start(unlimited)) as running:
        while (line := running.channel.receive(_PROBE_TIMEOUT_S)) is not None:
            event = decode_event(line) or {"event": ""}
            if event["event"] == "baseline":
                return Memory(**event["memory"])
            if event["event"] == "phase":
                running.channel.send(ACKNOWLEDGEMENT)
            if event["event"] == "failed":
                raise ConfigError(f"no cell can run: {event['message']}")
        chatter = running.channel.chatter.decode(errors="replace").strip().splitlines()
    raise HarnessError(
        f"a worker under {task.isolation.name} ends before it has imported torch"
        + (f": {chatter[-1]}" if chatter else ""),
        "weighin doctor says what works on this machine",
    )


def _check_limits(planned: Sequence[Planned], baseline: Memory) -> None:
    """Refuse limits that say nothing: below a bare import, or above the machine."""
    for limit in {one.cell.ram_limit_bytes for one in planned} - {None}:
        assert limit is not None
        if limit < baseline.rss_bytes:
            raise ConfigError(
                f"--ram {format_bytes(limit)} is less than a bare `import torch` holds here"
                f" ({format_bytes(baseline.rss_bytes)})",
                f"give at least {format_bytes(2 * baseline.rss_bytes)}, and room for the weights",
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
    return environment.machine() | {"isolation": isolation.describe()}


def _checkpoint_key(cell: Cell) -> tuple[str, str]:
    return cell.model.name, cell.format


@contextmanager
def _only_run() -> Iterator[None]:
    """Hold the lock of the one run that measures: two at once would measure each other."""
    lock = cache.folder() / "measuring.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(lock, blocking=False):
            yield
    except Timeout:
        raise HarnessError(
            f"another run is measuring on this machine (it holds {lock})",
            "wait until it has ended: two runs at once would measure each other",
        ) from None


@contextmanager
def _stoppable() -> Iterator[None]:
    """Turn Ctrl-C and SIGTERM into one ``Interrupted``; a second one cannot break the cleaning up."""

    def stop(*_: object) -> None:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_IGN)
        raise Interrupted("stopped; nothing is left running")

    before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
