"""What an engine is asked for each container, and what becomes of engines that are refused."""

import json
import os
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import docker
import pytest
import requests.exceptions
import urllib3.exceptions
from docker.errors import APIError, DockerException
from factories import refused
from fakes import JOB
from leftovers import wait_until
from recorded_engine import CONTAINER, Answer, RecordedEngine, playing
from snapshots import Compare

from weighin import child_process
from weighin.cell import Cell
from weighin.errors import ConfigError, IsolationUnavailable
from weighin.isolation import cgroup
from weighin.isolation import docker as docker_isolation
from weighin.isolation.base import Exit, Streams
from weighin.isolation.docker import (
    DockerIsolation,
    DockerStarted,
    _Pump,
    connect,
    explained,
    remove,
)
from weighin.probes.cgroup import LOCK_VARIABLE, is_exiting, this_process
from weighin.units import MIB

Patch = pytest.MonkeyPatch
USER = f"{os.getuid()}:{os.getgid()}"
HOST = socket.gethostname()


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: Patch) -> Iterator[RecordedEngine]:
    """An engine of another machine: the container's first process is none of the container here."""
    monkeypatch.setenv(LOCK_VARIABLE, "/run/a.lock")
    with playing(tmp_path, monkeypatch) as played:
        played.state(Pid=os.getpid(), Running=True)
        yield played


def start(target: str = "", **cell: Any) -> None:
    DockerIsolation().start(replace(JOB.cell, **cell), ["python"], target)


def foreign(engine: RecordedEngine, act: Callable[[], object]) -> None:
    """Let ``act`` start a container, which is removed because its processes are not here."""
    with pytest.raises(IsolationUnavailable, match="are not visible here"):
        act()
    engine.attached().close()


# -- what an engine is asked to create


def shown(engine: RecordedEngine, folder: Path) -> str:
    """Return what the engine was asked to create, without what differs from machine to machine."""
    [request] = engine.asked("POST /containers/create")
    body = {name: value for name, value in request.body.items() if value} | request.query
    for name in ("AttachStdin", "AttachStdout", "AttachStderr"):  # by the SDK
        del body[name]
    host = body["HostConfig"] = {
        name: value
        for name, value in body["HostConfig"].items()
        if value or (name, value) == ("MemorySwappiness", 0)
    }
    mounts = host.pop("Mounts")
    assert {mount["Type"] for mount in mounts} == {"bind"}
    host["Mounts"] = {
        mount["Target"]: "read-only" if mount["ReadOnly"] else mount["Source"]
        for mount in mounts
        if not mount["ReadOnly"] or mount["Target"].startswith((str(folder), "/weighin/sh"))
    } | {"/usr": any(mount["Target"] == "/usr" for mount in mounts)}
    body["name"] = body["name"].replace(str(os.getpid()), "PID").rpartition("-")[0]
    if body.get("User") == USER:
        body["User"] = "USER"
    text = json.dumps(body, indent=1, sort_keys=True)
    text = text.replace(str(folder), "FOLDER").replace(this_process(), "OWNER")
    return text.replace(f'"{HOST}"', '"HOST"') + "\n"


WORKERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "worker": ({}, {}),
    "worker of the usual lock": ({}, {}),
    # The limit is set when the container and the worker's shell have started.
    "limit on v1": ({"ram_limit_bytes": 64 * MIB}, {"CgroupVersion": "1"}),
    "limit on v2": ({"ram_limit_bytes": 64 * MIB}, {"CgroupVersion": "2"}),
    "gpu": ({"device": "cuda"}, {}),
    # Root of a rootless engine is this user; no user is mapped.
    "rootless": ({}, {"SecurityOptions": ["name=seccomp,profile=default", "name=rootless"]}),
    "userns": ({}, {"SecurityOptions": ["name=seccomp,profile=default", "name=userns"]}),
}


@pytest.mark.parametrize("name", WORKERS)
def test_what_an_engine_creates_for_a_worker(
    name: str, engine: RecordedEngine, tmp_path: Path, monkeypatch: Patch, same: Compare
) -> None:
    fields, info = WORKERS[name]
    engine.has("GET /info", **info)
    if name == "worker of the usual lock":
        monkeypatch.delenv(LOCK_VARIABLE)
    files = {"/dev": [Path("/dev/null")]}
    monkeypatch.setattr(Path, "glob", lambda path, _: files.get(str(path), []))
    foreign(engine, lambda: start(isolation="docker", **fields))
    same(f"docker/{name.replace(' ', '_')}.json", shown(engine, tmp_path))


