"""A worker in a container of a recorded engine: where it is seen, how it ended, how it is removed."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import requests.exceptions
from cgroup_trees import LAYOUTS, Kernel, installed
from recorded_engine import CONTAINER, Answer, RecordedEngine, Stream, playing
from test_docker_isolation import IN_PROGRESS, NO_CONTAINER

from weighin.errors import IsolationUnavailable
from weighin.isolation.base import Exit
from weighin.isolation.docker import container
from weighin.isolation.docker import engine as docker_engine
from weighin.isolation.docker.container import DockerRunning, oom_killed, remove, wait_for_container
from weighin.isolation.docker.stream import StreamChannel


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedEngine]:
    monkeypatch.setattr(container, "_PAUSE_S", 0)
    with playing(tmp_path, monkeypatch) as played:
        played.state(Pid=0, Running=False)  # no process of this machine is in the container
        yield played


@pytest.fixture(params=LAYOUTS)
def kernel(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Kernel]:
    (folder := tmp_path / "groups").mkdir()
    with installed(folder, monkeypatch, request.param) as kernel:
        yield kernel


Sleepers = Callable[[], int]


@pytest.fixture
def sleepers() -> Iterator[Sleepers]:
    """Starts processes of this user, which the code under test may kill."""
    with ExitStack() as started:

        def start() -> int:
            running = started.enter_context(subprocess.Popen(["sleep", "60"]))
            started.callback(running.kill)
            return running.pid

        yield start


class Worker:
    """A started worker of the recorded engine, with the engine's end of its stream."""

    def __init__(self, engine: RecordedEngine, known_exit: Exit | None = None) -> None:
        self.client = docker_engine.connect()
        attached = self.client.attach_socket(CONTAINER, params={"stdin": 1, "stream": 1})
        self.stream = Stream(engine.attached())
        self.closed = 0
        self.running = DockerRunning(
            self.client,
            CONTAINER,
            StreamChannel(attached),
            on_close=self._close,
            known_exit=known_exit,
        )

    def _close(self) -> None:
        self.closed += 1

    def end(self) -> None:
        self.running.close()
        self.stream.close()
        self.client.close()


@pytest.fixture
def started(engine: RecordedEngine) -> Iterator[Callable[..., Worker]]:
    with ExitStack() as ended:

        def start(**options: Any) -> Worker:
            worker = Worker(engine, **options)
            ended.callback(worker.end)
            return worker

        yield start


@pytest.fixture
def cell(
    engine: RecordedEngine, kernel: Kernel, sleepers: Sleepers, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, int, int]:
    """The cgroup of a container on this machine, its keeper and its worker."""
    (docker := kernel.memory / "docker").mkdir()
    for control in (folder / "cgroup.subtree_control" for folder in (kernel.memory, docker)):
        if control.exists():
            control.write_text("+memory")
    (group := kernel.memory / "docker" / CONTAINER).mkdir()
    keeper, worker = sleepers(), sleepers()
    for pid in (worker, keeper):
        kernel.put(pid, group)
    engine.state(Pid=keeper)
    version = 2 if kernel.memory == kernel.unified else 1
    monkeypatch.setattr(
        container, "read_kernel", lambda path: kernel.group_of(int(path.parent.name), version)
    )
    return group, keeper, worker


def test_a_worker_of_this_machine_is_seen_with_its_group(
    cell: tuple[Path, int, int], started: Callable[..., Worker]
) -> None:
    group, _, worker = cell
    running = started().running
    assert (running.pid, running.cgroup, running.unseen) == (worker, group, "")


def test_a_kill_spares_the_keeper_and_does_not_ask_the_engine(
    engine: RecordedEngine, cell: tuple[Path, int, int], started: Callable[..., Worker]
) -> None:
    group, keeper, worker = cell
    running = started().running
    with (group / "cgroup.procs").open("a") as file:
        file.write("0\n")  # a process of another pid namespace, which is not this one
    running.kill()
    assert os.waitpid(worker, 0)[1] == signal.SIGKILL
    assert os.waitpid(keeper, os.WNOHANG) == (0, 0)
    assert engine.asked("POST /containers/ID/kill") == []


