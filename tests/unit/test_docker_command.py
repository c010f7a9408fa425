"""A command in a container of a recorded engine: its processes here, how they end, and what is left."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cgroup_trees import LAYOUTS, Kernel, installed
from recorded_engine import CONTAINER, RecordedEngine, Stream, playing

from weighin.errors import IsolationUnavailable
from weighin.isolation.base import Exit, Streams
from weighin.isolation.docker import container
from weighin.isolation.docker import engine as docker_engine
from weighin.isolation.docker.attachment import Attachment, Standard
from weighin.isolation.docker.command import DockerCommand
from weighin.isolation.docker.keeper import Keeper

KILLED = Exit(None, signal=signal.SIGKILL)


class PlayedKeeper(Keeper):
    """A keeper that says what a test gives it, as no shell runs in a container here."""

    child: int | None = None
    ended: Exit | None = Exit(0)
    started = False
    mark = b""

    def wait_for_child(self, keeper: int, timeout_s: float) -> int | None:
        return self.child

    def go(self) -> None:
        self.started = True

    def exit(self, timeout_s: float) -> Exit | None:
        return self.ended

    def end_output(self, mark: bytes) -> None:
        self.mark = mark


class Cell:
    """A container with a keeper and a command, whose processes and group are of this machine."""

    def __init__(self, engine: RecordedEngine, kernel: Kernel, opened: ExitStack) -> None:
        self.engine, self.kernel, self._opened = engine, kernel, opened
        (docker := kernel.memory / "docker").mkdir()
        for folder in (kernel.memory, docker):
            if (control := folder / "cgroup.subtree_control").exists():
                control.write_text("+memory")
        (group := docker / CONTAINER).mkdir()
        self.group = group
        self.keeper_pid, self.pid = self.process("61"), self.process("62")
        engine.state(Pid=self.keeper_pid)
        self.client = docker_engine.connect()
        opened.callback(self.client.close)
        attached = self.client.attach_socket(CONTAINER, params={"stdin": 1, "stream": 1})
        self.stream = Stream(engine.attached())
        opened.callback(self.stream.close)
        with Path(os.devnull).open("r+b") as nothing:
            standard = Standard(Streams(*[nothing.fileno()] * 3))
        self.attachment = Attachment(attached, standard, resize=lambda _rows, _columns: None)
        self.keeper = PlayedKeeper()
        self.keeper.child = self.pid
        self.closed = 0
        self.running = DockerCommand(
            self.client, CONTAINER, self.keeper, self.attachment, on_close=self._close
        )
        opened.callback(self.running.close)

    def process(self, seconds: str) -> int:
        """Start a process in the container's group."""
        running = self._opened.enter_context(subprocess.Popen(["sleep", seconds]))
        self._opened.callback(running.kill)
        self.kernel.put(running.pid, self.group)
        return running.pid

    def kills(self, number: int) -> None:
        """Let the kernel count so many processes that it killed."""
        for name in ("memory.oom_control", "memory.events.local"):
            if (file := self.group / name).exists():
                file.write_text(f"oom_kill {number}\n")

    def _close(self) -> None:
        self.closed += 1


@pytest.fixture(params=LAYOUTS)
def cell(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Cell]:
    monkeypatch.setattr(container, "_PAUSE_S", 0)
    (folder := tmp_path / "groups").mkdir()
    version = 2 if request.param == "v2" else 1
    with (
        playing(tmp_path, monkeypatch) as engine,
        installed(folder, monkeypatch, request.param) as kernel,
        ExitStack() as opened,
    ):
        monkeypatch.setattr(
            container, "read_kernel", lambda path: kernel.group_of(int(path.parent.name), version)
        )
        yield Cell(engine, kernel, opened)


def test_a_command_is_found_beside_its_keeper(cell: Cell) -> None:
    running = cell.running
    running.begin(limited=True)
    assert (running.pid, running.cgroup, running.unseen) == (cell.pid, cell.group, "")
    assert running.helpers == {cell.keeper_pid}
    assert running.cgroup == cell.group
    assert running.members() == [cell.pid]
    assert cell.keeper.started
    names = ("memory.max_usage_in_bytes", "memory.peak")
    [mark] = [file.read_text() for name in names if (file := cell.group / name).exists()]
    assert mark in ("0", "reset\n")  # the container's own start is left out
    assert not running.wait(0)


def test_a_kill_ends_all_but_the_keeper(cell: Cell) -> None:
    cell.running.begin(limited=False)
    more = cell.process("63")
    cell.running.kill()
    for pid in (cell.pid, more):
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert os.waitpid(cell.keeper_pid, os.WNOHANG) == (0, 0)
    assert cell.running.wait(10)
    assert cell.engine.asked("POST /containers/ID/kill") == []


