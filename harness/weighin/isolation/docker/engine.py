"""Connect to a Docker engine, and translate its errors into a cause and a repair."""

import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import docker
import docker.context
import docker.utils
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from requests import codes, exceptions

from weighin.errors import IsolationUnavailable

ENGINE_ERRORS: Final = (DockerException, exceptions.RequestException)
"""All errors that the SDK raises: its own errors, and errors of its HTTP library."""
_REMOVE_S: Final = 10.0


def connect() -> docker.APIClient:
    """Return a client of the engine that DOCKER_HOST or Docker's current context names."""
    address = os.environ.get("DOCKER_HOST", "the current context")
    try:
        settings: dict[str, Any] = dict(docker.utils.kwargs_from_env())
        if "base_url" not in settings:
            context = docker.context.ContextAPI.get_current_context()
            settings = {"base_url": context.Host, "tls": context.TLSConfig}
        address = settings["base_url"] or "unix:///var/run/docker.sock"
        # After a failure, the SDK would leave its own socket open.
        if address.startswith("unix://"):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.connect(address.removeprefix("unix://"))
        return docker.APIClient(base_url=address, tls=settings.get("tls") or False)
    except PermissionError as error:
        message = f"this user has no permission to use the Docker engine at {address}"
        repair = "sudo usermod -aG docker $USER, then log in again"
        raise IsolationUnavailable(message, repair) from error
    except (FileNotFoundError, ConnectionRefusedError) as error:
        message = f"no Docker engine answers at {address}"
        repair = "set DOCKER_HOST to the address of an engine that runs, or unset it"
        if "DOCKER_HOST" not in os.environ:
            repair = "start the Docker engine: sudo systemctl start docker"
        raise IsolationUnavailable(message, repair) from error
    except (*ENGINE_ERRORS, OSError) as error:
        message = f"cannot talk to the Docker engine at {address}: {first_line(error)}"
        repair = "run docker info, and check DOCKER_HOST"
        raise IsolationUnavailable(message, repair) from error


def check_engine(info: dict[str, Any]) -> None:
    """Raise IsolationUnavailable if an engine (``docker info``) is elsewhere, or cannot limit RAM and swap."""
    kernel = os.uname().release
    # The engine writes 6.1 as 6.1.0.
    same = (None, kernel, re.sub(r"^(\d+\.\d+)(?!\.?\d)", r"\1.0", kernel))
    if info.get("KernelVersion") not in same:
        raise elsewhere()
    for key, lack, parameter in (
        ("MemoryLimit", "cannot limit memory: the kernel's memory controller is off", "cgroup_enable=memory "),
        ("SwapLimit", "cannot keep a container from swapping: the kernel does not count swap for each cgroup", ""),
    ):  # fmt: skip
        if not info.get(key):
            raise IsolationUnavailable(
                f"the Docker engine {lack}",
                f"boot with {parameter}swapaccount=1 on the kernel's command line"
                " (/etc/default/grub: GRUB_CMDLINE_LINUX, then sudo update-grub and reboot)",
            )


def elsewhere() -> IsolationUnavailable:
    return IsolationUnavailable(
        "weighin needs a Docker engine on this machine: the processes of the current Docker"
        " engine are not visible here",
        "run weighin on the engine's machine, unset DOCKER_HOST, or use --isolation cgroup or process",
    )


def find_image(client: docker.APIClient, name: str, say: Callable[[str], None]) -> None:
    """Pull an image if the engine does not have it; raise IsolationUnavailable if it cannot."""
    try:
        try:
            client.inspect_image(name)  # type: ignore[no-untyped-call]
        except ImageNotFound:
            say(f"pulling {name}")
            repository, tag = docker.utils.parse_repository_tag(name)
            client.pull(repository, tag=tag or "latest")
    except ENGINE_ERRORS as error:
        raise IsolationUnavailable(
            f"the image {name} does not exist here and cannot be pulled from a registry:"
            f" {first_line(error)}",
            "choose an image that `docker images` lists: --image IMAGE; or leave --image out, and"
            " the container sees this machine's own programs",
        ) from error


def remove(client: docker.APIClient, container: str) -> None:
    """Remove a container and all processes in it; return when the container is gone."""
    deadline = time.monotonic() + _REMOVE_S
    with explained(f"remove the container {container}"):
        while True:
            try:
                return client.remove_container(container, v=True, force=True)
            except NotFound:
                return None
            except APIError as error:
                is_under_way = error.status_code == codes.conflict
                if not is_under_way or time.monotonic() > deadline:
                    raise
            time.sleep(0.02)


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn an SDK error into IsolationUnavailable: "the Docker engine could not {doing}"."""
    try:
        yield
    except ENGINE_ERRORS as error:
        reason = first_line(error)
        message = f"the Docker engine could not {doing}: {reason}"
        repair = "see the log of the Docker engine: sudo journalctl -u docker"
        if isinstance(error, exceptions.ConnectionError):
            message = f"the Docker engine has stopped: it could not {doing}"
            repair = "start the Docker engine again: sudo systemctl start docker"
        elif "minimum memory limit" in reason.lower():
            message = f"the Docker engine refuses so small a RAM limit: {reason}"
            repair = "give a larger --ram, or use --isolation cgroup"
        elif "bind source path does not exist" in reason or "mounts denied" in reason.lower():
            message = f"the Docker engine cannot access a folder of this machine: {reason}"
            repair = "use an engine that runs on this machine, or --isolation cgroup or process"
        raise IsolationUnavailable(message, repair) from error


def first_line(error: BaseException) -> str:
    """Return the first line of the engine's message, without the text that the HTTP library adds."""
    text = str(getattr(error, "explanation", None) or error)
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