def test_a_save_may_write_to_its_folder_alone(engine: RecordedEngine, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (link := tmp_path / "link").symlink_to(tmp_path / "real")
    foreign(engine, lambda: start(str(link)))
    assert json.loads(shown(engine, tmp_path))["HostConfig"]["Mounts"] == {
        "FOLDER/link": "FOLDER/real", "FOLDER/real": "FOLDER/real", "/usr": True
    }  # fmt: skip


@pytest.mark.parametrize("image", ["", "some:image"], ids=["this machine", "an image"])
def test_a_command_sees_its_folder_and_runs_as_this_user(
    image: str, engine: RecordedEngine, tmp_path: Path, same: Compare
) -> None:
    (data := tmp_path / "data").touch()
    cell = Cell.of_command("serve", ("serve", "model"), "docker", ram_limit_bytes=64 * MIB)
    with Path(os.devnull).open("r+b") as nothing, pytest.raises(IsolationUnavailable):
        streams = Streams(*[nothing.fileno()] * 3)
        DockerIsolation(image).start(cell, cell.command, str(tmp_path), streams, [str(data)])
    engine.attached().close()
    name = "command_of_an_image" if image else "command"
    same(f"docker/{name}.json", shown(engine, tmp_path))
    assert len(engine.asked("DELETE /containers/ID")) == 1


def test_paths_that_cannot_be_mounted_are_refused_before_the_engine_is_asked(
    tmp_path: Path, engine: RecordedEngine
) -> None:
    cell, isolation = Cell.of_command("x", ("x",), "docker"), DockerIsolation("some:image")
    with pytest.raises(ConfigError, match="the current folder / cannot be mounted"):
        isolation.start(cell, cell.command, "/", Streams())
    with pytest.raises(ConfigError, match=f"mounts: {tmp_path}/no: there is no such file"):
        isolation.start(cell, cell.command, str(tmp_path), Streams(), [f"{tmp_path}/no"])
    assert engine.requests == []


def test_the_variables_of_a_worker_are_its_cells_and_those_that_change_figures(
    engine: RecordedEngine, monkeypatch: Patch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(docker_isolation, "DockerStarted", lambda *given_: given.extend(given_))
    for name in ("MALLOC_ARENA_MAX", "OMP_NUM_THREADS", "SECRET"):
        monkeypatch.setenv(name, "7")
    start(isolation="docker", environment={"OMP_NUM_THREADS": "2"})
    [told] = [one for one in given if isinstance(one, dict)]
    variables = dict(line.split("=", 1) for line in told["environment"])
    assert (variables["MALLOC_ARENA_MAX"], variables["OMP_NUM_THREADS"]) == ("7", "2")
    assert (variables["HOME"], variables["PYTHONDONTWRITEBYTECODE"]) == ("/tmp", "1")
    assert "SECRET" not in variables


def test_the_empty_image_is_made_where_it_is_missing(engine: RecordedEngine) -> None:
    foreign(engine, start)
    assert engine.asked("POST /images/create") == []
    engine.says("GET /images/json", Answer(200, []))
    engine.says("POST /images/create", Answer(500, {"message": "no space left on device"}))
    assert "could not start a container: no space left" in refused(start)
    [asked] = engine.asked("POST /images/create")
    assert (asked.query["repo"], asked.query["tag"]) == ("localhost/weighin-empty", "latest")


def test_a_record_names_the_engine_and_the_users_image(engine: RecordedEngine) -> None:
    described = {
        "engine": "20.10.24+dfsg1", "cgroup_driver": "cgroupfs", "cgroup_version": "1",
        "storage_driver": "overlay2",
    }  # fmt: skip
    assert DockerIsolation().describe() == described
    assert DockerIsolation("some:image").describe() == described | {"image": "some:image"}


# -- engines that are refused


def test_a_foreign_engine_is_refused_and_keeps_no_container(engine: RecordedEngine) -> None:
    foreign(engine, DockerIsolation().check)
    assert engine.calls() == [
        "POST /containers/create", "POST /containers/ID/attach", "POST /containers/ID/start",
        "GET /containers/ID/json", "DELETE /containers/ID",
    ]  # fmt: skip


NO_LIMIT = "cannot limit the memory and swap of a container\nboot with cgroup_"


@pytest.mark.parametrize(
    ("info", "why"),
    [
        ({"MemoryLimit": False}, NO_LIMIT),
        ({"SwapLimit": False}, NO_LIMIT),
        ({"KernelVersion": "6.12.5-linuxkit"}, "are not visible here\nrun weighin on the engine's"),
    ],
    ids=["no memory limit", "no swap limit", "another kernel"],
)
def test_an_engine_that_cannot_limit_here_does_not_pass(
    info: dict[str, Any], why: str, engine: RecordedEngine, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(cgroup, "swap_is_on", lambda: True)
    engine.has("GET /info", **info)
    assert why in refused(DockerIsolation().check, kind=IsolationUnavailable)
    assert engine.calls() == []


def test_an_engine_that_cannot_limit_swap_is_tried_where_there_is_none(
    engine: RecordedEngine, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(cgroup, "swap_is_on", lambda: False)
    engine.has("GET /info", SwapLimit=False, KernelVersion=os.uname().release)
    foreign(engine, DockerIsolation().check)


def test_a_container_whose_first_process_ends_at_once(engine: RecordedEngine) -> None:
    engine.state(Pid=0, Running=False)
    told = refused(start, kind=IsolationUnavailable)
    assert told == (
        "weighin's shell, which starts the command in the container, did not start\n"
        "see whether a shell starts without weighin: docker run IMAGE sh"
    )
    engine.attached().close()


def unreachable(error: Exception) -> str:
    with Patch.context() as patch:
        patch.setenv("DOCKER_HOST", "unix:///var/run/docker.sock")
        patch.setattr(socket.socket, "connect", Mock(side_effect=error))
        return refused(DockerIsolation().check, kind=IsolationUnavailable)


def test_what_is_said_of_an_engine_that_cannot_be_used(
    engine: RecordedEngine, same: Compare
) -> None:
    response = requests.Response()
    response.status_code = 500
    words = "Minimum memory limit allowed is 6MB"
    memory = APIError("the HTTP library's words", response=response, explanation=words)
    image = docker.errors.ImageNotFound("No such image: some:image")
    # It answered when the worker started, and is gone since.
    cause = FileNotFoundError(2, "No such file or directory")
    aborted = urllib3.exceptions.ProtocolError("Connection aborted.", cause)
    stopped = requests.exceptions.ConnectionError(aborted)
    client = Mock(remove_container=Mock(side_effect=stopped))
    texts = [
        unreachable(PermissionError(13, "Permission denied")),
        unreachable(ConnectionRefusedError(111, "Connection refused")),
        unreachable(DockerException("Install paramiko package to enable ssh:// support\nmore")),
        refused(explained("run a container")(Mock(side_effect=memory)), kind=IsolationUnavailable),
        refused(explained("describe an image")(Mock(side_effect=image)), kind=IsolationUnavailable),
        refused(remove, client, "weighin-1", kind=IsolationUnavailable),
        refused(DockerIsolation().check, kind=IsolationUnavailable),  # on another machine
    ]
    engine.attached().close()
    same("docker/unusable.txt", "\n\n".join(texts) + "\n")


# -- what dead runs left


def test_the_containers_of_dead_runs_on_this_machine_are_removed(
    engine: RecordedEngine, monkeypatch: Patch
) -> None:
    ended = "-".join(["1", "1", *this_process().split("-")[2:]])
    containers: dict[str, dict[str, str]] = {
        "weighin-1-dead": {"weighin.owner": ended},
        "weighin-2-living": {"weighin.owner": this_process()},
        "weighin-3-other-lock": {"weighin.owner": ended, "weighin.lock": "-0a1b2c3d"},
    }
    found = [
        {"Id": CONTAINER, "Names": [f"/{name}"], "Labels": labels | {"weighin.host": HOST}}
        for name, labels in containers.items()
    ]
    engine.says("GET /containers/json", Answer(200, found))
    isolation = DockerIsolation()
    assert isolation.remove_stale() == []
    monkeypatch.delenv(LOCK_VARIABLE)
    assert isolation.remove_stale() == [
        "container weighin-1-dead of process 1",
        "container weighin-3-other-lock of process 1",
    ]
    removed, _ = engine.asked("DELETE /containers/ID")
    assert removed.path.endswith("/containers/weighin-1-dead")
    assert removed.query == {"v": "True", "force": "True", "link": "False"}
    for request in engine.asked("GET /containers/json"):  # of gpu1, and none of gpu10
        assert f'"weighin.host={HOST}"' in request.query["filters"]
        assert request.query["all"] == "1"


def test_containers_that_the_engine_does_not_list_are_an_error(engine: RecordedEngine) -> None:
    engine.says("GET /containers/json", Answer(500, {"message": "out of order"}))
    told = refused(DockerIsolation().remove_stale, kind=IsolationUnavailable)
    assert "could not list the containers: out of order" in told


@pytest.mark.parametrize("status", [404, 500])
def test_a_removal_that_is_under_way_is_waited_for(status: int, engine: RecordedEngine) -> None:
    under_way = Answer(409, {"message": "removal is in progress"})
    engine.says("DELETE /containers/ID", under_way, Answer(status, {"message": "busy"}))
    engine.says("POST /containers/ID/wait", Answer(200, {"StatusCode": 0}))
    if status == 404:
        remove(connect(), CONTAINER)
    else:  # the other removal failed
        assert f"remove the container {CONTAINER}: busy" in refused(remove, connect(), CONTAINER)
    [asked] = engine.asked("POST /containers/ID/wait")
    assert asked.query["condition"] == "removed"


# -- the end of a command


class Held(DockerStarted):
    """A command whose container has ``others``: processes that this user may not kill."""

    others: tuple[int, ...] = ()

    def __init__(self, pid: int, client: Any) -> None:
        self._client, self._container, self.exec = client, CONTAINER, "ab" * 32
        self._first_stdin, self._code = None, 137
        self._first_pid = self.pid = pid
        self._pump = Mock()

    def members(self) -> list[int]:
        return [*self.others]


@pytest.mark.parametrize("status", [204, 409, 500])
@pytest.mark.parametrize("code", [3, None])
def test_a_container_that_only_the_engine_may_kill(
    status: int, code: int | None, engine: RecordedEngine, sleeper: int, monkeypatch: Patch
) -> None:
    (running := Held(sleeper, connect())).others = (1,)
    state = Answer(200, {"Running": code is None, "ExitCode": code})
    engine.says("GET /exec/ID/json", state, Answer(404, {"message": "no such exec"}))
    engine.says("POST /containers/ID/kill", Answer(status, {"message": "out of order"}))
    engine.says("DELETE /containers/ID", Answer(500, {"message": "out of order"}))
    monkeypatch.setattr(child_process, "signal_each", Mock(side_effect=PermissionError))
    running.kill()
    running.kill()
    assert engine.calls() == ["POST /containers/ID/kill"] * 2  # also after a failed inspection
    assert running.reap() == (Exit(3) if code else Exit(None, signal=9))
    assert "remove the container" in refused(running.close)


LAST_THREAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=[600]).start()
print(end="x", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


def test_without_a_pidfd_a_command_lives_until_its_last_thread_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", LAST_THREAD], stdout=subprocess.PIPE) as command:
        assert command.stdout and command.stdout.read(1)
        running = Held(command.pid, client := Mock())
        wait_until(lambda: is_exiting(command.pid), "the first thread runs")
        assert not running.has_ended()
        command.kill()
        wait_until(running.has_ended, "it does not end")
        assert client.mock_calls == []


def test_the_status_of_another_processes_child_is_known_when_it_was_reaped() -> None:
    with subprocess.Popen(["sh", "-c", "kill -9 $$"]) as running:
        process = child_process.open_process(running.pid)
        assert process is not None
        assert child_process.wait_status(process) is None  # nobody has reaped it yet
        running.wait()
    assert child_process.wait_status(process) in (signal.SIGKILL, None)  # None before Linux 6.15
    os.close(process)


# -- streams


class Wires:
    """A pump, and the engine's end of its stream."""

    def __init__(self, *files: int) -> None:
        self.engine, ours = socket.socketpair()
        self.engine.settimeout(60)
        self.pump = _Pump(Streams(*files), list[int]().append)
        self.pump.stream = ours

    def close(self) -> None:
        self.engine.close()
        self.pump.finish()
        self.pump.close()
        self.pump.close()


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """The user's end of a terminal, and ours."""
    ends = os.openpty()
    yield ends
    for end in ends:
        os.close(end)


@pytest.mark.usefixtures("no_garbage")
def test_a_pump_that_never_began_leaves_no_descriptor() -> None:
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with Path(os.devnull).open("r+b") as nothing:
        with closing(Wires(*[nothing.fileno()] * 3)) as wires:
            own = [file for file in (*wires.pump.files, wires.pump._over) if file is not None]
        assert len(own) == 4
        for file in own:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(file)
    # A thread of an earlier test may close one of its own meanwhile.
    assert set(os.listdir("/proc/self/fd")) <= before  # noqa: PTH208


def test_a_terminal_that_is_closed_is_as_it_was(terminal: tuple[int, int]) -> None:
    usual = termios.tcgetattr(terminal[1])
    with closing(Wires(*[terminal[1]] * 3)) as wires:
        wires.pump.begin()
        assert termios.tcgetattr(terminal[1]) != usual
    assert termios.tcgetattr(terminal[1]) == usual


@pytest.mark.parametrize("is_file", [0, 1, 2])
def test_a_stream_to_a_file_keeps_all_apart(terminal: tuple[int, int], is_file: int) -> None:
    files = [terminal[1]] * 3
    with Path(os.devnull).open("r+b") as file:
        files[is_file] = file.fileno()
        with closing(Wires(*files)) as wires:
            assert not wires.pump.is_terminal


def test_a_command_in_the_background_gets_no_input(
    terminal: tuple[int, int], monkeypatch: Patch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "tcgetpgrp", lambda _: os.getpgrp() + 1)
        wires = Wires(*[terminal[1]] * 3)
    with closing(wires):
        assert not wires.pump.is_terminal
        wires.pump.begin()
        os.write(terminal[0], b"key")
        assert wires.engine.recv(3) == b""
