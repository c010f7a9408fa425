"""Watch one cell from outside: its messages, its memory, its cgroup, and its end."""

import linecache
import math
import os
import signal
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weighin.isolation.base import Exit, Running
from weighin.probes import kernel_log
from weighin.probes.cgroup import (
    Counters,
    MemoryCgroup,
    PeakMark,
    grown,
    limits_around,
    memory_cgroup_of,
    pressure_file_of,
    read_machine_oom_kills,
)
from weighin.probes.gpu_memory import DriverMemory, NvmlUnavailable, Trace, with_cuda
from weighin.probes.memory import SampledMemory
from weighin.probes.sampler import Sampler
from weighin.records import run_folder, thrashing
from weighin.records.repeats import largest
from weighin.result import (
    SCHEMA,
    Cost,
    Faults,
    Kill,
    Memory,
    Outcome,
    Peaks,
    Pressure,
    Ran,
    Rank,
    Result,
    Sample,
    Stopped,
    Track,
    Use,
)
from weighin.run import interrupts, judge, listener, messages
from weighin.run.judge import is_beyond
from weighin.run.leftovers import end_rest, left
from weighin.run.listener import Listener
from weighin.run.spec import Spec
from weighin.text import one_line
from weighin.units import MIB, format_bytes
from weighin.uses import FORK, is_of_use

if TYPE_CHECKING:
    from weighin.probes.stacks import StackTaker

_NOTABLE_BYTES = 2 * MIB  # of child processes, for a warning; a shell takes less
_PATIENCE_S: Final = 10.0  # from SIGKILL to the end of a process
_SETTLE_S: Final = 0.3  # in which short children of a command end by themselves
_LONGEST_PAUSE_S: Final = 0.2  # between two looks at a cell that runs
_PAUSE_S: Final = 0.01  # while a server is awaited
_RANKS_END_S: Final = 0.5  # for other ranks to fail after one, so that the first cause is known
_TEST_S: Final = 0.5  # between two tests whether the cell thrashes
_TEST_SHARE: Final = 10  # and at least so many times a test, which is slow in a thrashing container
_AFTER_KILL_S: Final = 1.0  # from the kill of a process of a server, which will not be ready


