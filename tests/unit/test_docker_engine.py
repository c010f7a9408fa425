"""The exact words for what can go wrong with a Docker engine; none of this needs one."""

import os
import socket
from pathlib import Path
from typing import Any

import docker
import pytest
import requests.exceptions
import urllib3.exceptions
from docker.errors import APIError, DockerException

from weighin.errors import IsolationUnavailable
from weighin.isolation import cgroup
from weighin.isolation.docker import (
    DockerIsolation,
    check_engine,
    connect,
    explained,
    remove,
)

ADDRESS = "unix:///var/run/docker.sock"


def api_error(explanation: str, status: int = 500) -> APIError:
    response = requests.Response()
    response.status_code = status
    return APIError("the HTTP library's words", response=response, explanation=explanation)


def said(error: Exception, doing: str = "run a container") -> str:
    """Return what is said of an error of the SDK."""
    with pytest.raises(IsolationUnavailable) as caught, explained(doing):
        raise error
    assert caught.value.exit_code == 3
    return str(caught.value)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            PermissionError(13, "Permission denied"),
            f"this user has no permission to use the Docker engine at {ADDRESS}\n"
            "sudo usermod -aG docker $USER, then log in again",
        ),
        (
            FileNotFoundError(2, "No such file or directory"),
            f"no Docker engine answers at {ADDRESS}\nset DOCKER_HOST to the address of an engine that runs, or unset it",
        ),
        (
            ConnectionRefusedError(111, "Connection refused"),
            f"no Docker engine answers at {ADDRESS}\nset DOCKER_HOST to the address of an engine that runs, or unset it",
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
    error: Exception, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setenv("DOCKER_HOST", ADDRESS)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(IsolationUnavailable) as caught:
        DockerIsolation().check()
    assert str(caught.value).replace("http+unix://", "unix://") == text


def test_a_socket_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(IsolationUnavailable, match="no Docker engine answers at") as caught:
        DockerIsolation().check()
    assert caught.value.exit_code == 3


LIMITS = (
    "the Docker engine cannot limit the memory and swap of a container\n"
    "boot with cgroup_enable=memory swapaccount=1 on the kernel's command line"
    " (/etc/default/grub: GRUB_CMDLINE_LINUX, then sudo update-grub and reboot)"
)


@pytest.mark.parametrize(
    ("info", "text"),
    [
        ({"MemoryLimit": False, "SwapLimit": True}, LIMITS),
        ({"MemoryLimit": True, "SwapLimit": False}, LIMITS),
        (
            {"KernelVersion": "6.12.5-linuxkit", "MemoryLimit": True, "SwapLimit": True},
            "weighin needs a Docker engine on this machine: the processes of the current"
            " Docker engine are not visible here\nrun weighin on the engine's machine, unset"
            " DOCKER_HOST, or use --isolation cgroup or process",
        ),
    ],
)
def test_an_engine_that_cannot_limit(
    info: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroup, "swap_is_on", lambda: True)
    with pytest.raises(IsolationUnavailable) as caught:
        check_engine(info)
    assert str(caught.value) == text


def test_an_engine_that_counts_no_swap_on_a_machine_without_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroup, "swap_is_on", lambda: False)
    check_engine({"MemoryLimit": True, "SwapLimit": False})


@pytest.mark.parametrize(
    ("release", "says"),
    [("6.1.0-13-amd64", "6.1.0-13-amd64"), ("5.10-rc1", "5.10.0-rc1"), ("6.18.44", "6.18.44")],
)
def test_an_engine_that_can_limit(monkeypatch: pytest.MonkeyPatch, release: str, says: str) -> None:
    here = os.uname()
    monkeypatch.setattr(os, "uname", lambda: os.uname_result([*here[:2], release, *here[3:]]))
    info = {"OSType": "linux", "KernelVersion": says, "MemoryLimit": True, "SwapLimit": True}
    check_engine(info)


@pytest.mark.parametrize(
    ("explanation", "text"),
    [
        (
            "Minimum memory limit allowed is 6MB",
            "the Docker engine could not run a container: Minimum memory limit allowed is 6MB\n"
            "give a larger --ram, or use --isolation cgroup",
        ),
        (
            "no space left on device",
            "the Docker engine could not run a container: no space left on device\nsee the log of"
            " the Docker engine: sudo journalctl -u docker",
        ),
    ],
)
def test_an_engine_that_refuses(explanation: str, text: str) -> None:
    assert said(api_error(explanation)) == text


def with_image(name: str, engine: Any) -> DockerIsolation:
    isolation = DockerIsolation(name)
    isolation._client = engine
    return isolation


def test_an_image_that_is_not_here() -> None:
    assert said(docker.errors.ImageNotFound("No such image: some:image"), "describe an image") == (
        "the Docker engine could not describe an image: No such image: some:image\n"
        "docker pull IMAGE; or leave --image out, to see this machine's own programs"
    )


class StoppedEngine:
    """An engine that answered when the worker started, and is gone since."""

    def __getattr__(self, _: str) -> Any:
        def refuse(*_: object, **__: object) -> None:
            cause = FileNotFoundError(2, "No such file or directory")
            protocol = urllib3.exceptions.ProtocolError("Connection aborted.", cause)
            raise requests.exceptions.ConnectionError(protocol)

        return refuse


def test_an_engine_that_stops_in_mid_run() -> None:
    client: Any = StoppedEngine()
    with pytest.raises(IsolationUnavailable) as caught:
        remove(client, "weighin-1")
    assert str(caught.value) == (
        "the Docker engine has stopped: it could not remove the container weighin-1\n"
        "start the Docker engine again: sudo systemctl start docker"
    )


def test_without_an_address_the_engine_is_to_be_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise FileNotFoundError

    monkeypatch.delenv("DOCKER_HOST", raising=False)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(IsolationUnavailable) as caught:
        connect()
    assert str(caught.value) == (
        "no Docker engine answers at unix:///var/run/docker.sock\n"
        "start the Docker engine: sudo systemctl start docker"
    )
