"""The parent's side of a watcher in a container: what it asks, and a watcher that dies or is silent."""

import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Any

import pytest
from fakes import FakeRunning
from scripts import DONE, KILLED, watched

from weighin.isolation.docker import remote_observer
from weighin.isolation.docker.remote_observer import InsideObserver
from weighin.probes.observer import Observation
from weighin.protocol import encode_event
from weighin.result import Memory, Outcome, Sample

SAMPLE: list[Any] = [1, 60, 30, 20, 10, 0, 5, 6, 90, 40, None, None]
LOOK = Observation(90, 95, 3, 4000, 2000, 1, {"max": 7, "oom_kill": 1})
WATCHER = Memory(12 << 20, 7 << 20, 5 << 20, 0, 0)
ANSWERS: dict[bytes, Any] = {
    b"look\n": {name: getattr(LOOK, name) for name in Observation.__slots__},
    b"reset\n": False,
    b"kill\n": 2,
    b"end\n": {
        "oom_kills": 1,
        "last_peak_rss_bytes": 77,
        "memory": {name: getattr(WATCHER, name) for name in Memory.__slots__},
    },
}


def samples(*rows: list[Any]) -> bytes:
    return encode_event({"event": "samples", "answer": rows}).rstrip()


class Channel:
    """A watcher that answers, until it is told to die or to fall silent."""

    def __init__(self) -> None:
        self.lines: SimpleQueue[bytes | None] = SimpleQueue()
        self.answers: Callable[[bytes], bytes | None] | None = lambda word: encode_event(
            {"event": word.decode().strip(), "answer": ANSWERS[word]}
        ).rstrip()
        self.stderr_tail = b""
        self.closed = 0

    def send(self, line: bytes) -> None:
        if self.answers:
            self.lines.put(self.answers(line))
        if line == b"end\n":
            self.lines.put(None)

    def receive(self, timeout_s: float) -> bytes | None:
        try:
            return self.lines.get(timeout=timeout_s)
        except Empty:
            raise TimeoutError from None

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def channel() -> Channel:
    return Channel()


@pytest.fixture
def observer(channel: Channel) -> Iterator[InsideObserver]:
    lifted = threading.Event()
    observer = InsideObserver(channel, lifted.set)
    observer.raise_limit()
    assert lifted.is_set()
    yield observer
    observer.stop()
    assert not observer._thread.is_alive()


def test_what_is_asked_is_answered(channel: Channel, observer: InsideObserver) -> None:
    channel.lines.put(samples(SAMPLE))
    assert observer.look() == LOOK
    assert observer.reset_peak() is False
    assert observer.kill() is True
    channel.lines.put(samples(SAMPLE, SAMPLE))
    assert observer.stop() == [Sample(*SAMPLE)] * 3
    assert (observer.oom_kills, observer.last_peak_rss_bytes) == (1, 77)
    assert observer.watcher == WATCHER
    assert channel.closed == 1


def test_a_watcher_that_is_killed_with_its_worker_breaks_nothing(
    channel: Channel, observer: InsideObserver
) -> None:
    channel.lines.put(samples(SAMPLE))
    channel.answers = lambda word: None
    assert observer.look() == Observation()
    assert observer.look() == Observation()
    assert observer.kill() is False  # the engine does it then
    assert observer.stop() == [Sample(*SAMPLE)]
    assert (observer.watcher, observer.oom_kills) == (None, None)


def test_a_watcher_that_falls_silent_is_not_waited_for_for_ever(
    channel: Channel, observer: InsideObserver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_observer, "_ANSWER_TIMEOUT_S", 0.05)
    channel.answers = None
    assert observer.look() == Observation()
    assert observer.stop() == []


def test_a_cell_that_a_watcher_looked_at(observer: InsideObserver) -> None:
    running = FakeRunning([*DONE], unseen="the engine runs elsewhere", inside=observer)
    result = watched(running)
    assert (result.outcome, result.oom_kills, result.limit_events) == (
        Outcome.CHILD_KILLED,
        1,
        {"max": 7, "oom_kill": 1},
    )
    assert result.baseline and result.baseline.cgroup_bytes == 90
    assert {one.end.cgroup_bytes for one in result.phases} == {90}
    assert {one.peak_cgroup_bytes for one in result.phases} == {None}  # nobody may put it back
    assert result.peaks.cgroup_bytes == 95
    assert result.watcher == WATCHER
    assert result.warnings == (
        "the engine runs elsewhere: a watcher in the container measured the load; the cgroup's"
        " memory includes the watcher's 12.000 MiB (anonymous: 7.000 MiB)",
    )


def test_a_time_out_is_carried_out_by_the_watcher(observer: InsideObserver) -> None:
    running = FakeRunning([*DONE[:6], TimeoutError], KILLED, unseen="elsewhere", inside=observer)
    assert watched(running).outcome is Outcome.TIMEOUT
    assert running.kills == 0


def test_a_time_out_is_carried_out_by_the_engine_where_the_watcher_is_dead(
    channel: Channel, observer: InsideObserver
) -> None:
    channel.answers = lambda word: None
    running = FakeRunning([*DONE[:6], TimeoutError], KILLED, unseen="elsewhere", inside=observer)
    assert watched(running).outcome is Outcome.TIMEOUT
    assert running.kills == 1


def test_a_limit_that_was_lifted_on_request_is_no_escape(channel: Channel) -> None:
    seen = ANSWERS[b"look\n"] | {"escape": "changed the limit of its cgroup"}
    other = channel.answers
    assert other
    channel.answers = lambda word: (
        encode_event({"event": "look", "answer": seen}).rstrip()
        if word == b"look\n"
        else other(word)
    )
    observer = InsideObserver(channel, lambda: None)
    assert observer.look().escape == "changed the limit of its cgroup"
    observer.raise_limit()
    assert observer.look().escape == ""
    observer.stop()


def test_lines_that_are_no_events_are_left_out(channel: Channel, observer: InsideObserver) -> None:
    channel.lines.put(b"Segmentation fault")
    channel.lines.put(samples(SAMPLE))
    assert observer.look() == LOOK
    assert observer.stop() == [Sample(*SAMPLE)]


def test_a_limit_is_lifted_by_the_engine_once_for_each_request(channel: Channel) -> None:
    lifted: list[int] = []
    observer = InsideObserver(channel, lambda: lifted.append(1))
    observer.look()
    assert lifted == []
    observer.raise_limit()
    assert lifted == [1]
    observer.stop()


def test_a_watcher_that_killed_nobody_leaves_the_kill_to_the_engine(
    channel: Channel, observer: InsideObserver
) -> None:
    answers = channel.answers
    assert answers
    channel.answers = lambda word: (
        encode_event({"event": "kill", "answer": 0}).rstrip()
        if word == b"kill\n"
        else answers(word)
    )
    assert observer.kill() is False
    channel.answers = answers
    assert observer.kill() is True


def test_what_the_other_processes_of_a_cell_held_is_the_watchers_word(channel: Channel) -> None:
    end = ANSWERS[b"end\n"] | {"others": [3, 400]}
    channel.answers = lambda word: encode_event(
        {"event": word.decode().strip(), "answer": end}
    ).rstrip()
    observer = InsideObserver(channel, lambda: None)
    assert observer.others == (0, 0)
    observer.stop()
    assert observer.others == (3, 400)
