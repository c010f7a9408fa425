"""Measure one cell: drop its files from the page cache, start it, watch it, and build its result."""

import math
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weighin.cell import Cell
from weighin.checkpoint import staging
from weighin.child_process import signal_each
from weighin.errors import HarnessError
from weighin.files import no_link
from weighin.isolation.base import Exit, Isolation, Running
from weighin.probes import kernel_log, page_cache
from weighin.probes.cgroup import (
    Cgroup,
    Counters,
    grown,
    limits_around,
    memory_cgroup_of,
    pressure_file_of,
    read_machine_oom_kills,
)
from weighin.probes.gpu_memory import DriverMemory, NvmlUnavailable, with_cuda
from weighin.probes.process_table import command_of
from weighin.probes.sampler import Sampler, write_samples
from weighin.records import run_folder, verdict
from weighin.records.metrics import largest
from weighin.result import SCHEMA, Cost, Kill, Outcome, Pressure, Process, Result, Sample, Stopped
from weighin.run import interrupts
from weighin.run.judge import Evidence, contradiction, is_beyond, judge, lost, void
from weighin.run.listener import Begin, End, Ended, Listener, Message, Reported, Told
from weighin.run.output import Readiness
from weighin.settings.definition import Settings
from weighin.text import one_line
from weighin.units import format_bytes

if TYPE_CHECKING:
    from weighin.probes.stacks import StackTaker
    from weighin.run.commands import CommandSpec
    from weighin.run.loads import LoadSpec
    from weighin.slow_disk import Mount

PREFIX: Final = "weighin-run-"  # of the folder for the socket to which the processes report
_PATIENCE_S: Final = 10.0  # from SIGKILL to the end of a process
_PAUSE_S: Final = 0.01  # while a server, or the end of what outlives a command, is awaited
_RANKS_END_S: Final = 0.5  # for other ranks to fail after one, so that the first cause is known
_TEST_S: Final = 0.5  # between two tests whether the cell thrashes
_TEST_SHARE: Final = 10  # and at least so many times a test, which is slow in a thrashing container
_COMMAND_LENGTH: Final = 120
_AFTER_KILL_S: Final = 1.0  # from the kill of a process of a server, which will not be ready


