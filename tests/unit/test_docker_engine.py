"""The exact words for what can go wrong with a Docker engine; none of this needs one."""

import os
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import docker
import pytest
import requests.exceptions
import urllib3.exceptions
from docker.errors import APIError, DockerException, InvalidVersion
from scripts import JOB

from weighin.errors import IsolationUnavailable
from weighin.isolation.base import Exit
from weighin.isolation.docker import engine as docker_engine
from weighin.isolation.docker import isolation, wheels
from weighin.isolation.docker.container import DockerRunning, remove
from weighin.isolation.docker.image import Recipe, find_image
from weighin.isolation.docker.isolation import DockerIsolation
from weighin.units import MIB

ADDRESS = "unix:///var/run/docker.sock"


def api_error(explanation: str, status: int = 500) -> APIError:
    response = requests.Response()
    response.status_code = status
    return APIError("the HTTP library's words", response=response, explanation=explanation)


def as_the_sdk_raises(cause: Exception) -> DockerException:
    """Wrap ``cause`` as docker-py, requests and urllib3 do."""
    protocol = urllib3.exceptions.ProtocolError("Connection aborted.", cause)
    error = DockerException(f"Error while fetching server API version: {protocol.args}")
    error.__cause__ = requests.exceptions.ConnectionError(protocol)
    return error


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            as_the_sdk_raises(PermissionError(13, "Permission denied")),
            f"this user has no permission to use the Docker engine at {ADDRESS}\n"
            "sudo usermod -aG docker $USER, then log in again",
        ),
        (
            as_the_sdk_raises(FileNotFoundError(2, "No such file or directory")),
            f"no Docker engine answers at {ADDRESS}\nset DOCKER_HOST to the address of an engine that runs, or unset it",
        ),
        (
            as_the_sdk_raises(ConnectionRefusedError(111, "Connection refused")),
            f"no Docker engine answers at {ADDRESS}\nset DOCKER_HOST to the address of an engine that runs, or unset it",
        ),
        (
            InvalidVersion("API versions below 1.24 are no longer supported by this library."),
            f"the Docker engine at {ADDRESS} is too old: "
            "API versions below 1.24 are no longer supported by this library.\n"
            "install Docker 20.10 or later",
        ),
        (
            DockerException("Install paramiko package to enable ssh:// support\nmore"),
            f"cannot talk to the Docker engine at {ADDRESS}: "
            "Install paramiko package to enable ssh:// support\n"
            "run docker info, and check DOCKER_HOST",
        ),
    ],
)
def test_an_engine_that_cannot_be_reached(
    error: DockerException, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise error

    monkeypatch.setenv("DOCKER_HOST", ADDRESS)
    monkeypatch.setattr(docker_engine, "_knock", lambda _: None)
    monkeypatch.setattr(docker, "APIClient", refuse)
    with pytest.raises(IsolationUnavailable) as caught:
        DockerIsolation().check()
    assert str(caught.value).replace("http+unix://", "unix://") == text


def test_a_socket_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(IsolationUnavailable, match="no Docker engine answers at") as caught:
        DockerIsolation().check()
    assert caught.value.exit_code == 3


KERNEL = (
    " on the kernel's command line (/etc/default/grub: GRUB_CMDLINE_LINUX, then sudo update-grub "
    "and reboot)"
)


@pytest.mark.parametrize(
    ("info", "text"),
    [
        (
            {"MemoryLimit": False, "SwapLimit": False},
            "the Docker engine cannot limit memory: the kernel's memory controller is off\n"
            f"boot with cgroup_enable=memory swapaccount=1{KERNEL}",
        ),
        (
            {"MemoryLimit": True, "SwapLimit": False},
            "the Docker engine cannot keep a container from swapping: the kernel does not count swap for each cgroup\n"
            f"boot with swapaccount=1{KERNEL}",
        ),
        (
            {"OSType": "windows"},
            "the Docker engine runs windows containers\nswitch the Docker engine to Linux containers",
        ),
        (
            {"KernelVersion": "6.12.5-linuxkit", "MemoryLimit": True, "SwapLimit": True},
            "weighin needs a Docker engine on this machine: the processes of the current"
            " Docker engine are not visible here\nrun weighin on the engine's machine, unset"
            " DOCKER_HOST, or use --isolation cgroup or process",
        ),
    ],
)
def test_an_engine_that_cannot_limit(info: dict[str, Any], text: str) -> None:
    with pytest.raises(IsolationUnavailable) as caught:
        docker_engine.check_engine(info)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("release", "says"),
    [("6.1.0-13-amd64", "6.1.0-13-amd64"), ("5.10-rc1", "5.10.0-rc1"), ("6.18.44", "6.18.44")],
)
def test_an_engine_that_can_limit(monkeypatch: pytest.MonkeyPatch, release: str, says: str) -> None:
    here = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result([*here[:2], release, *here[3:]]))
    info = {"OSType": "linux", "KernelVersion": says, "MemoryLimit": True, "SwapLimit": True}
    docker_engine.check_engine(info)


