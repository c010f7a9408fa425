"""Workers of a recorded engine: what it is asked for each container, and what is removed when."""

import os
import socket
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recorded_engine import CONTAINER, Answer, RecordedEngine, Stream, playing
from scripts import JOB
from test_docker_stream import frame

from weighin.cell import Cell, Job
from weighin.errors import IsolationUnavailable
from weighin.isolation.base import Exit, Streams
from weighin.isolation.docker import packages
from weighin.isolation.docker.engine import connect
from weighin.isolation.docker.image import PYTHON, run_python
from weighin.isolation.docker.isolation import DockerIsolation
from weighin.isolation.docker.stream import STDOUT
from weighin.probes.cgroup import LOCK_VARIABLE, this_process
from weighin.protocol import encode_job
from weighin.units import MIB

BASE = "weighin-base:bookworm"
ENDED = "-".join(["1", "1", *this_process().split("-")[2:]])
NO_CONTAINER = Answer(404, {"message": "No such container: weighin-1"})
IN_PROGRESS = Answer(409, {"message": "removal of container weighin-1 is already in progress"})


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordedEngine]:
    monkeypatch.setattr("weighin.isolation.docker.container._PAUSE_S", 0)
    with playing(tmp_path, monkeypatch) as played:
        played.state(Pid=0, Running=False)  # no process of this machine is in the container
        yield played


def job(**fields: Any) -> Job:
    return replace(JOB, cell=replace(JOB.cell, isolation="docker", **fields))


def created(engine: RecordedEngine, wanted: Job = JOB) -> dict[str, Any]:
    """Return what the engine is asked to create for a job."""
    with closing(DockerIsolation(BASE).start(wanted)), closing(engine.attached()):
        pass
    [request] = engine.asked("POST /containers/create")
    return dict(request.body) | request.query


def test_an_engine_that_can_limit_passes_the_check(engine: RecordedEngine) -> None:
    isolation = DockerIsolation(BASE)
    isolation.check()
    isolation.check()
    assert len(engine.asked("GET /info")) == len(engine.asked("GET /images/ID/json")) == 1


@pytest.mark.parametrize("field", ["MemoryLimit", "SwapLimit"])
def test_an_engine_that_cannot_limit_does_not_pass(engine: RecordedEngine, field: str) -> None:
    engine.has("GET /info", **{field: False})
    with pytest.raises(IsolationUnavailable):
        DockerIsolation(BASE).check()


def test_an_image_that_a_registry_has_is_not_pulled_by_the_check(engine: RecordedEngine) -> None:
    engine.says("GET /images/ID/json", Answer(404, {"message": f"No such image: {BASE}"}))
    engine.says("GET /distribution/weighin-base:bookworm/json", Answer(200, {}))
    DockerIsolation(BASE).check()
    engine.says(
        "GET /distribution/weighin-base:bookworm/json", Answer(401, {"message": "who are you"})
    )
    with pytest.raises(IsolationUnavailable, match="cannot be pulled from a registry: who are you"):
        DockerIsolation(BASE).check()


def test_a_record_names_the_engine_and_its_image(engine: RecordedEngine) -> None:
    isolation = DockerIsolation(BASE)
    isolation.prepare()
    described = isolation.describe()
    assert described.pop("image").startswith("weighin:")
    assert described == {
        "engine": "20.10.24+dfsg1",
        "cgroup_driver": "cgroupfs",
        "cgroup_version": "1",
        "storage_driver": "overlay2",
        "base_image": BASE,
    }
    given = DockerIsolation(BASE, image="some:image")
    assert {"base_image", "image"}.isdisjoint(given.describe())
    given.prepare()
    assert given.describe()["image"] == "some:image"


def test_an_engine_whose_processes_are_not_here_is_refused(engine: RecordedEngine) -> None:
    engine.state(Pid=os.getpid(), Running=True)
    with pytest.raises(IsolationUnavailable, match="are not visible here"):
        DockerIsolation(BASE).start(JOB)
    engine.attached().close()
    assert engine.calls()[-1] == "DELETE /containers/ID"