class Spec:
    """One cell to measure: a ``LoadSpec`` or a ``CommandSpec``. Its ``files`` are dropped from the page cache
    first; ``on_phase`` gets the name of each phase of a load that begins.
    """

    named = "the checkpoint"  # the ``files`` in words
    disk: "Mount | None" = None  # slow, from which a load reads
    readiness: Readiness | None = None  # of a command that is a server

    def __init__(
        self,
        cell: Cell,
        settings: Settings | None = None,
        files: Sequence[Path] = (),
        on_phase: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.cell, self.settings, self.files = cell, settings or Settings(), files
        self.on_phase = on_phase
        self.facts: dict[str, Any] = {}  # about the cell's environment, for the record
        self.is_load = cell.operation != "command"  # or a save, or a test's body: in a worker

    def before_load(self) -> None:
        """Do what is to be done when the worker waits for the begin of its load."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A cell's result; ``finish`` writes the samples after its record, and then raises ``trouble``."""

    result: Result
    samples: Sequence[Sample] = ()
    rank_samples: Mapping[int, Sequence[Sample]] = field(default_factory=dict)  # by number
    trouble: HarnessError | None = None

    def finish(self, run: Path) -> None:
        files = {self.result.samples_path: self.samples}
        for number, rank in enumerate(self.result.ranks):
            files[rank.samples_path] = self.rank_samples.get(number, ())
        for path, samples in ((run / name, files[name]) for name in files if name):
            with run_folder.writing(path, "; the record of its cell is kept"):
                no_link(path.parent, run)
                path.unlink(missing_ok=True)
                try:
                    write_samples(path, samples)
                except OSError:
                    path.unlink(missing_ok=True)
                    raise
        if self.trouble:
            raise self.trouble


def measure(
    isolation: Isolation,
    spec: "LoadSpec | CommandSpec",
    environment: Mapping[str, Any] | None = None,
    reference: verdict.Reference | None = None,
) -> Measured:
    """Run one cell to its end, or until it thrashes in comparison with ``reference``, without a limit."""
    started_at, start_ns = datetime.now(UTC).isoformat(timespec="milliseconds"), time.monotonic_ns()
    cached_bytes = page_cache.drop(spec.files) if spec.files else None
    warnings = []
    if spec.files and cached_bytes is None:
        warnings.append(
            f"weighin cannot tell whether {spec.named} left the page cache: Linux"
            " reports cached pages only to a user who owns the files or may write them"
        )
    elif cached_bytes:
        left = format_bytes(cached_bytes)
        warnings.append(f"{left} of {spec.named} could not be dropped from the page cache")
    with staging.own_folder(Path(tempfile.gettempdir()), PREFIX) as folder, ExitStack() as opened:
        spec.enter(opened)
        watch = Watch(spec, Listener(folder, spec.cell.ranks), reference)
        opened.callback(watch.abandon)
        trouble: HarnessError | None = None
        with interrupts.put_off(), ExitStack() as failing:
            running = spec.start(isolation, folder)
            failing.callback(running.close)
            failing.callback(watch.release)
            try:
                watch.begin(running)
                watch.wait()
                watch.end()
            finally:
                watch.close()
            failing.pop_all()
            watch.release()
            try:
                running.close()
            except HarnessError as error:  # the result is still recorded
                trouble = error
        warnings = spec.finish(watch.seen) + warnings
        result = result_of(
            spec,
            watch,
            time.monotonic_ns() - start_ns,
            warnings,
            started_at=started_at,
            cached_bytes_at_start=cached_bytes,
            environment={**(environment or {}), **spec.facts, **watch.ranks[0].told.environment},
        )
    return Measured(result, watch.samples, watch.rank_samples, trouble)


def result_of(
    spec: "LoadSpec | CommandSpec",
    watch: "Watch",
    wall_ns: int,
    warnings: Sequence[str] = (),
    **known: Any,
) -> Result:
    """Return the record of a cell that has ended; ``known`` are further fields of it."""
    seen = watch.evidence()
    judged, message = judge(seen)
    figures, outcome, doubts = spec.figures(watch, judged), judged, list[str]()
    if outcome is Outcome.OK:
        doubts, message = [message] * bool(message), ""
        spent_ns = max(figures["ready_ns"] or 0, figures["load_ns"] or 0)
        base, peaks = figures.get("baseline"), figures["peaks"]
        if why := contradiction(spec.cell, peaks, base, spent_ns, wall_ns):
            outcome, message = void(outcome, "", Outcome.MEASUREMENT_FAILED, why)
    if outcome is Outcome.THRASHING:  # it was killed, so its times are no results
        figures |= {"load_ns": None, "ready_ns": None}
        figures["cost"]["load_ns"] = None
    unseen = [watch.running.unseen] if watch.running.unseen else []
    before, totals = watch.at_baseline, watch.at_ready or watch.at_end
    some, full = grown(before.some_ns, totals.some_ns), grown(before.full_ns, totals.full_ns)
    notes = [text for each in (*watch.ranks, *watch.others) for text in each.told.notes]
    if seen.ended.still_runs:
        notes.append(
            "the measured process was still running when this was recorded: SIGKILL did not end it"
        )
    if seen.oom_kills and judged not in (Outcome.OOM_KILLED, Outcome.CHILD_KILLED):
        notes.append(lost(seen.oom_kills))
    return Result(
        schema=SCHEMA,
        cell=spec.cell,
        outcome=outcome,
        message=message,
        oom_kills=seen.oom_kills,
        pressure=None if some is full is None else Pressure(some, full),
        limit_events=watch.at_end.limit_events,
        exit_code=seen.ended.shell_code,
        cost=Cost(wall_ns=wall_ns, **figures.pop("cost")),
        warnings=(*dict.fromkeys([*unseen, *notes]), *figures.pop("warnings"), *doubts, *warnings),
        samples_path=run_folder.samples_path(spec.cell) if watch.samples else None,
        stopped=None if judged is Outcome.OOM_KILLED else seen.stopped,
        **known,
        **figures,
    )


class Watch:
    """Watches one cell from outside: its messages, its memory, its cgroup, and its end. Call ``begin``,
    ``wait``, ``end``, ``close`` and ``evidence`` in this order.
    """

    def __init__(
        self, spec: Spec, listener: Listener, reference: verdict.Reference | None = None
    ) -> None:
        self.listener, self.ranks = listener, listener.ranks  # of a command, the main process
        self.seen = Evidence(spec.cell, ranks=listener.ranks)
        self.samples: list[Sample] = []  # of several ranks, of all together
        self.rank_samples: dict[int, list[Sample]] = {}
        self.sampler: Sampler | None = None
        self.stacks: StackTaker | None = None
        self.cgroup: Cgroup | None = None
        # The cgroup's highest charge from the baseline until the model is ready; of a command, until a
        # server is ready, or the end. What it is after weighin has killed the cell does not count.
        self.peak_bytes: int | None = None
        self.at_end = Counters()  # of the cell, or when a server was ready
        zero = None if spec.is_load else 0  # a command's figures count from its start on
        self.at_baseline = Counters(refaults=zero, some_ns=zero, full_ns=zero)
        self.at_ready: Counters | None = None  # when all ranks had read every byte
        self.started_s = time.time()
        self.processes: tuple[Process, ...] = ()  # after ``evidence``
        self.ended_rest: tuple[str, ...] = ()  # by ``end_rest``
        self.all_ended = False
        self._spec, self._reference = spec, reference if spec.cell.ram_limit_bytes else None
        self._test_s = time.monotonic() + _TEST_S if self._reference else math.inf
        self._log = kernel_log.position()
        self._machine_oom_kills = read_machine_oom_kills()
        self._is_frozen = False  # since a server is ready, or weighin has killed the cell
        self._driver: DriverMemory | None = None
        self._reading = threading.RLock()  # of the mark, which this thread and the listener's reset
        self.started_ns = self.ended_ns = time.monotonic_ns()

    # Before and while the cell runs ---------------------------------------------------------------

    def begin(self, running: Running) -> None:
        self.running, self.cgroup = running, cgroup_of(running)
        self._home = memory_cgroup_of(running.pid) if running.pid and not running.cgroup else None
        if running.cgroup:
            self.seen.limits = limits_around(running.cgroup.parent)
        if self._spec.settings.stacks:
            from weighin.probes.stacks import StackTaker  # needs py-spy, and takes time to import

            self.stacks = StackTaker(running.members, running.cgroup)
        if len(self.ranks) == 1:
            self._start_sampling()
        for each in self.ranks:
            each.before = self._counters()
        self.listener.watch(self._take, self._counters)
        if self._spec.readiness:
            self._spec.readiness.begin(self._freeze)

    def _start_sampling(self) -> None:
        if pid := self.running.pid:
            loading = [each.pid or pid for each in self.ranks] if self._spec.is_load else []
            look = self.stacks.look if self.stacks else None
            members = self.running.members
            self.sampler = Sampler(pid, members, self.cgroup, loading=loading, at_sample=look)
            self.sampler.start()

    def wait(self) -> None:
        """Return when the cell has ended, or a server is ready; kill it at its time-out, or if it thrashes."""
        spec, seen, timeout_s = self._spec, self.seen, self._spec.settings.timeout_s
        deadline = time.monotonic() + (timeout_s or math.inf)
        pause_s = _PAUSE_S if spec.readiness else 0.2  # between two looks at a cell that runs
        ends_s = math.inf  # when the rest is killed, of which nothing is expected any more
        while True:
            due_s = min(deadline, ends_s, self._test_s)
            with interrupts.allowed():
                has_ended = self.running.wait(max(0.0, min(pause_s, due_s - time.monotonic())))
            if self.listener.error:
                raise self.listener.error
            if has_ended or self.server_ready_ns:
                break
            now_s = time.monotonic()
            if self._reference and now_s >= self._test_s:
                seen.stopped = self._thrashes(self._reference)
            if not seen.stopped and now_s >= deadline:
                seen.stopped = Stopped(time.monotonic_ns() - self.started_ns, timeout_s)
            if seen.stopped or now_s >= ends_s:
                self.running.kill()
                self.release()
                self._freeze()
                if one := self.sampler or self.cgroup:
                    one.raise_limit()  # so that a process that thrashes can exit
                break
            if seen.failed_ranks or all(each.is_done for each in self.ranks):
                ends_s = min(ends_s, now_s + (_RANKS_END_S if seen.failed_ranks else _PATIENCE_S))
            if spec.readiness and self.sampler and self.sampler.oom_kills:
                deadline = min(deadline, now_s + _AFTER_KILL_S) if ends_s == math.inf else deadline
                ends_s = deadline
        self.ended_ns = self.server_ready_ns or time.monotonic_ns()

    def _thrashes(self, reference: verdict.Reference) -> Stopped | None:
        start_s, before = time.monotonic(), self.at_baseline
        now, limit_bytes = self._counters(), self._spec.cell.ram_limit_bytes or 0
        end_s = time.monotonic()
        self._test_s = end_s + max(_TEST_S, _TEST_SHARE * (end_s - start_s))
        pages = grown(before.refaults or 0, now.refaults)  # before the load, from the start on
        peak_bytes = largest((self.peak_bytes, now.peak_bytes))
        if peak_bytes is not None and peak_bytes < limit_bytes:
            return None
        return verdict.proof(
            reference,
            after_ns=time.monotonic_ns() - self.started_ns,
            reread_bytes=None if pages is None else pages * os.sysconf("SC_PAGE_SIZE"),
            waited_ns=grown(before.some_ns or 0, now.some_ns),
            is_loading=self.at_ready is None,
        )

    def release(self) -> None:
        """Close the disk: a process that waits for an unanswered read cannot be killed."""
        if self._spec.disk:
            self._spec.disk.close()

    def _freeze(self) -> None:
        with self._reading:
            self.at_end, self._is_frozen = self._counters(), True

    def _counters(self) -> Counters:
        with self._reading:
            now = self.cgroup.counters() if self.cgroup else Counters()
            if not self._is_frozen and not self.at_ready:
                self.peak_bytes = largest((self.peak_bytes, now.peak_bytes))
            return now

    def _reset_mark(self) -> bool:
        return self.cgroup is not None and self.cgroup.reset_peak()

    @property
    def others(self) -> list[Reported]:
        """What processes have reported that are not ranks, or of a command, not the main process."""
        every = self.listener.by_process.values()
        return [each for each in every if not any(each is rank for rank in self.ranks)]

    @property
    def server_ready_ns(self) -> int | None:
        return self._spec.readiness.ready_ns if self._spec.readiness else None

    # What the cell reports ------------------------------------------------------------------------

    def _take(self, reported: Reported, message: Message) -> None:
        is_rank, is_alone = any(reported is each for each in self.ranks), len(self.ranks) == 1
        of_load = self._spec.is_load and (is_rank or isinstance(message, Ended))
        if not of_load and not isinstance(message, Begin | End):
            return  # a command reports phases alone, and a strategy's own process may say anything
        with self._reading:
            match message:
                case Begin():
                    now = self._counters() if reported.is_main else Counters()
                    resets = not reported.is_main or self._reset_mark() or not self.cgroup
                    reported.begin(message, now, resets_group=resets)
                case End():
                    reported.end(message, self._counters() if reported.is_main else Counters())
                case Ended():
                    if message.rank < len(self.ranks):
                        self.ranks[message.rank].stderr_tail = message.stderr_tail
                        self.seen.exits[message.rank] = Exit(message.code, message.signal)
                case Told() if message.baseline:
                    if not reported.told.baseline:
                        self._take_baseline(reported, message)
                case Told():
                    reported.take(message)
                    if message.phase and reported is self.ranks[0]:
                        self._spec.on_phase(message.phase)
                    is_ready = all(each.told.ready_at_ns is not None for each in self.ranks)
                    if message.ready_at_ns is not None and is_ready:
                        self.at_ready = reported.before if is_alone else self._counters()
                case _ if is_alone:  # a worker's phase
                    reported.add(message, self._counters(), resets_group=self._reset_mark())
                case _:  # ranks share a cgroup, so its figures are of no single phase
                    usage = Counters(usage_bytes=self._counters().usage_bytes)
                    reported.add(message, usage, resets_group=False)

    def _take_baseline(self, reported: Reported, message: Told) -> None:
        """Store one rank's memory before the load; the ranks load only after all have reported it."""
        is_last = all(each.told.baseline for each in self.ranks if each is not reported)
        if is_last:
            self._spec.before_load()
        self.at_baseline = self._counters()
        reported.take(message)
        reported.current = None  # the phases before the baseline are weighin's own
        if not is_last:
            return
        charge_bytes = self.at_baseline.usage_bytes
        for each in self.ranks:  # all ranks share one cgroup, so each has the charge of all
            assert each.told.baseline
            each.told.baseline = replace(each.told.baseline, cgroup_bytes=charge_bytes)
        if "gpu" in (told := self.ranks[0].told).environment:
            source = "NVML, this process"
            try:
                self._driver = DriverMemory(told.environment.get("gpu_uuid"), self.running.pid)
                told.environment["gpu_driver"] = self._driver.driver_version
            except NvmlUnavailable as reason:
                source = "cudaMemGetInfo"
                whose = "the GPU memory that the driver reports is that of all processes on the GPU"
                told.notes.append(f"{whose}: {reason}")
            told.environment["cuda_driver_source"] = source
        if len(self.ranks) > 1:
            self._start_sampling()
        if self._reset_mark():
            self.peak_bytes = None

    # The end of the cell --------------------------------------------------------------------------

    def end(self) -> None:
        """Stop a server, wait for the end of the cell, and read its last figures."""
        running, spec, is_server_ready = self.running, self._spec, self.server_ready_ns is not None
        if is_server_ready:
            if self.sampler:
                self.sampler.stop()
            running.send_signal(signal.SIGTERM)
            if not running.wait(spec.settings.grace_s):
                running.kill()
        has_ended = running.wait(_PATIENCE_S)  # else it is in an uninterruptible sleep
        if spec.readiness:
            spec.readiness.end()
            self.seen.ready = self.server_ready_ns is not None
        if not self._is_frozen:
            self.at_end = self._counters()
        if not self.seen.stopped and not spec.is_load:
            self.ended_rest = end_rest(running, spec.settings.grace_s)
        self.all_ended = not running.members()
        now = self._counters()  # what ran on after the first process may have grown, or been killed
        if not is_server_ready:
            oom_kills = largest((self.at_end.oom_kills, now.oom_kills))
            self.at_end = replace(self.at_end, oom_kills=oom_kills)
        if has_ended:
            self.seen.ended = running.reap()
        self.listener.close()  # takes the last messages
        if self.sampler:
            self.sampler.stop()
            if not spec.is_load:  # the last sample has all page cache, which stays in the cgroup
                self.sampler.without_caches()

    def close(self) -> None:
        self.listener.close()
        driver = self._driver.stop() if self._driver else None
        if self.sampler:
            self.rank_samples = self.sampler.rank_samples
            self.samples = with_cuda(self.sampler.stop(), self.ranks[0].told.points, driver)
        if self.cgroup:
            self.cgroup.close()
        if self.listener.error:
            raise self.listener.error

    def abandon(self) -> None:
        """Close what is still open; a second call does nothing."""
        self.listener.close()
        if self._log is not None:
            os.close(self._log)
            self._log = None

    def evidence(self) -> Evidence:
        """Return what is known about the cell, of which the end is now known, too."""
        seen, running, spec = self.seen, self.running, self._spec
        seen.oom_kills = self.at_end.oom_kills
        seen.peak_bytes = largest((self.peak_bytes, self.at_end.peak_bytes))
        if self.sampler:
            seen.oom_kills = largest((seen.oom_kills, self.sampler.oom_kills))
            seen.escape, table = self.sampler.escape, self.sampler.table
            self.processes = table.processes()
            if (
                not seen.escape
                and self.cgroup
                and is_beyond(table.most_anon_bytes, self.peak_bytes)
            ):
                whose = "its" if spec.is_load else "the command's"
                seen.escape = (
                    f"a process had {format_bytes(table.most_anon_bytes)} of anonymous memory, and"
                    f" {whose} cgroup never more than {format_bytes(self.peak_bytes or 0)}"
                )

        def limit_of(kill: Kill) -> int | None:
            around = (size for size, group in seen.limits if f"{group}".endswith(kill.limit_of))
            return next(around, None) if kill.limit_of else spec.cell.ram_limit_bytes

        pids = [each.pid for each in self.processes] + [each.pid for each in self.ranks if each.pid]
        seen.machine_oom_kills = grown(self._machine_oom_kills, read_machine_oom_kills())
        if seen.machine_oom_kills == 0:
            seen.kills = ()
            return seen
        log, self._log = self._log, None  # which is closed there
        kills = kernel_log.kills_since(log, running.cgroup, running.pid or 0, pids, self._home)
        if kills is not None:
            seen.kills = [replace(each, limit_bytes=limit_of(each)) for each in kills]
            # The log names the processes that were killed: the others are not ours.
            seen.machine_oom_kills = len(kills)
        return seen


def end_rest(running: Running, grace_s: float) -> tuple[str, ...]:
    """End the processes of a command that outlive the first; return the command lines of those that had to be."""
    names, spared = [], {running.pid}

    def rest(patience_s: float) -> list[int]:
        """Wait for the end of all that are not spared; return the pids of those that still run."""
        deadline = time.monotonic() + patience_s
        while left := [pid for pid in running.members() if pid not in spared]:
            if time.monotonic() >= deadline:
                break
            time.sleep(_PAUSE_S)
        return left

    for pid in rest(0.3):  # a command's short children end by themselves in this time
        name = f"process {pid}"
        with suppress(OSError):
            name = one_line(command_of(pid), _COMMAND_LENGTH) or name
        try:
            signal_each([pid], signal.SIGTERM)
            names.append(name)
        except PermissionError:
            spared.add(pid)
    if rest(grace_s) or len(spared) > 1:
        running.kill()  # of a container, the engine ends also those
    return tuple(names)


def cgroup_of(running: Running) -> Cgroup | None:
    """Return the cgroup of what runs; None without one, or if weighin cannot see it."""
    if not running.pid or not running.cgroup:
        return None
    return running.opened or Cgroup(running.cgroup, pressure_file_of(running.pid))