@pytest.mark.parametrize(
    ("explanation", "text"),
    [
        (
            'could not select device driver "" with capabilities: [[gpu]]',
            "the Docker engine cannot pass a GPU to a container\n"
            "install nvidia-container-toolkit, then sudo nvidia-ctk runtime configure "
            "--runtime=docker and sudo systemctl restart docker",
        ),
        (
            'invalid mount config for type "bind": bind source path does not exist: /x',
            "the Docker engine cannot access a folder of this machine: invalid mount config for type "
            '"bind": bind source path does not exist: /x\n'
            "share the folder with the Docker engine (Docker Desktop: Settings, Resources, File sharing); weighin cannot use a Docker engine on another machine",
        ),
        (
            "no space left on device",
            "the Docker engine could not run a container: no space left on device\nsee the log of"
            " the Docker engine: sudo journalctl -u docker",
        ),
    ],
)
def test_an_engine_that_refuses(explanation: str, text: str) -> None:
    refusal = docker_engine.explain_refusal(api_error(explanation), "run a container")
    assert str(refusal) == text


RUNC = "failed to create task for container: failed to create shim task: OCI runtime create failed:"
BLOOM = (
    f"{RUNC} runc create failed: unable to start container process: error during container init:"
    ' error mounting "/models/bloom-560m/model.pt" to rootfs at "/weighin/checkpoint/model.pt":'
    " permission denied: unknown"
)