def test_a_worker_is_attached_before_it_starts_and_then_gets_its_job(
    engine: RecordedEngine,
) -> None:
    wanted = job(ram_limit_bytes=64 * MIB, environment={"MODE": "fast"})
    running = DockerIsolation(BASE).start(wanted)
    stream = Stream(engine.attached())
    sent = stream.hears()
    assert sent.endswith(b"\n")
    assert sent == encode_job(
        replace(
            wanted,
            checkpoint="/weighin/checkpoint/c",
            manifest="/weighin/manifest/m",
            strategy_path="/weighin/strategy/s.py",
        )
    )
    stream.says(b"one", b"two")
    stream.ends(3, b"noise")
    assert [running.channel.receive(10), running.channel.receive(10)] == [b"one", b"two"]
    assert running.wait(10) == Exit(3)
    assert running.channel.stderr_tail == b"noise"
    running.close()
    running.close()
    assert stream.hears() == b""  # which ends the keeper
    stream.close()
    assert engine.calls() == [
        "POST /containers/create",
        "POST /containers/ID/attach",
        "POST /containers/ID/start",
        "GET /containers/ID/json",
        "DELETE /containers/ID",
    ]
    [attach] = engine.asked("POST /containers/ID/attach")
    assert attach.query == {"stdin": "1", "stdout": "1", "stderr": "1", "stream": "1"}


@pytest.mark.parametrize("version", ["1", "2"])
def test_a_limit_forbids_swap(engine: RecordedEngine, version: str) -> None:
    engine.has("GET /info", CgroupVersion=version)
    host = created(engine, job(ram_limit_bytes=64 * MIB))["HostConfig"]
    assert (host["Memory"], host["MemorySwap"]) == (64 * MIB, 64 * MIB)
    assert host.get("MemorySwappiness") == (0 if version == "1" else None)


def test_without_a_limit_nothing_is_limited(engine: RecordedEngine) -> None:
    host = created(engine)["HostConfig"]
    assert {"Memory", "MemorySwap", "MemorySwappiness"}.isdisjoint(host)
    assert not host.get("DeviceRequests")


def test_a_worker_has_no_rights_and_no_network(engine: RecordedEngine) -> None:
    host = created(engine)["HostConfig"]
    assert {name: host[name] for name in (
        "NetworkMode", "IpcMode", "ReadonlyRootfs", "CapDrop", "SecurityOpt", "PidsLimit", "ShmSize",
        "Tmpfs",
    )} == {
        "NetworkMode": "none", "IpcMode": "private", "ReadonlyRootfs": True, "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"], "PidsLimit": 4096, "ShmSize": 64 * MIB,
        "Tmpfs": {"/tmp": f"size={64 * MIB},mode=1777"},
    }  # fmt: skip
    assert host["LogConfig"]["Type"] == "none"
    assert {(mount["Type"], mount["ReadOnly"]) for mount in host["Mounts"]} == {("bind", True)}


def test_a_save_may_write_to_its_folder_alone(engine: RecordedEngine) -> None:
    host = created(engine, replace(JOB, target="/somewhere"))["HostConfig"]
    writable = [mount["Source"] for mount in host["Mounts"] if not mount["ReadOnly"]]
    assert writable == ["/somewhere"]


def test_a_gpu_is_passed(engine: RecordedEngine) -> None:
    host = created(engine, job(device="cuda"))["HostConfig"]
    [request] = host["DeviceRequests"]
    assert (request["Count"], request["Capabilities"]) == (-1, [["gpu"]])


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
        "weighin.cell": JOB.cell.id,
    }
    assert asked["User"] == f"{os.getuid()}:{os.getgid()}"
    assert asked["WorkingDir"] == "/tmp"
    assert asked["OpenStdin"] is True
    assert asked["Image"].startswith("weighin:")
    assert asked["Cmd"][-4:] == [PYTHON, "-P", "-m", "weighin.worker"]


def test_root_in_a_rootless_container_is_this_user(engine: RecordedEngine) -> None:
    engine.has("GET /info", SecurityOptions=["name=seccomp,profile=default", "name=rootless"])
    assert not created(engine).get("User")


