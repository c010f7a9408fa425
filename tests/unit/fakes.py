"""Workers that play a script, whole scripts, and what a watch makes of them."""

import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, cast

import pytest

from weighin import phase_reporter
from weighin.cell import Cell, Job, ModelSpec, decode_job
from weighin.isolation.base import Exit
from weighin.probes.cgroup import Counters
from weighin.probes.process_table import ProcessTable
from weighin.probes.sampler import Sampler
from weighin.records.verdict import Reference
from weighin.result import Memory, Result, Sample
from weighin.run import measure as measuring
from weighin.run.listener import Listener, decode
from weighin.run.loads import LoadSpec
from weighin.run.measure import Measured, Watch
from weighin.settings.definition import Settings
from weighin.units import MIB

Step = bytes | Callable[[], None] | type[TimeoutError]

ENVIRONMENT = {"torch": "2.13.0"}
OK = Exit(0)


class KnownListener(Listener):
    """A listener that a played worker finds by its socket's path."""

    by_path: ClassVar[dict[str, "KnownListener"]] = {}
    newest: ClassVar["KnownListener"]

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.by_path[str(self.path)] = KnownListener.newest = self

    def deliver(self, line: bytes) -> None:
        """Take a message as if a process had sent it; ``rank`` is the sender's number."""
        try:
            fields = json.loads(line)
        except ValueError:
            return
        ended = fields["event"] == "ended"
        rank = fields.get("rank", 0) if ended else fields.pop("rank", 0)
        _, message = decode(json.dumps(fields).encode())
        if message and rank < len(self.ranks):
            self._take(self.ranks[rank], message)


class Seen:
    """A cell's mark and sampler, which see what a test or its script tells them, and else nothing."""

    escape, table = "", ProcessTable()
    rank_samples: Mapping[int, list[Sample]] = MappingProxyType({})

    def __init__(
        self,
        samples: Sequence[Sample] = (),
        last_peak_bytes: int | None = None,
        others: tuple[int, int] = (0, 0),
        resets: bool = True,
        sampled_kills: int | None = None,
        **figures: Any,
    ) -> None:
        self.samples, self.last_peaks_rss_bytes = samples, (last_peak_bytes,)
        self.others, self.oom_kills = others, sampled_kills
        self.now, self._resets = Counters(**figures), resets

    def sees(self, **figures: Any) -> Callable[[], None]:
        """Return a step of a script that sets figures."""
        return lambda: setattr(self, "now", replace(self.now, **figures))

    def counters(self) -> Counters:
        return self.now

    def reset_peak(self) -> bool:
        return self._resets

    def raise_limit(self) -> None: ...

    def start(self) -> None: ...

    def stop(self) -> list[Sample]:
        return list(self.samples)

    def close(self) -> None: ...


_pids = count(2**22 + 1)  # which no process has
_played: dict[int, Seen] = {}


def play(patch: pytest.MonkeyPatch) -> None:
    """Let a played worker be observed by what its test plays, in all unit tests."""
    mark_of = measuring.cgroup_of

    def sampler_of(pid: int, *arguments: Any, **options: Any) -> Seen | Sampler:
        return _played.get(pid) or Sampler(pid, *arguments, **options)

    patch.setattr(measuring, "cgroup_of", lambda one: _played.get(one.pid or 0) or mark_of(one))
    patch.setattr(measuring, "Sampler", sampler_of)
    patch.setattr(measuring, "Listener", KnownListener)


class FakeRunning:
    """A worker without a process, which plays its script while it is waited for.

    A function in the script is called when its turn comes. With ``TimeoutError`` at its end, the
    worker does not end before it is killed. ``hangs`` is how many kills it takes.
    """

    def __init__(
        self,
        script: Sequence[Step],
        ended: Exit = OK,
        *,
        cgroup: Path | None = None,
        unseen: str = "",
        hangs: int = 0,
        inside: Seen | None = None,
    ) -> None:
        """``inside`` is all that a ``Watch`` sees of this worker (``play``)."""
        self.script, self.cgroup, self.unseen = deque(script), cgroup, unseen
        self.closed = self.kills = 0
        self.pid = self.opened = self.listener = cast(Any, None)
        if inside:
            self.pid = next(_pids)
            _played[self.pid] = inside
        self._ended, self._hangs = ended, hangs

    def wait(self, timeout_s: float) -> bool:
        while self.script:
            step = self.script.popleft()
            if isinstance(step, bytes):
                (self.listener or KnownListener.newest).deliver(step)
            elif not isinstance(step, type):
                step()
            else:
                self._hangs = self._hangs or int(not self.script)
                break
        else:
            if self.kills >= self._hangs:
                return True
        time.sleep(min(timeout_s, 0.002))
        return False

    def reap(self) -> Exit:
        return self._ended

    def members(self) -> list[int]:
        return []

    def kill(self) -> None:
        self.kills += 1
        self.script.clear()

    def close(self) -> None:
        self.closed += 1