def test_a_kill_that_this_user_may_not_make_is_the_engines(
    engine: RecordedEngine,
    cell: tuple[Path, int, int],
    started: Callable[..., Worker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def may_not(pid: int, number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    running = started().running
    with monkeypatch.context() as patched:
        patched.setattr(os, "kill", may_not)
        running.kill()
    [asked] = engine.asked("POST /containers/ID/kill")
    assert asked.query == {"signal": "9"}


def test_a_worker_that_ended_before_it_was_seen(
    engine: RecordedEngine, cell: tuple[Path, int, int]
) -> None:
    group, keeper, _ = cell
    (group / "cgroup.procs").unlink()
    with (group / "cgroup.procs").open("w") as file:
        file.write(f"{keeper}\n")
    client = docker_engine.connect()
    attached = client.attach_socket(CONTAINER, params={"stdin": 1, "stream": 1})
    stream = Stream(engine.attached())
    stream.ends(0)
    running = DockerRunning(client, CONTAINER, StreamChannel(attached), on_close=lambda: None)
    assert (running.pid, running.cgroup) == (None, group)
    assert running.unseen == "the measured process ended before weighin could observe it"
    running.close()
    stream.close()
    client.close()


def test_a_container_that_has_ended_is_not_looked_for(
    engine: RecordedEngine, started: Callable[..., Worker]
) -> None:
    engine.state(Pid=0, Running=False)
    running = started().running
    assert (running.pid, running.cgroup) == (None, None)
    assert running.unseen == "the measured process ended before weighin could observe it"


def test_a_worker_that_was_killed_at_birth_is_not_looked_for(
    engine: RecordedEngine, started: Callable[..., Worker]
) -> None:
    ended = Exit(None, signal=9, oom_killed=True)
    running = started(known_exit=ended).running
    assert running.wait(0) == ended
    assert engine.asked("GET /containers/ID/json") == []


def test_a_group_that_is_not_mounted_here(
    kernel: Kernel, cell: tuple[Path, int, int], started: Callable[..., Worker]
) -> None:
    kernel.mounts.write_text("")
    running = started().running
    assert (running.pid, running.cgroup) == (None, None)
    assert running.unseen == "the container's memory cgroup is not mounted here"


@pytest.mark.parametrize(
    ("code", "exit_"),
    [(0, Exit(0)), (3, Exit(3)), (128, Exit(128)), (139, Exit(None, signal=11))],
)
def test_how_a_worker_ended(
    engine: RecordedEngine, started: Callable[..., Worker], code: int, exit_: Exit
) -> None:
    worker = started()
    worker.stream.ends(code)
    assert worker.running.wait(10) == exit_
    assert worker.running.wait(0) == exit_  # known from now on


@pytest.mark.parametrize("kills", [0, 1])
def test_the_kernels_counter_tells_a_kill_for_lack_of_memory(
    cell: tuple[Path, int, int], started: Callable[..., Worker], engine: RecordedEngine, kills: int
) -> None:
    group, *_ = cell
    worker = started()
    engine.state(OOMKilled=not kills)  # the kernel knows better
    for name in ("memory.oom_control", "memory.events.local"):
        if (file := group / name).exists():
            file.write_text(f"oom_kill {kills}\n")
    worker.stream.ends(137)
    assert worker.running.wait(10) == Exit(None, signal=9, oom_killed=bool(kills))


@pytest.mark.parametrize(
    ("news", "killed"), [([False, False, True], True), ([True], True), ([False], False)]
)
def test_without_a_counter_the_engines_word_counts_though_it_comes_late(
    engine: RecordedEngine, tmp_path: Path, news: list[bool], killed: bool
) -> None:
    answers = [Answer(200, {"State": {"OOMKilled": one}}) for one in news]
    engine.says("GET /containers/ID/json", *answers)
    client = docker_engine.connect()
    assert oom_killed(client, CONTAINER, tmp_path / "gone") is killed
    assert len(engine.requests) <= 1 + 5  # it asks for the version, and then no more than 5 times
    engine.says("GET /containers/ID/json", NO_CONTAINER)
    assert not oom_killed(client, CONTAINER, None)
    client.close()


def test_a_signal_other_than_kill_is_never_for_lack_of_memory(
    engine: RecordedEngine, started: Callable[..., Worker]
) -> None:
    engine.state(OOMKilled=True)
    worker = started()
    worker.stream.ends(128 + signal.SIGTERM)
    assert worker.running.wait(10) == Exit(None, signal=signal.SIGTERM)


def test_a_keeper_that_was_killed_too_leaves_its_exit_to_the_engine(
    engine: RecordedEngine, started: Callable[..., Worker]
) -> None:
    engine.state(OOMKilled=True)
    worker = started()
    worker.stream.close()
    assert worker.running.wait(10) == Exit(None, signal=9, oom_killed=True)
    assert len(engine.asked("POST /containers/ID/wait")) == 1


def test_a_worker_that_still_runs_is_a_timeout(
    engine: RecordedEngine, started: Callable[..., Worker]
) -> None:
    worker = started()
    with pytest.raises(TimeoutError):
        worker.running.wait(0)


def test_a_container_that_another_program_removed_was_killed(engine: RecordedEngine) -> None:
    client = docker_engine.connect()
    engine.says("POST /containers/ID/wait", NO_CONTAINER)
    assert wait_for_container(client, CONTAINER, time.monotonic()) == 137
    engine.says("POST /containers/ID/wait", Answer(500, {"message": "out of order"}))
    with pytest.raises(IsolationUnavailable, match="report how a container ended: out of order"):
        wait_for_container(client, CONTAINER, time.monotonic())
    client.close()


def test_a_worker_that_does_not_appear_is_not_waited_for_for_ever(
    engine: RecordedEngine,
    cell: tuple[Path, int, int],
    started: Callable[..., Worker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group, keeper, _ = cell
    monkeypatch.setattr(container, "_BIRTH_TIMEOUT_S", 0.01)
    (group / "cgroup.procs").unlink()
    with (group / "cgroup.procs").open("w") as file:
        file.write(f"{keeper}\n")
    running = started().running
    assert (running.pid, running.cgroup) == (None, group)
    assert running.unseen == container.ENDED


def test_a_container_that_runs_on_is_a_timeout(engine: RecordedEngine) -> None:
    client = docker_engine.connect()
    with pytest.MonkeyPatch.context() as patched:

        def late(*_: object, **__: object) -> None:
            raise requests.exceptions.ReadTimeout

        patched.setattr(client, "wait", late)
        with pytest.raises(TimeoutError):
            wait_for_container(client, CONTAINER, time.monotonic())
    client.close()


@pytest.mark.parametrize(("seconds", "asked"), [(-5, 1), (0.2, 1), (2.5, 3)])
def test_the_engine_waits_for_whole_seconds(seconds: float, asked: int) -> None:
    timeouts: list[int] = []

    class Client:
        def wait(self, container: str, timeout: int) -> dict[str, int]:
            timeouts.append(timeout)
            return {"StatusCode": 3}

    client: Any = Client()
    assert wait_for_container(client, CONTAINER, time.monotonic() + seconds) == 3
    assert timeouts == [asked]


def removing(engine: RecordedEngine, *, certain: bool) -> int:
    """Remove a container; return how often the engine was asked."""
    client = docker_engine.connect()
    try:
        remove(client, "weighin-1", certain=certain)
    finally:
        client.close()
    return len(engine.asked("DELETE /containers/ID"))


def test_a_container_is_removed_with_its_processes_and_volumes(engine: RecordedEngine) -> None:
    assert removing(engine, certain=True) == 1
    [asked] = engine.asked("DELETE /containers/ID")
    assert asked.query == {"v": "True", "force": "True", "link": "False"}


@pytest.mark.parametrize(
    ("answers", "certain", "times"),
    [
        ([NO_CONTAINER], True, 1),
        ([NO_CONTAINER], False, 10),  # a request to create it may still be under way
        ([NO_CONTAINER, NO_CONTAINER, Answer(204)], False, 3),
        ([IN_PROGRESS, IN_PROGRESS, NO_CONTAINER], True, 3),
    ],
)
def test_a_removal_is_tried_until_the_container_is_gone(
    engine: RecordedEngine, answers: list[Answer], certain: bool, times: int
) -> None:
    engine.says("DELETE /containers/ID", *answers)
    assert removing(engine, certain=certain) == times


@pytest.mark.parametrize(
    ("answer", "times"), [(IN_PROGRESS, 50), (Answer(500, {"message": "device busy"}), 1)]
)
def test_a_container_that_the_engine_cannot_remove_is_an_error(
    engine: RecordedEngine, answer: Answer, times: int
) -> None:
    engine.says("DELETE /containers/ID", answer)
    with pytest.raises(IsolationUnavailable) as caught:
        removing(engine, certain=True)
    assert caught.value.message == (
        f"the Docker engine could not remove the container weighin-1: {answer.body['message']}"
    )
    assert len(engine.asked("DELETE /containers/ID")) == times
