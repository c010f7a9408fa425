"""What an engine is asked for each container, and what becomes of engines that are refused."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fakes import JOB
from leftovers import wait_until
from recorded_engine import CONTAINER, Answer, RecordedEngine, playing

from weighin import child_process
from weighin.cell import Cell, Job
from weighin.errors import ConfigError, IsolationUnavailable
from weighin.isolation import cgroup, select
from weighin.isolation import docker as docker_isolation
from weighin.isolation.base import Exit, Streams
from weighin.isolation.docker import DockerIsolation, DockerStarted, connect, remove
from weighin.probes.cgroup import LOCK_VARIABLE, is_exiting, this_process
from weighin.units import MIB

LAST_THREAD = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=[60]).start()
print(end="x", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
ENDED = "-".join(["1", "1", *this_process().split("-")[2:]])


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedEngine]:
    """An engine of another machine: the container's first process is none of the container here."""
    with playing(tmp_path, monkeypatch) as played:
        played.state(Pid=os.getpid(), Running=True)
        yield played


def job(**fields: Any) -> Job:
    return replace(JOB, cell=replace(JOB.cell, isolation="docker", **fields))


def start(job: Job = JOB) -> None:
    DockerIsolation().start(job.cell, ["python"], job.target)


def created(engine: RecordedEngine, wanted: Job = JOB) -> dict[str, Any]:
    """Return what the engine is asked to create for a job."""
    with pytest.raises(IsolationUnavailable, match="are not visible here"):
        start(wanted)
    engine.attached().close()
    [request] = engine.asked("POST /containers/create")
    return dict(request.body) | request.query


def test_an_engine_whose_processes_are_not_here_is_refused_and_keeps_no_container(
    engine: RecordedEngine,
) -> None:
    with pytest.raises(IsolationUnavailable, match="are not visible here"):
        DockerIsolation().check()
    engine.attached().close()
    assert engine.calls() == [
        "POST /containers/create",
        "POST /containers/ID/attach",
        "POST /containers/ID/start",
        "GET /containers/ID/json",
        "DELETE /containers/ID",
    ]