class Watch:
    """Measures one cell: call ``begin``, ``wait``, ``end``, ``close`` and ``result`` in this order.

    Attributes:
        samples: the memory readings; of several ranks, those of all ranks together.
        rank_samples: the memory readings of each rank, by the rank's number.
        server_ready_ns: the time at which a server was ready; None for other cells.
        trace: the events of the CUDA allocator; None if they were not recorded.
    """

    def __init__(
        self, spec: Spec, listener: Listener, reference: thrashing.Reference | None = None
    ) -> None:
        """Kill the cell if it thrashes in comparison with ``reference``, the same without a limit."""
        self.samples: list[Sample] = []
        self.rank_samples: dict[int, list[Sample]] = {}
        self._spec, self._listener = spec, listener
        self._reference = reference if spec.cell.ram_limit_bytes else None
        self._test_s = time.monotonic() + _TEST_S if self._reference else math.inf
        self._ranks = listener.ranks
        self._log = kernel_log.position()
        self._started_s, self._started_ns = time.time(), time.monotonic_ns()
        self._machine_oom_kills = read_machine_oom_kills()
        self._stopped: Stopped | None = None
        self._stalled = self._left = ""
        self._exits: dict[int, Exit] = {}  # of ranks
        self._peak_bytes: int | None = None
        self._counts_peak = True  # until a model or a server is ready, or weighin kills the cell
        self._at_baseline = self._at_end = Counters()
        self._at_ready: Counters | None = None
        self._exit: Exit | None = None
        self._ended: tuple[str, ...] = ()
        self._driver: DriverMemory | None = None
        self._memory: SampledMemory | None = None
        self._mark: PeakMark | None = None
        self._stacks: StackTaker | None = None
        self._limits: list[tuple[int, Path]] = []
        self._reading = threading.RLock()  # of the mark, which this thread and the listener's reset

    # Before and while the cell runs ---------------------------------------------------------------

    def begin(self, running: Running) -> None:
        self._running: Any = running
        self._mark = mark_of(running)
        self._home = memory_cgroup_of(running.pid) if running.pid and not running.cgroup else None
        if running.channel:
            running.channel.drops_output = True
        if running.cgroup:
            self._limits = limits_around(running.cgroup.parent)
        if self._spec.settings and self._spec.settings.stacks:
            from weighin.probes.stacks import StackTaker  # needs py-spy, and takes time to import

            self._stacks = StackTaker(running.members, running.cgroup)
        if len(self._ranks) == 1:
            self._start_sampling()
        for each in self._ranks:
            each.before = self._counters()
        self._listener.watch(self._take, self._counters)
        if self._spec.readiness:
            self._spec.readiness.begin(self._freeze)

    def _start_sampling(self) -> None:
        if not (pid := self._running.pid):
            return
        cgroup = self._mark.cgroup if self._mark else None
        loading = [each.pid or pid for each in self._ranks] if self._spec.job else []
        memory = SampledMemory(pid, self._running.members, cgroup, loading=loading)
        look = self._stacks.look if self._stacks else None
        self._sampler = Sampler(memory, at_sample=look)
        self._sampler.start()
        self._memory = memory

    def wait(self) -> None:
        """Return when the cell has ended, or a server is ready; kill the cell at its time-out, or if
        it thrashes.
        """
        spec, deadline = self._spec, time.monotonic() + self._spec.timeout_s
        pause_s = _PAUSE_S if spec.readiness else _LONGEST_PAUSE_S
        ends_s = math.inf  # when the rest is killed, of which nothing is expected any more
        while True:
            now_s = time.monotonic()
            due_s = min(deadline, ends_s, self._test_s)
            with interrupts.allowed():
                has_ended = self._running.wait(max(0.0, min(pause_s, due_s - now_s)))
            if self._listener.error:
                raise self._listener.error
            if has_ended or self.server_ready_ns:
                return
            now_s = time.monotonic()
            if self._reference and now_s >= self._test_s:
                self._stopped = self._thrashes(self._reference)
            if not self._stopped and now_s >= deadline:
                self._stopped = Stopped(time.monotonic_ns() - self._started_ns, spec.timeout_s)
                self._stalled = spec.disk.stalled() if spec.disk else ""
            if self._stopped or now_s >= ends_s:
                self._kill()
                return
            if spec.job and (self._failed_ranks or all(each.done for each in self._ranks)):
                ends_s = min(ends_s, now_s + (_RANKS_END_S if self._failed_ranks else _PATIENCE_S))
            if spec.readiness and self._memory and self._sampler.oom_kills:
                deadline = min(deadline, now_s + _AFTER_KILL_S) if ends_s == math.inf else deadline
                ends_s = deadline

    def _thrashes(self, reference: thrashing.Reference) -> Stopped | None:
        """Return the figures that prove that the cell thrashes; None without a proof."""
        start_s, before = time.monotonic(), self._at_baseline
        now, limit_bytes = self._counters(), self._spec.cell.ram_limit_bytes or 0
        end_s = time.monotonic()
        self._test_s = end_s + max(_TEST_S, _TEST_SHARE * (end_s - start_s))
        pages = grown(before.refaults or 0, now.refaults)  # before the load, from the start on
        peak_bytes = largest((self._peak_bytes, now.peak_bytes))
        if peak_bytes is not None and peak_bytes < limit_bytes:
            return None
        return thrashing.proof(
            reference,
            after_ns=time.monotonic_ns() - self._started_ns,
            reread_bytes=None if pages is None else pages * os.sysconf("SC_PAGE_SIZE"),
            waited_ns=grown(before.some_ns or 0, now.some_ns),
            is_loading=self._at_ready is None,
        )

    def _kill(self) -> None:
        """Kill the cell, read the peak, and lift the limit so that a thrashing process can exit.

        weighin lifts the limit only after the kill, so that the cell cannot raise the peak above the
        limit.
        """
        self._running.kill()
        if self._spec.disk:
            self._spec.disk.close()
        self._freeze()
        if self._memory:
            self._memory.raise_limit()
        elif self._mark:
            self._mark.cgroup.raise_limit()

    def _freeze(self) -> None:
        """Read the cgroup's figures when a server is ready, and when the cell ends."""
        with self._reading:
            self._at_end, self._counts_peak = self._counters(), False

    def _counters(self) -> Counters:
        with self._reading:
            now = self._mark.counters() if self._mark else Counters()
            if self._counts_peak:
                self._peak_bytes = largest((self._peak_bytes, now.peak_bytes))
            return now

    def _reset_mark(self) -> bool:
        return self._mark is not None and self._mark.reset()

    @property
    def server_ready_ns(self) -> int | None:
        return self._spec.readiness.ready_ns if self._spec.readiness else None

    @property
    def _failed_ranks(self) -> dict[int, Exit]:
        return {rank: each for rank, each in self._exits.items() if not self._ranks[rank].done}

    # What the cell reports ------------------------------------------------------------------------

    def _take(self, track: listener.Track, message: messages.Message | messages.End) -> None:
        of_program = isinstance(message, messages.Begin | messages.End) and message.id
        if not self._spec.job and not of_program:
            return  # a program reports phases alone
        is_alone = len(self._ranks) == 1
        with self._reading:
            match message:
                case messages.Begin():
                    now, resets = Counters(), True
                    if message.id and track.is_main:
                        now, resets = self._counters(), self._reset_mark() or not self._mark
                    track.begin(message, now, resets_group=resets)
                    if not message.id and track is self._ranks[0]:
                        self._spec.on_phase(message.name)
                case messages.End() if is_alone and track.is_main:
                    now = self._counters()
                    resets = not message.id and self._reset_mark()
                    track.end(message, now, resets_group=resets)
                case messages.End():  # ranks share a cgroup, so its figures are of no single phase
                    usage = None if track.is_program else self._counters().usage_bytes
                    track.end(message, Counters(usage_bytes=usage), resets_group=False)
                case messages.Baseline():
                    self._take_baseline(track, message)
                case messages.Ended():
                    if 0 <= message.rank < len(self._ranks):
                        self._ranks[message.rank].stderr_tail = message.stderr_tail
                        self._exits[message.rank] = Exit(message.code, message.signal)
                case _:
                    track.take(message)
                    is_ready = all(each.ready_at_ns is not None for each in self._ranks)
                    if isinstance(message, messages.Ready) and is_ready:
                        self._at_ready = track.before if is_alone else self._counters()
                        self._counts_peak = False

    def _take_baseline(self, track: listener.Track, message: messages.Baseline) -> None:
        """Store one rank's memory before the load; the ranks load only after all have reported it."""
        is_last = all(each.baseline for each in self._ranks if each is not track)
        if is_last:
            self._spec.before_load()
        self._at_baseline = self._counters()
        track.take_baseline(message, self._at_baseline)
        if not is_last:
            return
        for each in self._ranks:  # all ranks share one cgroup, so each has the charge of all
            assert each.baseline
            each.baseline = replace(each.baseline, cgroup_bytes=self._at_baseline.usage_bytes)
        self._watch_driver()
        if len(self._ranks) > 1:
            self._start_sampling()
        if self._reset_mark():
            self._peak_bytes = None

    def _watch_driver(self) -> None:
        """Sample the worker's GPU memory with NVML; record whether NVML or CUDA gives the figure."""
        environment, pid = self._ranks[0].environment, self._running.pid
        if "gpu" not in environment:
            return
        try:
            self._driver = DriverMemory(environment["gpu_uuid"], pid)
        except NvmlUnavailable as reason:
            environment["cuda_driver_source"] = "cudaMemGetInfo"
            self._ranks[0].notes.append(
                "the GPU memory that the driver reports is that of all processes on the GPU:"
                f" {reason}"
            )
        else:
            environment["cuda_driver_source"] = "NVML, this process"
            environment["gpu_driver"] = self._driver.driver_version

    # The end of the cell --------------------------------------------------------------------------

    def end(self) -> None:
        running, is_server_ready = self._running, self.server_ready_ns is not None
        settings = self._spec.settings
        if is_server_ready and settings:
            self._sampler.stop()
            running.send_signal(signal.SIGTERM)
            if not running.wait(settings.grace_s):
                running.kill()
        if is_server_ready or self._stopped:
            running.wait(_PATIENCE_S)
        if self._spec.readiness:
            self._spec.readiness.end()
        if self._spec.job:
            has_ended = running.wait(_PATIENCE_S)  # else it is in an uninterruptible sleep
            self._exit = running.reap() if has_ended else Exit(None, still_runs=True)
            self._listener.close()  # takes the last messages
            self._at_end = self._counters()
            return
        assert settings
        if self._counts_peak:
            self._at_end = self._counters()
        if not self._stopped:
            self._ended = end_rest(running, settings.grace_s, _SETTLE_S)
        if not is_server_ready and self._mark:
            self._at_end = replace(self._at_end, oom_kills=self._mark.cgroup.read_oom_kills())
        self._exit = running.reap()
        if self._counts_peak:
            self._counters()  # what ran on after the first process may have grown
        # The last sample has all page cache, which stays in the cgroup after the process's end.
        self._sampler.stop()
        self._listener.close()
        self.samples = self._sampler.without_caches()
        if running.shares_terminal and not running.members():  # else a container's files are gone
            last = self.samples[-1] if self._mark and self.samples and not is_server_ready else None
            self._left = left(self._started_s, last)

    def close(self) -> None:
        self._listener.close()
        driver = self._driver.stop() if self._driver else None
        if self._memory:
            samples = self._sampler.stop()
            self.rank_samples = self._memory.rank_samples
            self.samples = with_cuda(samples, self._ranks[0].cuda_points, driver)
        if self._mark:
            self._mark.close()
        if self._listener.error:
            raise self._listener.error

    def abandon(self) -> None:
        """Close what is open, because there will be no result."""
        self._listener.close()
        if self._log is not None:
            os.close(self._log)
            self._log = None

    @property
    def trace(self) -> Trace | None:
        return self._ranks[0].trace

    # The result -----------------------------------------------------------------------------------

    def result(
        self,
        about: dict[str, Any],
        spent_ns: int,
        wall_ns: int,
        because: tuple[Outcome, str] | None = None,
        warnings: Sequence[str] = (),
    ) -> Result:
        """Return the record of the cell.

        Args:
            about: fields of the result that ``measure`` knows.
            spent_ns: the time from a command's start to its end, or until the server was ready.
            because: another outcome, and the reason, if the cell must not count.
            warnings: those of ``measure``.
        """
        end = self._facts()
        outcome, message = judged, _ = judge.judge(end)
        doubts = (message,) if outcome is Outcome.OK and message else ()
        message = "" if doubts else message
        if because:
            outcome, message = judge.void(outcome, message, *because)
        is_cut = outcome is Outcome.THRASHING  # such a cell was killed, so its times are no results
        if self._spec.job:
            fields = self._of_load(end, judged)
            cost = listener.slowest(self._ranks).cost(wall_ns)
        else:
            fields = self._of_command(end, judged, spent_ns)
            cost = Cost(wall_ns=wall_ns, load_ns=None if is_cut else spent_ns)
        times = (fields["ready_ns"] or 0, fields["load_ns"] or 0)
        limit_bytes, ranks = self._spec.cell.ram_limit_bytes, len(self._ranks)
        found = judge.contradictions(
            fields["peaks"], fields.get("baseline"), limit_bytes, ranks, max(times), wall_ns
        )
        if outcome is Outcome.OK and (why := next(found, "")):
            outcome, message = judge.void(outcome, message, Outcome.MEASUREMENT_FAILED, why)
        if is_cut:
            fields |= {"load_ns": None, "ready_ns": None}
        environment = about.pop("environment") | self._ranks[0].environment
        noted = (*fields.pop("warnings"), *doubts, *warnings)
        assert self._exit
        return Result(
            schema=SCHEMA,
            cell=self._spec.cell,
            outcome=outcome,
            message=message,
            oom_kills=end.oom_kills,
            limit_events=self._at_end.limit_events,
            exit_code=self._exit.shell_code,
            cost=cost,
            environment=environment,
            warnings=noted,
            **fields,
            **about,
        )

    def _facts(self) -> judge.End:
        """Return what is known about the end of the cell; the kernel's log is read here, once."""
        running, job = self._running, self._spec.job
        oom_kills, escape = self._at_end.oom_kills, ""
        if self._memory:
            oom_kills, escape = largest((oom_kills, self._sampler.oom_kills)), self._memory.escape
        table = self._sampler.table if self._memory else None
        self._processes = table.processes() if table else ()
        most_bytes = table.most_anon_bytes if table and self._mark else 0
        if not escape and is_beyond(most_bytes, self._peak_bytes):
            escape = (
                f"a process had {format_bytes(most_bytes)} of anonymous memory, and the"
                f" command's cgroup never more than {format_bytes(self._peak_bytes or 0)}"
            )
        machine_oom_kills = grown(self._machine_oom_kills, read_machine_oom_kills())
        pids = [each.pid for each in self._processes]
        log, pid = self._log, running.pid or 0
        kills = kernel_log.kills_since(log, running.cgroup, pid, pids, self._home)

        def limit_of(kill: Kill) -> int | None:
            around = (size for size, group in self._limits if f"{group}".endswith(kill.limit_of))
            return next(around, None) if kill.limit_of else self._spec.cell.ram_limit_bytes

        kills = kills and tuple(replace(each, limit_bytes=limit_of(each)) for each in kills)
        if not job and machine_oom_kills == 0:
            kills = ()
        elif not job and kills is not None and kernel_log.has_our_pids():
            machine_oom_kills = 0  # the log names the killed: those of other programs are not ours
        server = self._spec.readiness
        assert self._exit
        return judge.End(
            cell=self._spec.cell,
            ended=self._exit,
            ranks=self._ranks if job else (),
            ends=self._failed_ranks,
            stopped=self._stopped,
            oom_kills=oom_kills,
            machine_oom_kills=machine_oom_kills,
            kills=kills,
            peak_bytes=largest((self._peak_bytes, self._at_end.peak_bytes if job else None)),
            limits=self._limits,
            ready=server.ready_ns is not None if server else None,
            escape=escape,
            stalled=self._stalled,
            stderr_tail=running.channel.stderr_tail if running.channel else b"",
        )

    def _of_load(self, end: judge.End, outcome: Outcome) -> dict[str, Any]:
        ranks, first = self._ranks, self._ranks[0]
        totals, before = self._at_ready or self._at_end, self._at_baseline
        is_whole = outcome is Outcome.OK or all(each.done for each in ranks)
        some, full = grown(before.some_ns, totals.some_ns), grown(before.full_ns, totals.full_ns)
        loads = [each.load_ns for each in ranks]
        pss = [each.pss_bytes for each in ranks]
        return {
            "last_phase": None if is_whole else ranks[judge.culprit(end)].current,
            "baseline": first.baseline,
            "peaks": self._peaks(sum(one or 0 for one in pss) if None not in pss else None),
            "phases": first.phases,
            "load_ns": None if None in loads else largest(loads),
            "ready_ns": listener.slowest(ranks).ready_ns,
            "faults": self._load_faults(grown(before.refaults, totals.refaults)),
            "pressure": None if some is full is None else Pressure(some, full),
            "written": first.written,
            "allocator_summary": first.allocator_summary,
            "warnings": self._load_warnings(end, outcome),
            "ranks": () if len(ranks) == 1 else tuple(map(self._rank, range(len(ranks)))),
            "stopped": self._stopped,
            "use": self._use(),
        }

    def _rank(self, number: int) -> Rank:
        track, ended = self._ranks[number], self._exits.get(number)
        samples = self.rank_samples.get(number)
        return Rank(
            phase=track.current,
            load_ns=track.load_ns,
            ready_ns=track.ready_ns,
            peak_rss_bytes=largest(each.peak_rss_bytes for each in track.load_phases),
            pss_bytes=track.pss_bytes,
            exit_code=0 if track.done else ended.shell_code if ended else None,
            samples_path=run_folder.samples_path(self._spec.cell, number) if samples else None,
        )

    def _peaks(self, pss_bytes: int | None) -> Peaks:
        ranks, first, memory = self._ranks, self._ranks[0], self._memory
        phases = [phase for each in ranks for phase in each.load_phases]
        rss: list[int | None] = [phase.peak_rss_bytes for phase in phases]
        if memory and not (self._at_ready or first.failure):
            # The worker died inside a phase, whose high-water mark only the last sample has.
            rss += memory.last_peaks_rss_bytes
        baseline_ns = max(each.baseline_ns for each in ranks)
        last_ns = max(each.ready_at_ns or math.inf for each in ranks)
        seen: list[Memory | Sample] = []
        if len(ranks) == 1:  # the memory of one rank is not the memory of the cell
            seen += [phase.end for phase in phases]
        if all(each.baseline for each in ranks):
            seen += [each for each in self.samples if baseline_ns <= each.t_ns <= last_ns]
        number, private_bytes = memory.others if memory else (0, 0)
        on_gpu = first.cuda_phases
        unreclaimable = [each.anon_bytes + each.shmem_bytes for each in seen]
        return Peaks(
            rss_bytes=largest(rss),
            cgroup_bytes=self._peak_bytes,
            anon_sampled_bytes=largest(each.anon_bytes for each in seen),
            file_sampled_bytes=largest(each.file_bytes for each in seen),
            unreclaimable_sampled_bytes=largest(unreclaimable)
            if any(each.shmem_bytes for each in seen)
            else None,
            cuda_requested_bytes=largest(phase.peak_cuda_requested_bytes for phase in on_gpu),
            cuda_allocated_bytes=largest(phase.peak_cuda_allocated_bytes for phase in on_gpu),
            cuda_reserved_bytes=largest(phase.peak_cuda_reserved_bytes for phase in on_gpu),
            cuda_driver_sampled_bytes=largest(
                each.cuda_driver_bytes for each in seen if isinstance(each, Sample)
            ),
            pinned_bytes=largest(phase.peak_pinned_bytes for phase in on_gpu),
            pss_bytes=pss_bytes,
            others_private_sampled_bytes=private_bytes if number and len(ranks) == 1 else None,
        )

    def _load_faults(self, refaults: int | None) -> Faults | None:
        ranks, seen = self._ranks, list[Sample]()
        phases = [phase for each in ranks for phase in each.load_phases]
        minor = sum(phase.minor_faults for phase in phases)
        major = sum(phase.major_faults for phase in phases)
        if ranks[0].baseline and not self._at_ready and len(ranks) == 1:
            # The worker died inside a phase, whose page faults only the samples have.
            since_ns = phases[-1].end_ns if phases else ranks[0].baseline_ns
            seen = [each for each in self.samples if each.t_ns >= since_ns]
        if seen:
            minor += seen[-1].minor_faults - seen[0].minor_faults
            major += seen[-1].major_faults - seen[0].major_faults
        return Faults(minor, major, refaults) if phases or seen else None

    def _use(self) -> Use | None:
        phases = [phase for phase in self._ranks[0].phases if is_of_use(phase.name)]
        if not phases or len(self._ranks) > 1:
            return None
        start_ns, end_ns = phases[0].start_ns, phases[-1].end_ns
        seen = [each.anon_bytes for each in self.samples if start_ns <= each.t_ns <= end_ns]
        sampled = largest([*seen, *(phase.end.anon_bytes for phase in phases)])
        return replace(self._ranks[0].use, anon_sampled_bytes=sampled)

    def _load_warnings(self, end: judge.End, outcome: Outcome) -> list[str]:
        warnings = [self._running.unseen] if self._running.unseen else []
        warnings += dict.fromkeys(text for each in self._ranks for text in each.warnings)
        if len(self._ranks) > 1 and not self._running.cgroup:
            warnings.append(
                "without a cgroup, the memory that ranks share cannot be counted once, so the"
                " file-backed memory is that of the rank that has the most"
            )
        number, private_bytes = self._memory.others if self._memory else (0, 0)
        if private_bytes >= _NOTABLE_BYTES and self._spec.cell.use != FORK:
            started = f"{number} process{'es' * (number > 1)}"
            warnings.append(
                "peak RSS and anonymous memory are those of the measured process alone; it started"
                f" {started}, with {format_bytes(private_bytes)} of private memory in all (sampled)"
            )
        if end.ended.still_runs:
            warnings.append(
                "the measured process was still running when this was recorded: SIGKILL did not end"
                " it"
            )
        if end.oom_kills and outcome not in (Outcome.OOM_KILLED, Outcome.CHILD_KILLED):
            warnings.append(judge.lost(end.oom_kills))
        if trace := self.trace:
            peaks = [phase.peak_cuda_requested_bytes for phase in self._ranks[0].cuda_phases]
            warnings += trace.doubts(largest(peaks))
        return warnings

    def _of_command(self, end: judge.End, outcome: Outcome, spent_ns: int) -> dict[str, Any]:
        sampler, running, settings = self._sampler, self._running, self._spec.settings
        assert settings
        main, *others = [*self._listener.tracks.values()] or [self._ranks[0]]
        kernel_bytes = self._at_end.kernel_peak_bytes
        sampled, reclaimable = self._most("needed_bytes"), self._most("reclaimable_bytes") or 0
        by_peak = None if self._peak_bytes is None else max(0, self._peak_bytes - reclaimable)
        by_kernel = kernel_bytes and max(0, kernel_bytes - sampler.caches_bytes)
        needed = largest((sampled, by_peak, by_kernel))
        is_exact = needed == by_peak and reclaimable <= max(MIB, (needed or 0) // 100)
        if kernel_bytes is None:  # v2 keeps no mark of the kernel's own memory
            own_bytes = self._most("kernel_needed_bytes") or 0
            is_exact = is_exact and own_bytes <= MIB + (needed or 0) // 100
        some_ns, full_ns = self._at_end.some_ns, self._at_end.full_ns
        notes = tuple(filter(None, (running.unseen, self._left)))
        warnings = [*notes, *(text for each in (main, *others) for text in each.warnings)]
        if self._stacks and self._stacks.why:
            warnings.append(self._stacks.why)
        highest = {each.pid: each.highest_rss_bytes for each in (main, *others)}
        faults = None
        if self._mark and self.samples:
            last = self.samples[-1]
            faults = Faults(last.minor_faults, last.major_faults, self._at_end.refaults)
        ended = end.ended
        return {
            "peaks": Peaks(
                cgroup_bytes=self._peak_bytes,
                anon_sampled_bytes=self._most("anon_bytes"),
                file_sampled_bytes=self._most("page_cache_bytes"),
                unreclaimable_sampled_bytes=sampled,
                shmem_sampled_bytes=self._most("shmem_bytes"),
                kernel_bytes=kernel_bytes,
            ),
            "last_phase": main.died_in,
            "phases": main.phases,
            "load_ns": spent_ns,
            "ready_ns": spent_ns,
            "faults": faults,
            "pressure": None if some_ns is full_ns is None else Pressure(some_ns, full_ns),
            "warnings": warnings,
            "ran": Ran(
                pid=running.pid,
                peak_ns=sampler.peak.t_ns if sampler.peak else None,
                needed_bytes=needed,
                needed_is_sampled=not is_exact or bool(end.escape),
                at_peak=sampler.peak,
                notes=notes,
                signal=ended.signal,
                survived=ended.signal != signal.SIGKILL,
                # Each phase resets VmHWM, so the highest of all readings counts.
                processes=tuple(
                    replace(
                        each,
                        highest_rss_bytes=largest((highest.get(each.pid), each.highest_rss_bytes)),
                    )
                    for each in self._processes
                ),
                kills=tuple(end.kills or ()),
                stacks=tuple(
                    replace(each, code=code_of(each.frames, settings.cwd, self._started_s))
                    for each in (self._stacks.stacks if self._stacks else ())
                ),
                ended=self._ended,
                tracks=tuple(Track(each.pid, each.phases) for each in others),
                cold=tuple(settings.command(self._spec.cell.strategy).cold),
                frozen_ns=self._stacks.frozen_ns if self._stacks else 0,
                marks=self._spec.marks,
            ),
            "stopped": self._stopped if outcome in (Outcome.TIMEOUT, Outcome.THRASHING) else None,
        }

    def _most(self, part: str) -> int | None:
        return largest(getattr(one, part) for one in self.samples)


def mark_of(running: Running) -> PeakMark | None:
    """Return the mark of the cgroup of what runs; None without one, or if weighin cannot see it."""
    if not running.pid or not running.cgroup:
        return None
    return running.mark or PeakMark(MemoryCgroup(running.cgroup, pressure_file_of(running.pid)))


def code_of(frames: Sequence[str], folder: str, started_s: float) -> str:
    """Return the source code of the innermost frame in the user's own program; empty without one.

    Paths are relative to ``folder``, the command's working folder. A file that was written after
    ``started_s`` (seconds since the epoch) gives no code, because other code may have run.
    """
    from weighin.records.explanation.facts import own, read_all  # 0.01 s, with its expressions

    if frame := own(read_all(frames)):
        path = Path(folder, frame.path)
        with suppress(OSError):
            if path.is_file() and path.stat().st_mtime <= started_s:
                return one_line(linecache.getline(str(path), frame.line).partition("  #")[0])
    return ""
