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
from weighin.checkpoint import temporary_folders
from weighin.child_process import signal_each
from weighin.errors import HarnessError
from weighin.files import no_link
from weighin.isolation.base import Exit, Isolation, Running
from weighin.probes import cgroup, kernel_log, page_cache
from weighin.probes.cgroup import Cgroup, Counters, grown
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
_AFTER_KILL_S: Final = 1.0  # from the kill of a process of a server, which will not be ready


class Spec:
    """One cell to measure: a ``LoadSpec`` or a ``CommandSpec``. Its ``files`` are dropped from the page cache first."""

    named = "the checkpoint"  # the ``files`` in words
    disk: "Mount | None" = None  # slow, from which a load reads
    readiness: Readiness | None = None  # of a command that is a server

    def __init__(
        self, cell: Cell, settings: Settings | None = None, files: Sequence[Path] = ()
    ) -> None:
        self.cell, self.settings, self.files = cell, settings or Settings(), files
        self.facts: dict[str, Any] = {}  # about the cell's environment, for the record
        self.is_load = cell.operation != "command"  # or a save, or a test's body: in a worker
        self.on_phase: Callable[[str], object] = str  # gets the name of each phase of a load

    def before_load(self) -> None:
        """Run when the worker is about to begin its load, and waits for this."""


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
    """Run one cell to its end, or until it thrashes; ``reference`` is the same cell without a limit."""
    started_at, start_ns = datetime.now(UTC).isoformat(timespec="milliseconds"), time.monotonic_ns()
    cached_bytes = page_cache.drop(spec.files) if spec.files else None
    doubt = ""
    if cached_bytes:
        size = format_bytes(cached_bytes)
        doubt = f"{size} of {spec.named} could not be dropped from the page cache"
    elif spec.files and cached_bytes is None:
        doubt = (
            f"weighin cannot tell whether {spec.named} left the page cache: Linux"
            " reports cached pages only to a user who owns the files or may write them"
        )
    with (
        temporary_folders.own_folder(Path(tempfile.gettempdir()), PREFIX) as folder,
        ExitStack() as opened,
    ):
        spec.enter(opened)
        watch = Watch(spec, Listener(folder, spec.cell.ranks), reference)
        opened.callback(watch.close)
        trouble: HarnessError | None = None
        with interrupts.put_off(), ExitStack() as failing:
            running = spec.start(isolation, folder)
            failing.callback(running.close)
            failing.callback(watch.release)
            failing.callback(watch.close)
            watch.begin(running)
            watch.wait()
            watch.end()
            watch.close()
            failing.pop_all()
            watch.release()
            try:
                running.close()
            except HarnessError as error:  # the result is still recorded
                trouble = error
        warnings = [*spec.finish(watch.seen), doubt]
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
    judged, message = judge(seen := watch.seen)
    figures, outcome, doubt = spec.figures(watch, judged), judged, ""
    if judged is Outcome.OK:
        doubt, message = message, ""
        spent_ns = max(figures["ready_ns"] or 0, figures["load_ns"] or 0)
        base, peaks = figures.get("baseline"), figures["peaks"]
        if why := contradiction(spec.cell, peaks, base, spent_ns, wall_ns):
            outcome, message = void(outcome, "", Outcome.MEASUREMENT_FAILED, why)
    if outcome is Outcome.THRASHING:  # it was killed, so its times are no results
        figures |= {"load_ns": None, "ready_ns": None}
        figures["cost"]["load_ns"] = None
    before, totals = watch.at_baseline, watch.at_ready or watch.at_end
    some, full = grown(before.some_ns, totals.some_ns), grown(before.full_ns, totals.full_ns)
    notes = [watch.running.unseen]
    notes += [text for each in (*watch.ranks, *watch.others) for text in each.told.notes]
    if seen.ended.still_runs:
        notes.append(
            "the measured process was still running when this was recorded: SIGKILL did not end it"
        )
    if seen.oom_kills and judged not in (Outcome.OOM_KILLED, Outcome.CHILD_KILLED):
        notes.append(lost(seen.oom_kills))
    notes += [*figures.pop("warnings"), doubt, *warnings]
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
        warnings=tuple(dict.fromkeys(filter(None, notes))),
        samples_path=run_folder.samples_path(spec.cell) if watch.samples else None,
        stopped=None if judged is Outcome.OOM_KILLED else seen.stopped,
        **known,
        **figures,
    )