def test_auto_passes_a_foreign_engine_and_says_so(
    engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(select, "NAMES", ("docker", "process"))
    chosen, note = select.choose("auto", limited=False)
    engine.attached().close()
    assert (chosen.name, note) == (
        "process",
        "isolation process: weighin needs a Docker engine on this machine: the processes of the"
        " current Docker engine are not visible here",
    )


@pytest.mark.parametrize(
    ("field", "value", "why"),
    [
        (
            "MemoryLimit",
            False,
            "cannot limit the memory and swap of a container\nboot with cgroup_",
        ),
        ("SwapLimit", False, "cannot limit the memory and swap of a container\nboot with cgroup_"),
        ("KernelVersion", "6.12.5-linuxkit", "are not visible here\nrun weighin on the engine's"),
    ],
)
def test_an_engine_that_cannot_limit_here_does_not_pass(
    engine: RecordedEngine, field: str, value: object, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "swap_is_on", lambda: True)
    engine.has("GET /info", **{field: value})
    with pytest.raises(IsolationUnavailable, match=why):
        DockerIsolation().check()
    assert engine.calls() == []


def test_an_engine_that_counts_no_swap_passes_on_a_machine_without_any(
    engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "swap_is_on", lambda: False)
    engine.has("GET /info", SwapLimit=False, KernelVersion=os.uname().release)
    with pytest.raises(IsolationUnavailable, match="are not visible here"):  # it was tried
        DockerIsolation().check()
    engine.attached().close()


def test_a_container_whose_first_process_ends_at_once(engine: RecordedEngine) -> None:
    engine.state(Pid=0, Running=False)
    with pytest.raises(IsolationUnavailable, match=r"weighin's shell.* did not start"):
        start()
    engine.attached().close()


def test_the_empty_image_is_made_where_it_is_missing(engine: RecordedEngine) -> None:
    created(engine)
    assert engine.asked("POST /images/create") == []
    engine.says("GET /images/json", Answer(200, []))
    engine.says("POST /images/create", Answer(500, {"message": "no space left on device"}))
    with pytest.raises(IsolationUnavailable, match="could not start a container: no space left"):
        start()
    [asked] = engine.asked("POST /images/create")
    assert (asked.query["repo"], asked.query["tag"]) == ("localhost/weighin-empty", "latest")


def test_a_record_names_the_engine_and_the_users_image(engine: RecordedEngine) -> None:
    described = {
        "engine": "20.10.24+dfsg1",
        "cgroup_driver": "cgroupfs",
        "cgroup_version": "1",
        "storage_driver": "overlay2",
    }
    assert DockerIsolation().describe() == described
    assert DockerIsolation("some:image").describe() == described | {"image": "some:image"}


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_limit_forbids_swap(engine: RecordedEngine, version: str) -> None:
    engine.has("GET /info", CgroupVersion=version)
    host = created(engine, job(ram_limit_bytes=64 * MIB))["HostConfig"]
    assert host.get("MemorySwappiness") == (0 if version == "1" else None)
    assert "Memory" not in host  # it is set when the container and the worker's shell have started


def test_a_worker_has_no_rights_and_no_network(engine: RecordedEngine) -> None:
    host = created(engine)["HostConfig"]
    assert {name: host[name] for name in (
        "NetworkMode", "IpcMode", "ReadonlyRootfs", "CapDrop", "SecurityOpt", "PidsLimit", "ShmSize",
        "Tmpfs", "AutoRemove",
    )} == {
        "NetworkMode": "none", "IpcMode": "private", "ReadonlyRootfs": True, "CapDrop": ["ALL"],
        "SecurityOpt": ["label=disable", "no-new-privileges"], "PidsLimit": 4096, "ShmSize": 64 * MIB,
        "Tmpfs": {"/tmp": f"size={64 * MIB},mode=1777"}, "AutoRemove": True,
    }  # fmt: skip
    assert host["LogConfig"]["Type"] == "none"
    assert {(mount["Type"], mount["ReadOnly"]) for mount in host["Mounts"]} == {("bind", True)}
    assert not {"Devices", "DeviceRequests", "UsernsMode"} & {k for k, v in host.items() if v}


def test_a_save_may_write_to_its_folder_alone(engine: RecordedEngine, tmp_path: Path) -> None:
    (target := tmp_path / "real").mkdir()
    (link := tmp_path / "link").symlink_to(target)
    host = created(engine, replace(JOB, target=str(link)))["HostConfig"]
    writable = {
        mount["Target"]: mount["Source"] for mount in host["Mounts"] if not mount["ReadOnly"]
    }
    assert writable == {str(link): str(target), str(target): str(target)}


def test_the_gpus_are_passed_as_devices(
    engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"/dev": [Path("/dev/null")]}
    monkeypatch.setattr(Path, "glob", lambda path, _: files.get(str(path), []))
    [device] = created(engine, job(device="cuda"))["HostConfig"]["Devices"]
    assert (device["PathOnHost"], device["PathInContainer"]) == ("/dev/null", "/dev/null")


def test_a_container_is_named_and_labelled_after_this_process(
    engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LOCK_VARIABLE)
    asked = created(engine)
    assert asked["name"].startswith(f"weighin-{os.getpid()}-")
    assert asked["Labels"] == {
        "weighin.owner": this_process(),
        "weighin.host": socket.gethostname(),
        "weighin.lock": "",
    }
    assert asked["User"] == f"{os.getuid()}:{os.getgid()}"
    assert (asked["WorkingDir"], asked["Image"]) == ("/tmp", "localhost/weighin-empty:latest")
    assert (asked["Entrypoint"], asked["Cmd"]) == (["/bin/sh"], ["-c", "read -r _"])
    assert (asked["OpenStdin"], asked["StdinOnce"]) == (True, True)
    assert "LD_PRELOAD" in asked["Env"]  # without a value, so that the first process has none


@pytest.mark.parametrize(
    ("option", "user", "mode"),
    [("name=rootless", "", ""), ("name=userns", f"{os.getuid()}:{os.getgid()}", "host")],
)
def test_root_of_a_rootless_engine_is_this_user_and_no_user_is_mapped(
    engine: RecordedEngine, option: str, user: str, mode: str
) -> None:
    engine.has("GET /info", SecurityOptions=["name=seccomp,profile=default", option])
    asked = created(engine)
    assert (asked["User"], asked["HostConfig"].get("UsernsMode") or "") == (user, mode)


def test_the_containers_of_dead_runs_on_this_machine_are_removed(
    engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def container(name: str, owner: str, lock: str = "") -> dict[str, Any]:
        labels = {"weighin.owner": owner, "weighin.host": socket.gethostname()}
        labels |= {"weighin.lock": lock} if lock else {}
        return {"Id": CONTAINER, "Names": [f"/{name}"], "Labels": labels}

    containers = [
        container("weighin-1-dead", ENDED),
        container("weighin-2-living", this_process()),
        container("weighin-3-other-lock", ENDED, lock="-0a1b2c3d"),
    ]
    engine.says("GET /containers/json", Answer(200, containers))
    isolation = DockerIsolation()
    monkeypatch.setenv(LOCK_VARIABLE, "/run/a.lock")
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
        assert f'"weighin.host={socket.gethostname()}"' in request.query["filters"]
        assert request.query["all"] == "1"


def test_containers_that_the_engine_does_not_list_are_an_error(engine: RecordedEngine) -> None:
    engine.says("GET /containers/json", Answer(500, {"message": "out of order"}))
    with pytest.raises(IsolationUnavailable, match="could not list the containers: out of order"):
        DockerIsolation().remove_stale()


@pytest.mark.parametrize("status", [404, 500])
def test_a_container_that_is_being_removed_is_waited_for(
    status: int, engine: RecordedEngine
) -> None:
    under_way = Answer(409, {"message": "removal is in progress"})
    engine.says("DELETE /containers/ID", under_way, Answer(status, {"message": "busy"}))
    engine.says("POST /containers/ID/wait", Answer(200, {"StatusCode": 0}))
    if status == 404:
        remove(connect(), CONTAINER)
    else:  # the other removal failed
        with pytest.raises(IsolationUnavailable, match=f"remove the container {CONTAINER}: busy"):
            remove(connect(), CONTAINER)
    [asked] = engine.asked("POST /containers/ID/wait")
    assert asked.query["condition"] == "removed"


class Held(DockerStarted):
    """A command whose container has ``others``: processes that this user may not kill."""

    others: tuple[int, ...] = ()

    def __init__(self, pid: int) -> None:
        self._client, self._container, self.exec = connect(), CONTAINER, "ab" * 32
        self._first_stdin, self._code = None, 137
        self._first_pid = self.pid = pid
        self._pump: Any = SimpleNamespace(finish=lambda: None, close=lambda: None)

    def members(self) -> list[int]:
        return [*self.others]


@pytest.fixture
def sleeper() -> Iterator[int]:
    with subprocess.Popen(["sleep", "60"]) as running:
        yield running.pid
        running.kill()


@pytest.mark.parametrize("status", [204, 409, 500])
@pytest.mark.parametrize(("code", "is_over"), [(3, True), (None, False)])
def test_a_container_that_only_the_engine_may_kill(
    status: int,
    code: int | None,
    is_over: bool,
    engine: RecordedEngine,
    sleeper: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def denied(*_: object) -> None:
        raise PermissionError

    (running := Held(sleeper)).others = (1,)
    state = Answer(200, {"Running": not is_over, "ExitCode": code})
    engine.says("GET /exec/ID/json", state, Answer(404, {"message": "no such exec"}))
    engine.says("POST /containers/ID/kill", Answer(status, {"message": "out of order"}))
    engine.says("DELETE /containers/ID", Answer(500, {"message": "out of order"}))
    monkeypatch.setattr(child_process, "signal_each", denied)
    running.kill()
    running.kill()
    assert engine.calls() == ["POST /containers/ID/kill"] * 2  # also after a failed inspection
    assert running.reap() == (Exit(3) if is_over else Exit(None, signal=9))
    with pytest.raises(IsolationUnavailable, match="remove the container"):
        running.close()


def test_without_a_pidfd_a_command_lives_until_its_last_thread_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", LAST_THREAD], stdout=subprocess.PIPE) as command:
        assert command.stdout and command.stdout.read(1)
        running = Held(command.pid)
        wait_until(lambda: is_exiting(command.pid), "the first thread runs")
        assert not running.has_ended()
        command.kill()
        wait_until(running.has_ended, "it does not end")


@pytest.mark.parametrize("image", ["", "some:image"])
def test_a_command_sees_its_folder_and_runs_as_this_user(
    image: str, engine: RecordedEngine, tmp_path: Path
) -> None:
    (tmp_path / "data").touch()
    cell = Cell.of_command("serve", ("serve", "model"), "docker", ram_limit_bytes=64 * MIB)
    with Path(os.devnull).open("r+b") as nothing, pytest.raises(IsolationUnavailable):
        streams = Streams(*[nothing.fileno()] * 3)
        DockerIsolation(image).start(
            cell, cell.command, str(tmp_path), streams, [f"{tmp_path}/data"]
        )
    engine.attached().close()
    [request] = engine.asked("POST /containers/create")
    asked, host = request.body, request.body["HostConfig"]
    assert (asked["Image"], asked["WorkingDir"]) == (
        image or "localhost/weighin-empty:latest",
        str(tmp_path),
    )
    assert asked["User"] == f"{os.getuid()}:{os.getgid()}"
    assert host["SecurityOpt"] == ["label=disable"]
    assert not {"CapDrop", "ReadonlyRootfs", "PidsLimit"} & {k for k, v in host.items() if v}
    mounts = {mount["Target"]: mount["ReadOnly"] for mount in host["Mounts"]}
    assert mounts.pop(str(tmp_path)) is False
    assert mounts.pop(f"{tmp_path}/data") is True
    assert {*mounts.values()} == {True}
    assert ("/usr" in mounts) == (not image)
    assert ("/weighin/sh" in mounts) == bool(image)
    assert asked["Entrypoint"] == ["/weighin/loader" if image else "/bin/sh"]
    assert len(engine.asked("DELETE /containers/ID")) == 1


def test_paths_that_cannot_be_mounted(tmp_path: Path) -> None:
    cell, isolation = Cell.of_command("x", ("x",), "docker"), DockerIsolation("some:image")
    with pytest.raises(ConfigError, match="the current folder / cannot be mounted"):
        isolation.start(cell, cell.command, "/", Streams())
    with pytest.raises(ConfigError, match=f"mounts: {tmp_path}/no: there is no such file"):
        isolation.start(cell, cell.command, str(tmp_path), Streams(), [f"{tmp_path}/no"])


def test_the_variables_of_a_worker_are_its_cells_and_those_that_change_figures(
    engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(docker_isolation, "DockerStarted", lambda *given_: given.extend(given_))
    for name in ("MALLOC_ARENA_MAX", "OMP_NUM_THREADS", "SECRET"):
        monkeypatch.setenv(name, "7")
    start(job(environment={"OMP_NUM_THREADS": "2"}))
    assert len(engine.asked("POST /containers/create")) == 1
    [told] = [one for one in given if isinstance(one, dict)]
    variables = dict(line.split("=", 1) for line in told["environment"])
    assert (variables["MALLOC_ARENA_MAX"], variables["OMP_NUM_THREADS"]) == ("7", "2")
    assert (variables["HOME"], variables["PYTHONDONTWRITEBYTECODE"]) == ("/tmp", "1")
    assert "SECRET" not in variables