class PlayedIsolation:
    """Starts workers that play scripts, one after the other; the last script is played again."""

    limits = False

    def __init__(
        self, *scripts: Sequence[Step], name: str = "process", inside: Seen | None = None
    ) -> None:
        self.name, self.stderr_tail = name, b""
        self.jobs: list[Job] = []
        self.steps: list[str] = []
        self.leftovers: list[str] = []
        self._scripts, self._inside = deque(scripts), inside

    def check(self) -> None:
        self.steps.append("check")

    def start(self, *arguments: Any) -> Any:
        _, command, _, streams, _ = arguments
        script = self._scripts.popleft() if len(self._scripts) > 1 else self._scripts[0]
        running = FakeRunning(script, inside=self._inside)
        folder = Path(command[-1])
        self.jobs.append(decode_job((folder / phase_reporter.JOB).read_text()))
        running.listener = KnownListener.by_path.get(str(folder / phase_reporter.SOCKET))
        os.write(streams.stderr, self.stderr_tail)
        return running

    def remove_stale(self) -> list[str]:
        self.steps.append("remove stale")
        return self.leftovers

    def describe(self) -> dict[str, str]:
        return {"engine": "played"}


def memory(mib: int, **changes: Any) -> dict[str, Any]:
    """A Memory of so many MiB, two thirds of them anonymous, as a worker sends it."""
    third = mib * MIB // 3
    return asdict(Memory(mib * MIB, 2 * third, third, shmem_bytes=0)) | changes


def event(kind: str, **fields: Any) -> bytes:
    return json.dumps({"event": kind, **fields}, separators=(",", ":")).encode()


def begin(name: str) -> bytes:
    return event("told", phase=name)


def baseline(t_ns: int = 100, mib: int = 300) -> bytes:
    before = {"baseline_ns": t_ns, "baseline": memory(mib)}
    return event("baseline", **before, import_ns=50, environment=ENVIRONMENT)


def phase(name: str, peak_mib: int = 300, **changes: Any) -> bytes:
    fields = {
        "name": name, "start_ns": 0, "end_ns": 1, "peak_rss_bytes": peak_mib * MIB,
        "end": memory(peak_mib), "minor_faults": 10, "major_faults": 1,
    }  # fmt: skip
    return event("phase", **fields | changes)


def loaded(load_ns: int = 1000) -> bytes:
    return event("told", load_ns=load_ns)


def ready(t_ns: int = 2000, touch_ns: int = 200) -> bytes:
    return event("ready", ready_at_ns=t_ns, touch_ns=touch_ns)


def done(first_use_ns: int | None = 30, marks_ns: int = 4) -> bytes:
    return event("done", first_use_ns=first_use_ns, marks_ns=marks_ns)


def failed(outcome: str, message: str) -> bytes:
    return event("told", outcome=outcome, message=message)


JOB = Job(Cell(ModelSpec("m", "a:b"), "s", "process"), "/c", "/m", "/s.py")
SETTINGS = Settings(timeout_s=0.25)
KILLED = Exit(None, signal=9)

BASELINE = (begin("import"), phase("import", 900), begin("prepare"), phase("prepare", 800), baseline())  # fmt: skip
LOADED = (*BASELINE, begin("read"), phase("read", 500), phase("other", 400), loaded())
DONE = (*LOADED, begin("touch"), phase("touch", 450), ready(), begin("forward"), phase("forward", 990), done())  # fmt: skip


def followed(
    running: Any,
    *,
    ranks: int = 1,
    job: Job = JOB,
    settings: Settings = SETTINGS,
    reference: Reference | None = None,
    disk: Any = None,
) -> tuple[Result, Watch]:
    """Watch a played worker from its start to its result."""
    spec = LoadSpec(job, settings=settings)
    spec.disk = disk
    with tempfile.TemporaryDirectory() as folder:
        running.listener = KnownListener(Path(folder), ranks)
        watch = Watch(spec, running.listener, reference)
        watch.begin(running)
        try:
            watch.wait()
            watch.end()
        finally:
            watch.close()
    result = measuring.result_of(spec, watch, 10**18)
    return replace(result, environment=watch.ranks[0].told.environment), watch


def watched(running: FakeRunning) -> Result:
    return followed(running)[0]


def take(
    isolation: Any,
    job: Job,
    files: Sequence[Path] = (),
    model_bytes: int | None = None,
    environment: dict[str, Any] | None = None,
    steady: bool = False,
) -> Measured:
    settings = SETTINGS.model_copy(update={"steady": steady})
    spec = LoadSpec(job, files, model_bytes, settings)
    return measuring.measure(isolation, spec, environment)


def measure(isolation: Any, run: Path, *arguments: Any, **options: Any) -> Result:
    """Measure one cell, and write its samples to the folder ``run``."""
    measured = take(isolation, *arguments, **options)
    measured.finish(run)
    return measured.result
