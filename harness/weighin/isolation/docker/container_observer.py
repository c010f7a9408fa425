"""Observe a worker from inside its container, if the parent cannot see the container's processes.

``DockerRunning.observe_inside`` starts this module beside the worker as ``python -m
weighin.isolation.docker.container_observer SECONDS``. The process measures with the same code as
the parent (``weighin.probes.observer``) and imports no torch. Its memory is charged to the cell,
and it reports this memory at its end. The parent sends one word per line; the process answers with
one JSON object per line:

=========  =====================================================================================
word       answer
=========  =====================================================================================
-          ``{"watching": pid}`` once at the start; pid is None if the worker has already ended
-          ``{"samples": [[...], ...]}`` now and then, each in the order of ``Sample``'s fields
look       ``{"look": {...}}``: the fields of an ``Observation``
reset      ``{"reset": bool}``: whether the kernel reset its high-water mark
kill       ``{"kill": n}``: the number of killed processes (all but the first one and the watcher)
end        ``{"end": {"oom_kills", "last_peak_rss_bytes", "memory"}}``, after the last samples
=========  =====================================================================================
"""

import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from weighin.probes.cgroup import memory_cgroup_of, read_kernel
from weighin.probes.observer import LocalObserver
from weighin.probes.process import memory_of, read_status
from weighin.record import Sample

_KEEPER = 1
_FLUSH_S = 0.25
_FIELDS = tuple(field.name for field in fields(Sample))


def main() -> None:
    """Observe the worker, the keeper's child, until the parent sends ``end`` or closes stdin."""
    pid = next((pid for pid in _others() if _parent(pid) == _KEEPER), None)
    _say(watching=pid)
    if pid is not None:
        watch(LocalObserver(pid, memory_cgroup_of(pid), float(sys.argv[1])))


def watch(observer: LocalObserver) -> None:
    """Answer the words on standard input; send samples often, so that few stay in memory."""
    answers: dict[str, Callable[[], dict[str, Any]]] = {
        "look": lambda: {"look": asdict(observer.look())},
        "reset": lambda: {"reset": observer.reset_peak()},
        "kill": lambda: {"kill": _kill_others()},
    }
    for word in _words():
        if word:
            _say(**answers[word]())
        else:
            _say_samples(observer.take())
    _say_samples(observer.stop())
    end = {"oom_kills": observer.oom_kills, "last_peak_rss_bytes": observer.last_peak_rss_bytes}
    _say(end=end | {"memory": asdict(memory_of(read_status()))})


def _words() -> Iterator[str]:
    """Yield each word from standard input until ``end``, and "" after ``_FLUSH_S`` of silence."""
    pending = b""
    while True:
        if not select.select([0], [], [], _FLUSH_S)[0]:
            yield ""
            continue
        if not (data := os.read(0, 4096)):  # the parent has ended
            return
        *words, pending = (pending + data).split(b"\n")
        for word in words:
            if word == b"end":
                return
            yield word.decode()


def _say_samples(samples: list[Sample]) -> None:
    if samples:
        _say(samples=[[getattr(sample, name) for name in _FIELDS] for sample in samples])


def _say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields, separators=(",", ":")) + "\n")
    sys.stdout.flush()


def _others() -> list[int]:
    """Return the pids of the container except the first process and this one, oldest first."""
    pids = (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit())
    return sorted(pid for pid in pids if pid not in (_KEEPER, os.getpid()))


def _parent(pid: int) -> int | None:
    try:
        return int(read_kernel(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _kill_others() -> int:
    """Kill the worker and all its children; return the number of killed processes."""
    killed = 0
    for pid in _others():
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        killed += 1
    return killed


if __name__ == "__main__":
    main()
