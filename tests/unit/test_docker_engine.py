"""The exact words for what can go wrong with a Docker engine; none of this needs one."""

import socket
from pathlib import Path
from typing import Any

import docker
import pytest
import requests.exceptions
import urllib3.exceptions
from docker.errors import APIError, DockerException

from weighin.errors import IsolationUnavailable
from weighin.isolation.docker import (
    DockerIsolation,
    explained,
    remove,
)

ADDRESS = "unix:///var/run/docker.sock"
START = "sudo systemctl start docker, or set DOCKER_HOST; for permission: sudo usermod -aG docker $USER, and log in again"
SEE = "see docker info, and sudo journalctl -u docker; or use another --isolation"


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
    ("error", "why"),
    [
        (PermissionError(13, "Permission denied"), "Permission denied"),
        (ConnectionRefusedError(111, "Connection refused"), "Connection refused"),
        (
            DockerException("Install paramiko package to enable ssh:// support\nmore"),
            "Install paramiko package to enable ssh:// support",
        ),
    ],
)
def test_an_engine_that_cannot_be_reached(
    error: Exception, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise error

    monkeypatch.setenv("DOCKER_HOST", ADDRESS)
    monkeypatch.setattr(socket.socket, "connect", refuse)
    with pytest.raises(IsolationUnavailable) as caught:
        DockerIsolation().check()
    assert str(caught.value) == f"no Docker engine answers at {ADDRESS}: {why}\n{START}"


def test_a_socket_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(IsolationUnavailable, match="no Docker engine answers at") as caught:
        DockerIsolation().check()
    assert caught.value.exit_code == 3


def test_an_engine_that_refuses() -> None:
    assert said(api_error("Minimum memory limit allowed is 6MB")) == (
        "the Docker engine could not run a container: Minimum memory limit allowed is 6MB\n" + SEE
    )


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
        "the Docker engine could not remove the container weighin-1: ('Connection aborted.',"
        f" FileNotFoundError(2, 'No such file or directory'))\n{SEE}"
    )
