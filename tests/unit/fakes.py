"""A worker that plays a script: what it says, how it ends, and what was said to it."""

from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from weighin.cell import Cell, Job
from weighin.isolation.base import Exit, Streams
from weighin.probes.observer import Observation, Observer
from weighin.protocol import encode_event
from weighin.result import Memory, Sample
from weighin.units import MIB

Step = bytes | Callable[[], None] | type[TimeoutError]

ENVIRONMENT = {"torch": "2.13.0"}
OK = Exit(0)


class FakeChannel:
    """Gives out the lines of a script. A function in it is called when its turn comes."""

    def __init__(self, script: Sequence[Step], stderr_tail: bytes) -> None:
        self.script = deque(script)
        self.stderr_tail = stderr_tail
        self.sent: list[bytes] = []
        self.closed = 0

    def receive(self, timeout_s: float) -> bytes | None:
        while self.script:
            step = self.script.popleft()
            if isinstance(step, bytes):
                return step.rstrip(b"\n")
            if isinstance(step, type):
                raise step
            step()
        return None

    def send(self, line: bytes) -> None:
        self.sent.append(line)

    def close(self) -> None:
        self.closed += 1


class Silent:
    """An observer that sees nothing and does nothing."""

    oom_kills = last_peak_rss_bytes = None
    others = (0, 0)

    def look(self) -> Observation:
        return Observation()

    def reset_peak(self) -> bool:
        return True

    def raise_limit(self) -> None: ...

    def stop(self) -> list[Sample]:
        return []


_pids = count(2**22 + 1)  # which no process has
_observers: dict[int, Silent] = {}


def observer_of(pid: int, *arguments: Any, **options: Any) -> Silent | Observer:
    """Stands for ``Observer`` in all unit tests: a played worker has a played observer."""
    return _observers.pop(pid, None) or Observer(pid, *arguments, **options)


class FakeRunning:
    """A worker without a process. ``hangs`` is how many of its waits time out."""

    def __init__(
        self,
        script: Sequence[Step],
        ended: Exit = OK,
        *,
        stderr_tail: bytes = b"",
        pid: int | None = None,
        cgroup: Path | None = None,
        unseen: str = "",
        hangs: int = 0,
        inside: Silent | None = None,
    ) -> None:
        """``inside`` is the observer that a ``Watch`` gets for this worker (``observer_of``)."""
        self.channel = FakeChannel(script, stderr_tail)
        self.pid = pid
        if inside:
            self.pid = next(_pids)
            _observers[self.pid] = inside
        self.cgroup = cgroup
        self.unseen = unseen
        self.helpers = frozenset[int]()
        self.kills = 0
        self._ended = ended
        self._hangs = hangs

    def wait(self, timeout_s: float) -> Exit:
        if self._hangs:
            self._hangs -= 1
            raise TimeoutError
        return self._ended

    def kill(self) -> None:
        self.kills += 1

    def close(self) -> None:
        self.channel.close()


class PlayedIsolation:
    """Starts workers that play scripts, one after the other; the last script is played again."""

    limits = False

    def __init__(
        self, *scripts: Sequence[Step], name: str = "process", inside: Silent | None = None
    ) -> None:
        self.jobs: list[Job] = []
        self.steps: list[str] = []
        self.leftovers: list[str] = []
        self.stderr_tail = b""
        self._scripts = deque(scripts)
        self._inside = inside
        self.name = name

    def check(self) -> None:
        self.steps.append("check")

    def prepare(self, progress: Callable[[str], None] = lambda _: None, /) -> None:
        self.steps.append("prepare")
        progress("building")

    def start(self, job: Job) -> FakeRunning:
        self.jobs.append(job)
        script = self._scripts.popleft() if len(self._scripts) > 1 else self._scripts[0]
        return FakeRunning(script, inside=self._inside, stderr_tail=self.stderr_tail)

    def start_command(
        self,
        _cell: Cell,
        _folder: str,
        _streams: Streams,
        _mounts: Sequence[str] = (),
    ) -> Any: ...

    def remove_stale(self) -> list[str]:
        self.steps.append("remove stale")
        return self.leftovers

    def describe(self) -> dict[str, str]:
        return {"engine": "played"}


def memory(mib: int, **changes: Any) -> dict[str, Any]:
    """A Memory of so many MiB, two thirds of them anonymous, as a worker sends it."""
    third = mib * MIB // 3
    values = {
        "rss_bytes": mib * MIB,
        "anon_bytes": 2 * third,
        "file_bytes": third,
        "shmem_bytes": 0,
    }
    return {name: getattr(Memory(**values), name) for name in Memory.__slots__} | changes


def event(kind: str, **fields: Any) -> bytes:
    return encode_event({"event": kind, **fields})


def begin(name: str, t_ns: int = 0) -> bytes:
    return event("begin", name=name, t_ns=t_ns)


def baseline(t_ns: int = 100, mib: int = 300) -> bytes:
    return event("baseline", t_ns=t_ns, memory=memory(mib), import_ns=50, environment=ENVIRONMENT)


def phase(name: str, peak_mib: int = 300, **changes: Any) -> bytes:
    fields = {
        "name": name,
        "start_ns": 0,
        "end_ns": 1,
        "peak_rss_bytes": peak_mib * MIB,
        "end": memory(peak_mib),
        "minor_faults": 10,
        "major_faults": 1,
    }
    return event("phase", **fields | changes)


def loaded(load_ns: int = 1000) -> bytes:
    return event("loaded", load_ns=load_ns)


def ready(t_ns: int = 2000, touch_ns: int = 200) -> bytes:
    return event("ready", t_ns=t_ns, touch_ns=touch_ns)


def done(first_use_ns: int | None = 30, marks_ns: int = 4) -> bytes:
    return event("done", first_use_ns=first_use_ns, marks_ns=marks_ns)


def failed(outcome: str, message: str) -> bytes:
    return event("failed", outcome=outcome, message=message)