class RefusingEngine:
    """An engine that makes a container, and does not start it for this reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason
        self.removed: list[str] = []
        self._ours, self._theirs = socket.socketpair()

    def info(self) -> dict[str, str]:
        return {"CgroupVersion": "2"}

    def create_host_config(self, **_: object) -> dict[str, str]:
        return {}

    def create_container(self, *_: object, **__: object) -> dict[str, str]:
        return {"Id": "abc"}

    def attach_socket(self, *_: object, **__: object) -> socket.socket:
        return self._ours

    def start(self, _: str) -> None:
        raise api_error(self._reason)

    def remove_container(self, name: str, **_: object) -> None:
        self._theirs.close()
        self.removed.append(name)


def started(
    reason: str, limit_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> tuple[RefusingEngine, DockerRunning | str]:
    """Start a worker on an engine that refuses; returns it, or what was said."""
    engine = RefusingEngine(reason)
    monkeypatch.setattr(isolation, "connect", lambda: engine)
    monkeypatch.setattr(isolation, "ensure_image", lambda *_: "weighin:x")
    job = replace(JOB, cell=replace(JOB.cell, ram_limit_bytes=limit_bytes))
    try:
        return engine, DockerIsolation().start(job)
    except IsolationUnavailable as error:
        return engine, error.message


@pytest.mark.parametrize(
    "reason",
    [
        f"{RUNC} runc create failed: unable to start container process: container init was"
        " OOM-killed (memory limit too low?): unknown",
        f"{RUNC} container_linux.go:380: starting container process caused:"
        " process_linux.go:385: applying cgroup configuration for process caused:"
        " container init was OOM-killed (memory limit too low?): unknown",
        "OCI runtime create failed: OOM: the memory limit could be too low: read from the init"
        " process: unknown",
    ],
)
def test_a_container_killed_at_birth_under_a_limit_is_an_exit(
    reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, running = started(reason, 6 * MIB, monkeypatch)
    assert isinstance(running, DockerRunning)
    assert running.wait(1) == Exit(None, signal=9, oom_killed=True)
    running.close()
    assert len(engine.removed) == 1


@pytest.mark.parametrize("limit_bytes", [None, 6 * MIB])
def test_a_path_with_oom_in_its_name_is_not_a_kill(
    limit_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, said = started(BLOOM, limit_bytes, monkeypatch)
    assert said == f"the Docker engine could not run a container: {BLOOM}"
    assert len(engine.removed) == 1


def test_a_container_without_a_limit_is_not_killed_for_one(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = f"{RUNC} container init was OOM-killed (memory limit too low?): unknown"
    assert started(reason, None, monkeypatch)[1] == (
        f"the Docker engine could not run a container: {reason}"
    )


class NoImages:
    """An engine without the base image, and without a registry."""

    pulled: tuple[str, str] | None = None

    def inspect_image(self, name: str) -> None:
        raise docker.errors.ImageNotFound("no such image")

    def pull(self, repository: str, tag: str) -> None:
        self.pulled = (repository, tag)
        raise api_error("Get https://registry-1.docker.io/v2/: no such host")


def test_a_base_image_that_cannot_be_had() -> None:
    client: Any = NoImages()
    with pytest.raises(IsolationUnavailable) as caught:
        find_image(client, "python:3.11-slim-bookworm", lambda _: None)
    assert str(caught.value) == (
        "the base image python:3.11-slim-bookworm does not exist here and cannot be pulled from a registry: Get https://registry-1.docker.io/v2/: no such host\n"
        "choose an image that `docker images` lists: export WEIGHIN_BASE_IMAGE=IMAGE; "
        "or make a base image without a registry: sudo docker/make-base weighin-base:bookworm"
    )


@pytest.mark.parametrize(
    ("base", "pulled"),
    [
        ("debian", ("debian", "latest")),
        ("localhost:5000/debian", ("localhost:5000/debian", "latest")),
        ("localhost:5000/debian:12", ("localhost:5000/debian", "12")),
    ],
)
def test_a_pull_asks_for_one_tag(base: str, pulled: tuple[str, str]) -> None:
    client: Any = NoImages()
    with pytest.raises(IsolationUnavailable):
        find_image(client, base, lambda _: None)
    assert client.pulled == pulled


def test_the_tag_changes_with_all_that_goes_in() -> None:
    recipe = Recipe("base", "sha256:1", ("torch==2",), "FROM x")
    others = [
        Recipe("other", "sha256:1", ("torch==2",), "FROM x"),
        Recipe("base", "sha256:2", ("torch==2",), "FROM x"),
        Recipe("base", "sha256:1", ("torch==2+cpu",), "FROM x"),
        Recipe("base", "sha256:1", ("torch==2",), "FROM y"),
    ]
    assert recipe.tag == Recipe("base", "sha256:1", ("torch==2",), "FROM x").tag
    assert len({recipe.tag, *(other.tag for other in others)}) == 5


def test_pins_are_of_this_environment(tmp_path: Path) -> None:
    import importlib.metadata

    (tmp_path / "requirements.txt").write_text("# a comment\ntorch\nnot-installed-anywhere\n")
    pins = wheels.installed_pins(tmp_path / "requirements.txt")
    assert f"torch=={importlib.metadata.version('torch')}" in pins
    assert any(pin.startswith("typing-extensions==") for pin in pins)
    assert list(pins) == sorted(pins)


HOST = wheels.Target("3.11.9", "x86_64", 36)


@pytest.mark.parametrize("target", [HOST, wheels.Target("3.11.2", "x86_64", 41)])
def test_pip_needs_no_flags_for_a_target_like_the_host(target: wheels.Target) -> None:
    assert target.pip_flags(HOST) == []


@pytest.mark.parametrize(
    ("target", "host"),
    [
        (wheels.Target("3.12", "x86_64", 36), HOST),
        (wheels.Target("3.11", "aarch64", 36), HOST),
        (wheels.Target("3.11", "x86_64", 28), HOST),
        (HOST, None),
    ],
)
def test_pip_is_told_of_another_target(target: wheels.Target, host: wheels.Target | None) -> None:
    flags = target.pip_flags(host)
    assert flags[flags.index("--python-version") + 1] == target.python
    platforms = {flags[i + 1] for i, flag in enumerate(flags) if flag == "--platform"}
    assert f"manylinux_2_{target.glibc}_{target.machine}" in platforms
    assert f"manylinux_2_{target.glibc + 1}_{target.machine}" not in platforms


def test_requirements_of_the_target_s_python_alone_are_fetched_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "older-1.0.dist-info").mkdir()
    lines = ["Name: older", "Version: 1.0", "Requires-Dist: always"]
    for condition in ('python_full_version < "3.2.3"', 'python_version > "3.2"', 'extra == "more"'):
        lines.append(f"Requires-Dist: backport>={len(lines)}; {condition}")
    (folder / "METADATA").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    assert wheels.Target("3.2.2", "x86_64", 36).own_requirements(["older==1.0"]) == ["backport>=3"]
    assert wheels.Target("3.2.3", "x86_64", 36).own_requirements(["older==1.0", "gone==1"]) == []


def test_a_probe_without_a_libc() -> None:
    assert wheels.read_target("3.12.4 aarch64") == wheels.Target("3.12.4", "aarch64", 17)


@pytest.mark.parametrize(
    ("stderr", "pins", "text"),
    [
        (
            "WARNING: slow\nERROR: Could not find a version\n"
            "ERROR: No matching distribution found for torch==2.13.0+cpu\n",
            ("torch==2.13.0+cpu",),
            "pip cannot fetch the wheels for the image: "
            "No matching distribution found for torch==2.13.0+cpu\n"
            "name the index that torch came from: "
            "export PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu",
        ),
        (
            "",
            ("torch==2.13.0",),
            "pip cannot fetch the wheels for the image: it printed no error\n"
            "name the index that torch came from: export PIP_EXTRA_INDEX_URL=URL",
        ),
    ],
)
def test_a_pip_that_finds_nothing(stderr: str, pins: tuple[str, ...], text: str) -> None:
    assert str(wheels.explain_pip(stderr, pins)) == text


def test_an_environment_without_pip() -> None:
    error = wheels.explain_pip("/x/python: No module named pip", ("torch==2",))
    assert error.message == (
        "the wheels for the image cannot be fetched: this environment has no pip"
    )
    assert error.repair.endswith(f"{os.sep}python -m ensurepip") or "ensurepip" in error.repair


class StoppedEngine:
    """An engine that answered when the worker started, and is gone since."""

    def __getattr__(self, _: str) -> Any:
        def refuse(*_: object, **__: object) -> None:
            cause = FileNotFoundError(2, "No such file or directory")
            protocol = urllib3.exceptions.ProtocolError("Connection aborted.", cause)
            raise requests.exceptions.ConnectionError(protocol)

        return refuse


class EndedStream:
    """The stream of a container whose engine has closed it."""

    worker_code, stderr_tail = None, b""

    def receive(self, _: float) -> None: ...

    def wait(self, _: float) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("what", "doing"),
    [
        (lambda running: running.wait(1.0), "report how a container ended"),
        (lambda running: running.kill(), "kill a container"),
        (lambda running: running.close(), "remove the container weighin-1"),
    ],
)
def test_an_engine_that_stops_in_mid_run(what: Callable[[DockerRunning], None], doing: str) -> None:
    client: Any = StoppedEngine()
    stream: Any = EndedStream()
    running = DockerRunning(
        client,
        "abc",
        stream,
        on_close=lambda: remove(client, "weighin-1", certain=True),
        known_exit=Exit(0),
    )
    running._exit = None  # it ran when it was started
    with pytest.raises(IsolationUnavailable) as caught:
        what(running)
    assert caught.value.exit_code == 3
    assert str(caught.value) == (
        f"the Docker engine has stopped: it could not {doing}\n"
        "start the Docker engine again: sudo systemctl start docker"
    )


@pytest.mark.parametrize(
    ("host", "program", "repair"),
    [
        ("unix:///somewhere", "/usr/bin/dockerd", "DOCKER_HOST"),
        ("", "/usr/bin/dockerd", "systemctl start docker"),
        ("", None, "install Docker"),
    ],
)
def test_what_starts_an_engine_depends_on_what_is_here(
    monkeypatch: pytest.MonkeyPatch, host: str, program: str | None, repair: str
) -> None:
    monkeypatch.setenv("DOCKER_HOST", host)
    monkeypatch.setattr("shutil.which", lambda name: program if name == "dockerd" else None)
    error = docker_engine.explain_unreachable(FileNotFoundError(2, "no such file"), ADDRESS)
    assert ADDRESS in error.message
    assert repair in error.repair


@pytest.mark.parametrize("cause", [FileNotFoundError, ConnectionRefusedError, ConnectionResetError])
def test_an_engine_that_has_gone_is_told_from_one_that_refuses(cause: type[OSError]) -> None:
    assert docker_engine.is_gone(as_the_sdk_raises(cause(1, "gone")))
    assert not docker_engine.is_gone(as_the_sdk_raises(PermissionError(1, "no")))
    assert not docker_engine.is_gone(api_error("no space left on device"))


def test_an_engine_that_is_too_old_is_found_below_the_sdks_words() -> None:
    error = DockerException("Error while fetching server API version")
    error.__cause__ = InvalidVersion("API versions below 1.24 are no longer supported")
    found = docker_engine.explain_unreachable(error, ADDRESS)
    assert "too old" in found.message
    assert "20.10" in found.repair


def test_a_cause_that_leads_back_to_its_error_ends() -> None:
    error, cause = DockerException("one"), DockerException("two")
    error.__cause__, cause.__context__ = cause, error
    assert not docker_engine.is_gone(error)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (api_error("\n  first \nsecond"), "first"),
        (DockerException(""), "DockerException"),
        (DockerException("words"), "words"),
    ],
)
def test_the_first_line_of_an_engines_message(error: BaseException, line: str) -> None:
    assert docker_engine.first_line(error) == line


def test_the_addresses_of_engines_are_of_the_variable_or_the_context(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", "tcp://there:2375")
    assert docker_engine.engine_address() == ("tcp://there:2375", None)
    monkeypatch.delenv("DOCKER_HOST")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    address, _ = docker_engine.engine_address()
    assert address.endswith("///var/run/docker.sock")