def test_the_variables_of_a_worker_are_its_cells_and_those_that_change_figures(
    engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MALLOC_ARENA_MAX", "7")
    monkeypatch.setenv("LD_PRELOAD", "")
    monkeypatch.setenv("SECRET", "of this machine")
    wanted = job(environment={"MODE": "fast", "HOME": "/elsewhere"})
    variables = dict(line.split("=", 1) for line in created(engine, wanted)["Env"])
    assert variables["MALLOC_ARENA_MAX"] == "7"
    assert (variables["MODE"], variables["HOME"]) == ("fast", "/tmp")
    assert variables["PYTHONDONTWRITEBYTECODE"] == "1"
    assert {"SECRET", "LD_PRELOAD"}.isdisjoint(variables)


def test_a_container_that_the_engine_does_not_create_is_looked_for_and_removed(
    engine: RecordedEngine,
) -> None:
    engine.says("POST /containers/create", Answer(500, {"message": "no space left on device"}))
    engine.says("DELETE /containers/ID", NO_CONTAINER)
    with pytest.raises(IsolationUnavailable) as caught:
        DockerIsolation(BASE).start(JOB)
    assert caught.value.message == (
        "the Docker engine could not run a container: no space left on device"
    )
    assert (
        len(engine.asked("DELETE /containers/ID")) == 1
    )  # the engine has answered: it is not made


def test_all_containers_are_removed_when_this_process_ends(engine: RecordedEngine) -> None:
    isolation = DockerIsolation(BASE)
    streams = []
    for _ in range(2):
        isolation.start(JOB).channel.close()
        streams.append(engine.attached())
    isolation._remove_all()  # as atexit does
    names = [request.query["name"] for request in engine.asked("POST /containers/create")]
    removed = [request.path.rpartition("/")[2] for request in engine.asked("DELETE /containers/ID")]
    assert sorted(removed) == sorted(names)
    isolation._remove_all()
    assert len(engine.asked("DELETE /containers/ID")) == 2
    for stream in streams:
        stream.close()


def container(name: str, owner: str, lock: str | None = None) -> dict[str, Any]:
    labels = {"weighin.owner": owner, "weighin.host": socket.gethostname()}
    if lock:
        labels["weighin.lock"] = lock
    return {"Id": CONTAINER, "Names": [f"/{name}"], "Labels": labels}


def test_the_containers_of_dead_runs_on_this_machine_are_removed(
    engine: RecordedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(LOCK_VARIABLE)
    containers = [
        container("weighin-1-dead", ENDED),
        container("weighin-2-living", this_process()),
        container("weighin-3-other-lock", ENDED, lock="-0a1b2c3d"),
    ]
    engine.says("GET /containers/json", Answer(200, containers))
    isolation = DockerIsolation(BASE)
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


def python_in_an_image(engine: RecordedEngine, status: int, output: bytes) -> str:
    engine.has("POST /containers/ID/wait", StatusCode=status)
    engine.says("GET /containers/ID/logs", Answer(200, frame(STDOUT, output)))
    with closing(connect()) as client:
        return run_python(client, BASE, "python3", "print(1)")


def test_python_in_an_image_runs_without_a_network_and_leaves_no_container(
    engine: RecordedEngine,
) -> None:
    assert python_in_an_image(engine, 0, b"1\n") == "1"
    [created] = engine.asked("POST /containers/create")
    assert created.body["Cmd"] == ["python3", "-c", "print(1)"]
    assert created.body["HostConfig"]["NetworkMode"] == "none"
    assert created.body["Labels"]["weighin.owner"] == this_process()
    [asked] = engine.asked("GET /containers/ID/logs")
    assert (asked.query["stdout"], asked.query["stderr"]) == ("1", "0")
    assert engine.calls()[-1] == "DELETE /containers/ID"
    [removed] = engine.asked("DELETE /containers/ID")
    assert (removed.query["v"], removed.query["force"]) == ("True", "True")


def test_python_that_the_engine_does_not_start_leaves_no_container(engine: RecordedEngine) -> None:
    engine.says("POST /containers/ID/start", Answer(500, {"message": "no such file: python3"}))
    with pytest.raises(IsolationUnavailable, match="no such file: python3"):
        python_in_an_image(engine, 0, b"")
    assert engine.calls()[-1] == "DELETE /containers/ID"
    engine.says("POST /containers/create", Answer(500, {"message": "no such image"}))
    with pytest.raises(IsolationUnavailable, match="no such image"):
        python_in_an_image(engine, 0, b"")
    assert len(engine.asked("DELETE /containers/ID")) == 1


def test_python_that_fails_in_an_image_says_its_last_line(engine: RecordedEngine) -> None:
    with pytest.raises(IsolationUnavailable) as caught:
        python_in_an_image(engine, 1, b"Traceback\nNo module named venv\n\n")
    assert caught.value.message == (f"python3 failed in the image {BASE}: No module named venv")
    assert engine.asked("GET /containers/ID/logs")[0].query["stderr"] == "1"
    assert engine.calls()[-1] == "DELETE /containers/ID"


def test_containers_that_the_engine_does_not_list_are_an_error(engine: RecordedEngine) -> None:
    engine.says("GET /containers/json", Answer(500, {"message": "out of order"}))
    with pytest.raises(IsolationUnavailable, match="could not list the containers: out of order"):
        DockerIsolation(BASE).remove_stale()


def test_a_command_sees_its_folder_and_runs_as_this_user(
    engine: RecordedEngine, tmp_path: Path
) -> None:
    engine.says("POST /containers/ID/start", Answer(500, {"message": "no such file"}))
    (tmp_path / "data").touch()
    cell = Cell.of_command(
        "serve", ("serve", "model"), "docker", ram_limit_bytes=64 * MIB,
        environment={"MODE": "fast"},
    )  # fmt: skip
    with Path(os.devnull).open("r+b") as nothing, pytest.raises(IsolationUnavailable):
        DockerIsolation(image="some:image").start_command(
            cell, str(tmp_path), Streams(*[nothing.fileno()] * 3), [f"{tmp_path}/data"]
        )
    engine.attached().close()
    [request] = engine.asked("POST /containers/create")
    asked, host = request.body, request.body["HostConfig"]
    assert (asked["Image"], asked["WorkingDir"]) == ("some:image", str(tmp_path))
    assert asked["User"] == f"{os.getuid()}:{os.getgid()}"
    assert (asked["OpenStdin"], asked["Tty"]) == (True, False)
    assert "MODE=fast" in asked["Env"]
    assert asked["Labels"]["weighin.cell"] == cell.id
    assert asked["Labels"]["weighin.owner"] == this_process()
    assert (asked["Entrypoint"] + asked["Cmd"])[-3:] == ["--", "serve", "model"]
    assert (host["Memory"], host["MemorySwap"]) == (64 * MIB, 64 * MIB)
    assert host["LogConfig"]["Type"] == "none"
    mounts = {mount["Target"]: mount["ReadOnly"] for mount in host["Mounts"]}
    assert mounts[str(tmp_path)] is False
    assert mounts[f"{tmp_path}/data"] is True
    assert len(engine.asked("DELETE /containers/ID")) == 1


def test_a_package_that_the_image_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    found = packages.Lacking(notes=("mounting x", "not mounting y"))
    monkeypatch.setattr(packages, "lacking", lambda _: found)
    assert DockerIsolation(BASE).added_code(JOB) == ["mounting x", "not mounting y"]


def test_a_base_image_is_that_of_the_option_or_of_the_variable(
    monkeypatch: pytest.MonkeyPatch, engine: RecordedEngine
) -> None:
    bases = []
    for variable, option in (("", None), ("mine:1", None), ("mine:1", "other:2")):
        monkeypatch.setenv("WEIGHIN_BASE_IMAGE", variable)
        bases.append(DockerIsolation(option).describe()["base_image"])
    assert bases == ["python:3.11-slim-bookworm", "mine:1", "other:2"]