def test_a_signal_reaches_the_command_until_it_has_ended(cell: Cell) -> None:
    cell.running.begin(limited=False)
    cell.running.send_signal(signal.SIGTERM)
    assert os.waitpid(cell.pid, 0)[1] == signal.SIGTERM
    cell.running.send_signal(signal.SIGTERM)  # nothing to do, and no error


@pytest.mark.parametrize(
    ("ended", "kills", "reaped"),
    [
        (Exit(3), 1, Exit(3)),  # a child of it was killed
        (KILLED, 0, KILLED),
        (KILLED, 1, Exit(None, signal=signal.SIGKILL, oom_killed=True)),
        (Exit(None, signal=signal.SIGTERM), 1, Exit(None, signal=signal.SIGTERM)),
    ],
)
def test_how_a_command_ended(cell: Cell, ended: Exit, kills: int, reaped: Exit) -> None:
    cell.running.begin(limited=True)
    cell.engine.state(OOMKilled=True)  # the kernel's counter of the group knows better
    cell.kills(kills)
    cell.keeper.ended = ended
    os.kill(cell.pid, signal.SIGKILL)
    assert cell.running.wait(10)
    cell.stream.close()
    assert cell.running.reap() == reaped
    assert cell.keeper.mark == cell.attachment.mark
    assert cell.running.reap() == reaped
    assert cell.running.wait(0)


@pytest.mark.parametrize(("code", "reaped"), [(137, KILLED), (4, Exit(4)), (128, Exit(128))])
def test_a_keeper_that_was_killed_too_leaves_the_exit_to_the_engine(
    cell: Cell, code: int, reaped: Exit
) -> None:
    cell.running.begin(limited=True)
    cell.engine.has("POST /containers/ID/wait", StatusCode=code)
    cell.keeper.ended = None
    os.kill(cell.pid, signal.SIGKILL)
    assert cell.running.wait(10)
    cell.stream.close()
    assert cell.running.reap() == reaped
    assert cell.running.unseen == (
        "the container was killed with its command, so the last counters are lost"
    )


def test_a_limit_that_kills_the_keeper_is_the_end_of_the_command(cell: Cell) -> None:
    cell.keeper.child = None
    cell.kills(1)
    cell.running.begin(limited=True)
    assert cell.running.wait(0)
    assert cell.running.reap() == Exit(None, signal=signal.SIGKILL, oom_killed=True)
    assert (cell.running.cgroup, cell.running.members()) == (None, [])


@pytest.mark.parametrize(("limited", "kills"), [(False, 1), (True, 0)])
def test_a_keeper_that_does_not_start_is_an_error(cell: Cell, limited: bool, kills: int) -> None:
    cell.keeper.child = None
    cell.kills(kills)
    with pytest.raises(IsolationUnavailable, match="did not start in this image"):
        cell.running.begin(limited=limited)
    assert not cell.keeper.started


def test_a_group_that_is_not_mounted_here_is_an_error(cell: Cell) -> None:
    cell.kernel.mounts.write_text("")
    with pytest.raises(IsolationUnavailable, match="memory cgroup of the container is not mounted"):
        cell.running.begin(limited=True)


def test_processes_of_another_machine_are_an_error(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(container, "read_kernel", lambda _: "/docker/another")
    with pytest.raises(IsolationUnavailable, match="needs a Docker engine on this machine"):
        cell.running.begin(limited=True)


def test_processes_of_another_user_are_killed_by_the_engine(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    def may_not(_pid: int, _number: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    cell.running.begin(limited=False)
    with monkeypatch.context() as patched:
        patched.setattr(os, "kill", may_not)
        cell.running.kill()
        cell.running.send_signal(signal.SIGTERM)
    [asked] = cell.engine.asked("POST /containers/ID/kill")
    assert asked.query == {"signal": "9"}


def test_without_pidfds_a_command_ends_when_it_has_left_its_group(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weighin.isolation.docker.command.open_process", lambda _: None)
    cell.running.begin(limited=False)
    assert not cell.running.wait(0)
    (procs := cell.group / "cgroup.procs").unlink()
    with procs.open("w") as file:
        file.write(f"{cell.keeper_pid}\n")
    assert cell.running.wait(10)


def test_the_end_of_a_command_ends_its_streams_and_its_container(cell: Cell) -> None:
    cell.running.begin(limited=False)
    cell.running.close()
    assert cell.closed == 1
    assert cell.stream.hears() == b""
