"""The watcher in a container: which process it observes, what it answers, and what it kills."""

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, astuple
from math import inf
from typing import Any

import pytest

from weighin.isolation.docker import container_observer
from weighin.isolation.docker.container_observer import main, watch
from weighin.probes.observer import Observation
from weighin.result import Memory, Sample

FIRST, SECOND = (Sample(*range(start, start + 12)) for start in (100, 200))
SEEN = Observation(usage_bytes=9, oom_kills=1)


class Parent:
    """A parent that sends these words; an exception stands for silence."""

    def __init__(self, *words: bytes | type[TimeoutError] | None) -> None:
        self._words = deque(words)
        self.events: list[tuple[str, Any]] = []

    def receive(self, timeout_s: float = inf) -> bytes | None:
        word = self._words.popleft()
        if isinstance(word, type):
            raise word
        return word

    def send(self, event: str, **fields: Any) -> None:
        assert set(fields) == {"answer"}
        self.events.append((event, fields["answer"]))


class Observer:
    """An observer with one sample since the last look, and one at its end."""

    oom_kills, last_peak_rss_bytes, others = 2, 77, (3, 400)

    def __init__(self) -> None:
        self._new = [FIRST]

    def look(self) -> Observation:
        return SEEN

    def reset_peak(self) -> bool:
        return False

    def take(self) -> list[Sample]:
        new, self._new = self._new, []
        return new

    def stop(self) -> list[Sample]:
        return [SECOND]


def watched(*words: bytes | type[TimeoutError] | None) -> list[tuple[str, Any]]:
    """Return the events of a watcher whose parent sends these words."""
    parent, observer = Parent(*words), Observer()
    watch(observer, parent)  # type: ignore[arg-type]
    return parent.events


def test_each_word_gets_its_answer_and_the_end_comes_last() -> None:
    *answers, (end, figures) = watched(b"look", b"reset", b"end")
    assert answers == [
        ("look", asdict(SEEN)),
        ("reset", False),
        ("samples", [list(astuple(SECOND))]),
    ]
    memory = Memory(**figures.pop("memory"))
    assert memory.rss_bytes > memory.anon_bytes > 0
    assert (end, figures) == (
        "end",
        {"oom_kills": 2, "last_peak_rss_bytes": 77, "others": (3, 400)},
    )


def test_samples_are_sent_while_the_parent_is_silent_and_only_once() -> None:
    events = watched(TimeoutError, TimeoutError, b"reset", b"end")
    assert [name for name, _ in events] == ["samples", "reset", "samples", "end"]
    assert [Sample(*row) for row in events[0][1]] == [FIRST]


def test_a_parent_that_has_ended_ends_the_watcher() -> None:
    assert [name for name, _ in watched(None)] == ["samples", "end"]


@pytest.fixture
def sleepers() -> Iterator[list[int]]:
    """The pids of three processes, the oldest first."""
    running = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    yield sorted(one.pid for one in running)
    for one in running:
        one.kill()
        one.wait()


def test_a_kill_spares_the_keeper_and_the_watcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    killed: list[tuple[int, int]] = []

    def kill(pid: int, number: int) -> None:
        if pid == 60:
            raise ProcessLookupError  # it has just ended
        killed.append((pid, number))

    monkeypatch.setattr(os, "kill", kill)
    monkeypatch.setattr(container_observer, "all_pids", lambda: [70, 1, 50, os.getpid(), 60])
    [(word, number), *_] = watched(b"kill", b"end")
    assert (word, number) == ("kill", 2)
    assert killed == [(50, signal.SIGKILL), (70, signal.SIGKILL)]


def observed(
    monkeypatch: pytest.MonkeyPatch, parents: dict[int, int], *words: bytes | None
) -> list[tuple[str, Any]]:
    """Return the events of the program in a container with these processes and their parents."""
    parent = Parent(b"watching", *words)
    pids = [1, *reversed(parents), os.getpid()]
    monkeypatch.setattr(container_observer, "Parent", lambda: parent)
    monkeypatch.setattr(container_observer, "all_pids", lambda: pids)
    monkeypatch.setattr(container_observer, "parent_of", {**parents, os.getpid(): 1}.get)
    monkeypatch.setattr(container_observer, "memory_cgroup_of", lambda _: None)
    monkeypatch.setattr(sys, "argv", ["observer", "0.01"])
    main()
    return parent.events


def test_the_oldest_child_of_the_keeper_is_observed(
    monkeypatch: pytest.MonkeyPatch, sleepers: list[int]
) -> None:
    child, worker, other = sleepers
    parents = {child: worker, worker: 1, other: 1}
    events = observed(monkeypatch, parents, b"look", b"end")
    assert events[:2] == [("watching", worker), ("look", asdict(Observation()))]
    assert events[-1][0] == "end"
    assert events[-1][1]["last_peak_rss_bytes"] > 0


def test_a_worker_that_has_ended_is_not_watched(
    monkeypatch: pytest.MonkeyPatch, sleepers: list[int]
) -> None:
    child, *_ = sleepers
    assert observed(monkeypatch, {child: 2}) == [("watching", None)]