class Watch:
    """Watches one cell from outside. Call ``begin``, ``wait``, ``end`` and ``close`` in this order."""

    def __init__(
        self, spec: Spec, listener: Listener, reference: verdict.Reference | None = None
    ) -> None:
        self.listener, self.ranks = listener, listener.ranks  # of a command, the main process
        self.seen = Evidence(spec.cell, ranks=listener.ranks)  # whole after ``end``
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
        self.processes: tuple[Process, ...] = ()
        self.ended_rest: tuple[str, ...] = ()  # by ``end_rest``
        self.all_ended = False
        self._spec, self._reference = spec, reference if spec.cell.ram_limit_bytes else None
        self._test_s = time.monotonic() + _TEST_S if self._reference else math.inf
        self._log = kernel_log.position()
        self._machine_oom_kills = cgroup.read_machine_oom_kills()
        self._is_frozen = False  # since a server is ready, or weighin has killed the cell
        self._driver: DriverMemory | None = None
        self._reading = threading.RLock()  # of the mark, for this thread and the listener's
        self.started_ns = self.ended_ns = time.monotonic_ns()

    # Before and while the cell runs

    def begin(self, running: Running) -> None:
        self.running, self.cgroup = running, cgroup_of(running)
        is_alone = running.pid and not running.cgroup
        self._home = cgroup.memory_cgroup_of(running.pid) if is_alone else None
        if running.cgroup:
            self.seen.limits = cgroup.limits_around(running.cgroup.parent)
        if self._spec.settings.stacks:
            from weighin.probes.stacks import StackTaker  # needs py-spy, and takes time to import

            self.stacks = StackTaker(running.members, running.cgroup)
        if len(self.ranks) == 1:
            self._start_sampling()
        for each in self.ranks:
            each.before = self._counters()
        self.listener.watch(self._take, self._at_mark)
        if self._spec.readiness:
            self._spec.readiness.begin(self._freeze)

    def _start_sampling(self) -> None:
        if pid := self.running.pid:
            loading = [each.pid or pid for each in self.ranks] if self._spec.is_load else []
            look = self.stacks.look if self.stacks else None
            members = self.running.members
            sampler = Sampler(pid, members, self.cgroup, loading=loading, at_sample=look)
            sampler.start()
            self.sampler = sampler  # only now, because one that has not started cannot be stopped

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
                deadline = min(deadline, now_s + _AFTER_KILL_S)
        self.ended_ns = self.server_ready_ns or time.monotonic_ns()

    def _thrashes(self, reference: verdict.Reference) -> Stopped | None:
        before, now = self.at_baseline, self._counters()
        self._test_s = time.monotonic() + _TEST_S
        pages = grown(before.refaults or 0, now.refaults)  # before the load, from the start on
        peak_bytes = largest((self.peak_bytes, now.peak_bytes))
        if peak_bytes is not None and peak_bytes < (self._spec.cell.ram_limit_bytes or 0):
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

    def _at_mark(self, reported: Reported) -> Counters:
        """Read the cgroup for a phase of the main process, and reset its mark: no peak if that is impossible."""
        with self._reading:
            if len(self.ranks) > 1:  # they share a cgroup, so its peak is of no single phase
                return Counters(usage_bytes=self._counters().usage_bytes)
            if not self.cgroup or reported is not self.ranks[0]:
                return Counters()
            now = self._counters()
            return now if self.cgroup.reset_peak() else replace(now, peak_bytes=None)

    @property
    def others(self) -> list[Reported]:
        """What processes have reported that are not ranks, or of a command, not the main process."""
        return [each for each in self.listener.by_process.values() if each not in self.ranks]

    @property
    def server_ready_ns(self) -> int | None:
        return self._spec.readiness.ready_ns if self._spec.readiness else None

    # What the cell reports

    def _take(self, reported: Reported, message: Message) -> None:
        of_load = self._spec.is_load and (reported in self.ranks or isinstance(message, Ended))
        if not of_load and not isinstance(message, Begin | End):
            return  # a command reports phases alone, and a strategy's own process may say anything
        is_alone = len(self.ranks) == 1
        with self._reading:
            match message:
                case Begin():
                    now = self._at_mark(reported)
                    if is_alone and now.usage_bytes is not None and now.peak_bytes is None:
                        reported.note(
                            "phases have no cgroup peak, because the cgroup's peak could not be reset"
                            " (cgroup v2 needs Linux 6.12 for it)"
                        )
                    reported.begin(message, now)
                case End():
                    reported.end(message, self._at_mark(reported))
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
                case _:  # a worker's phase
                    reported.add(message, self._at_mark(reported))

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
        if self.cgroup and self.cgroup.reset_peak():
            self.peak_bytes = None

    # The end of the cell

    def end(self) -> None:
        """Stop a server, wait for the end of the cell, and read its last figures."""
        running, spec, seen = self.running, self._spec, self.seen
        if is_ready := self.server_ready_ns is not None:
            if self.sampler:
                self.sampler.stop()
            running.send_signal(signal.SIGTERM)
            if not running.wait(spec.settings.grace_s):
                running.kill()
        has_ended = running.wait(_PATIENCE_S)  # else it is in an uninterruptible sleep
        if spec.readiness:
            spec.readiness.end()
            seen.ready = self.server_ready_ns is not None
        if not self._is_frozen:
            self.at_end = self._counters()
        if not seen.stopped and not spec.is_load:
            self.ended_rest = end_rest(running, spec.settings.grace_s)
        self.all_ended = not running.members()
        now = self._counters()  # what ran on after the first process may have grown, or been killed
        oom_kills = [self.at_end.oom_kills, None if is_ready else now.oom_kills]
        if has_ended:
            seen.ended = running.reap()
        self.listener.close()  # takes the last messages
        if self.sampler:
            self.sampler.stop()
            if not spec.is_load:  # the last sample has all page cache, which stays in the cgroup
                self.sampler.without_caches()
            oom_kills.append(self.sampler.oom_kills)
            seen.escape, table = self.sampler.escape, self.sampler.table
            self.processes, most_bytes = table.processes(), table.most_anon_bytes
            if not seen.escape and is_beyond(most_bytes, self.peak_bytes):
                most, peak = format_bytes(most_bytes), format_bytes(self.peak_bytes or 0)
                had = f"a process had {most} of anonymous memory"
                seen.escape = f"{had}, and its cgroup never more than {peak}"
        seen.oom_kills = largest(oom_kills)
        seen.peak_bytes = largest((self.peak_bytes, self.at_end.peak_bytes))
        seen.kills, killed = (), cgroup.read_machine_oom_kills()
        seen.machine_oom_kills = grown(self._machine_oom_kills, killed)
        if seen.machine_oom_kills != 0:
            self._read_kernel_log()

    def _read_kernel_log(self) -> None:
        def limit_of(kill: Kill) -> int | None:
            around = (size for size, group in seen.limits if f"{group}".endswith(kill.limit_of))
            return next(around, None) if kill.limit_of else self._spec.cell.ram_limit_bytes

        running, seen = self.running, self.seen
        pids = [each.pid for each in self.processes] + [each.pid for each in self.ranks if each.pid]
        log, self._log = self._log, None  # which is closed there
        kills = kernel_log.kills_since(log, running.cgroup, running.pid or 0, pids, self._home)
        seen.kills = kills and [replace(each, limit_bytes=limit_of(each)) for each in kills]
        if kills is not None:  # the others are not ours
            seen.machine_oom_kills = len(kills)

    def close(self) -> None:
        """Stop all threads; a second call does nothing."""
        with ExitStack() as last:  # also if one of the others fails
            if self._log is not None:
                last.callback(os.close, self._log)
                self._log = None
            if self.cgroup:
                last.callback(self.cgroup.close)
            if self.sampler:
                last.callback(self.sampler.stop)
            try:
                self.listener.close()
            finally:
                driver = self._driver.stop() if self._driver else None
                self._driver = None
            if self.sampler and not self.samples:
                self.rank_samples = self.sampler.rank_samples
                self.samples = with_cuda(self.sampler.stop(), self.ranks[0].told.points, driver)
        if self.listener.error:
            raise self.listener.error


def end_rest(running: Running, grace_s: float) -> tuple[str, ...]:
    """End the processes of a command that outlive the first; return the command lines of those that had to be."""
    names, spared = [], {running.pid}

    def rest(patience_s: float) -> set[int]:
        deadline = time.monotonic() + patience_s
        while (left := {*running.members()} - spared) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
        return left

    for pid in sorted(rest(0.3)):  # a command's short children end by themselves in this time
        name = f"process {pid}"
        with suppress(OSError):
            name = one_line(command_of(pid), 120) or name
        try:
            signal_each([pid], signal.SIGTERM)
            names.append(name)
        except PermissionError:
            spared.add(pid)
    if rest(grace_s) or len(spared) > 1:
        running.kill()  # of a container, the engine ends also those
    return tuple(names)


def cgroup_of(running: Running) -> Cgroup | None:
    if not running.pid or not running.cgroup:  # there is none, or weighin cannot see it
        return None
    return running.opened or Cgroup(running.cgroup, cgroup.pressure_file_of(running.pid))
