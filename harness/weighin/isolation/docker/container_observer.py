"""Observe a worker from inside its container, if weighin cannot see the container's processes.

``DockerRunning.observe_inside`` starts this module beside the worker as ``python -m
weighin.isolation.docker.container_observer SECONDS``. The observer uses the code of
``weighin.probes.observer`` and imports no torch. The kernel counts the observer's memory as the
cell's, and the observer's last event reports this memory. weighin sends one word per line to the
observer. The observer answers each word with one event, which has the word as its name and one
field, ``answer``. The observer sends nothing before the first word, because the Docker SDK loses
bytes that arrive together with the engine's own answer:

========  ======================================================================================
event     answer
========  ======================================================================================
watching  the worker's pid; None if the worker has already ended. This is the first word
samples   a list of samples, sent unasked; each is a list in the order of ``Sample``'s fields
look      the fields of an ``Observation``
reset     whether the kernel's high-water mark (peak) was reset
kill      the number of killed processes: all but the first process and this one
end       ``{"oom_kills", "last_peak_rss_bytes", "others", "memory"}``, after the last samples
========  ======================================================================================
"""

import os
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

from weighin.child_process import Parent
from weighin.probes.cgroup import all_pids, memory_cgroup_of, parent_of
from weighin.probes.observer import LocalObserver
from weighin.probes.process import memory_of, read_status
from weighin.result import Sample

_KEEPER = 1
_FLUSH_S = 0.25
_FIELDS = tuple(field.name for field in fields(Sample))


def main() -> None:
    """Observe the worker, a child of process 1, until weighin sends ``end`` or closes stdin."""
    parent = Parent()
    parent.receive()
    pid = next((pid for pid in _others() if parent_of(pid) == _KEEPER), None)
    parent.send("watching", answer=pid)
    if pid is not None:
        watch(LocalObserver(pid, memory_cgroup_of(pid), float(sys.argv[1])), parent)


def watch(observer: LocalObserver, parent: Parent) -> None:
    """Answer each word that weighin sends; send samples every 0.25 s, so that few stay in memory."""
    answers: dict[bytes, Callable[[], Any]] = {
        b"look": lambda: asdict(observer.look()),
        b"reset": observer.reset_peak,
        b"kill": _kill_others,
    }
    while True:
        try:
            word = parent.receive(_FLUSH_S)
        except TimeoutError:
            _send_samples(parent, observer.take())
            continue
        if word in (None, b"end"):
            break
        assert word
        parent.send(word.decode(), answer=answers[word]())
    _send_samples(parent, observer.stop())
    end = {
        "oom_kills": observer.oom_kills,
        "last_peak_rss_bytes": observer.last_peak_rss_bytes,
        "others": observer.others,
    }
    parent.send("end", answer=end | {"memory": asdict(memory_of(read_status()))})


def _send_samples(parent: Parent, samples: list[Sample]) -> None:
    if samples:
        rows = [[getattr(sample, name) for name in _FIELDS] for sample in samples]
        parent.send("samples", answer=rows)


def _others() -> list[int]:
    """Return the container's pids, oldest first, without the first process and the observer."""
    return sorted(pid for pid in all_pids() if pid not in (_KEEPER, os.getpid()))


def _kill_others() -> int:
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
