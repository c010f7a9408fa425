"""Connect to a Docker engine, and translate its errors into a cause and a repair."""

import os
import re
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import docker
import docker.context
import docker.utils
from docker.errors import DockerException, InvalidVersion
from requests.exceptions import RequestException

from weighin.errors import IsolationUnavailable
from weighin.probes.cgroup import lock_suffix, this_process

OWNER_LABEL: Final = "weighin.owner"
HOST_LABEL: Final = "weighin.host"
LOCK_LABEL: Final = "weighin.lock"

ENGINE_ERRORS: Final = (DockerException, RequestException)
"""All errors that the SDK raises: its own errors, and errors of its HTTP library."""

_OOM_AT_BIRTH: Final = (
    "container init was OOM-killed (memory limit too low?)",
    "OOM: the memory limit could be too low",
)
"""The messages of runc (since 1.0) and crun about a RAM limit that is too small, in full. The word
"oom" alone would also match a path of the model bloom-560m."""

_KERNEL_LINE: Final = (
    "boot with {parameter} on the kernel's command line "
    "(/etc/default/grub: GRUB_CMDLINE_LINUX, then sudo update-grub and reboot)"
)


def engine_address() -> tuple[str, Any]:
    """Return the engine's address and TLS settings, from DOCKER_HOST or Docker's current context."""
    settings = docker.utils.kwargs_from_env()
    if "base_url" in settings:
        return settings["base_url"], settings.get("tls")
    context = docker.context.ContextAPI.get_current_context()
    return context.Host or "unix:///var/run/docker.sock", context.TLSConfig


def connect() -> docker.APIClient:
    """Return a client of the Docker engine that ``engine_address`` names.

    Raises:
        IsolationUnavailable: no engine answers, or this user may not use it.
    """
    address = os.environ.get("DOCKER_HOST", "the current context")
    try:
        address, tls = engine_address()
        _knock(address)
        return docker.APIClient(base_url=address, tls=tls or False)
    except (*ENGINE_ERRORS, OSError) as error:
        raise explain_unreachable(error, address) from error


def _knock(address: str) -> None:
    """Try to connect to the engine's Unix socket before the SDK does.

    After a failure, the SDK would leave its own socket open.
    """
    if address.startswith("unix://"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(address.removeprefix("unix://"))


def explain_unreachable(error: BaseException, address: str) -> IsolationUnavailable:
    causes = list(_causes(error))
    if any(isinstance(cause, PermissionError) for cause in causes):
        return IsolationUnavailable(
            f"this user has no permission to use the Docker engine at {address}",
            "sudo usermod -aG docker $USER, then log in again",
        )
    if any(isinstance(cause, FileNotFoundError | ConnectionRefusedError) for cause in causes):
        return IsolationUnavailable(f"no Docker engine answers at {address}", _start())
    if any(isinstance(cause, InvalidVersion) for cause in causes):
        return IsolationUnavailable(
            f"the Docker engine at {address} is too old: {first_line(error)}",
            "install Docker 20.10 or later",
        )
    return IsolationUnavailable(
        f"cannot talk to the Docker engine at {address}: {first_line(error)}",
        "run docker info, and check DOCKER_HOST",
    )


def _start() -> str:
    if os.environ.get("DOCKER_HOST"):
        return "set DOCKER_HOST to the address of an engine that runs, or unset it"
    if shutil.which("dockerd"):
        return "start the Docker engine: sudo systemctl start docker"
    return "install Docker: https://docs.docker.com/engine/install"


def check_engine(info: dict[str, Any]) -> None:
    """Raise IsolationUnavailable if an engine is on another machine or in a virtual machine, or cannot
    limit RAM and swap of Linux containers.

    ``info`` is the engine's answer to ``docker info``.
    """
    if info.get("OSType", "linux") != "linux":
        raise IsolationUnavailable(
            f"the Docker engine runs {info['OSType']} containers",
            "switch the Docker engine to Linux containers",
        )
    kernel = os.uname().release
    # The engine writes 6.1 as 6.1.0.
    same = (None, kernel, re.sub(r"^(\d+\.\d+)(?!\.?\d)", r"\1.0", kernel))
    if info.get("KernelVersion") not in same:
        raise elsewhere()
    if not info.get("MemoryLimit"):
        raise IsolationUnavailable(
            "the Docker engine cannot limit memory: the kernel's memory controller is off",
            _KERNEL_LINE.format(parameter="cgroup_enable=memory swapaccount=1"),
        )
    if not info.get("SwapLimit"):
        raise IsolationUnavailable(
            "the Docker engine cannot keep a container from swapping: the kernel does not count"
            " swap for each cgroup",
            _KERNEL_LINE.format(parameter="swapaccount=1"),
        )


def elsewhere() -> IsolationUnavailable:
    return IsolationUnavailable(
        "weighin needs a Docker engine on this machine: the processes of the current Docker"
        " engine are not visible here",
        "run weighin on the engine's machine, unset DOCKER_HOST, or use --isolation cgroup or process",
    )


def owner_labels() -> dict[str, str]:
    """Return the labels that name a container's owner: this process, its host and its lock file."""
    return {
        OWNER_LABEL: this_process(),
        HOST_LABEL: socket.gethostname(),
        LOCK_LABEL: lock_suffix(),
    }


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn an SDK error into IsolationUnavailable: "the Docker engine could not {doing}"."""
    try:
        yield
    except ENGINE_ERRORS as error:
        raise explain_refusal(error, doing) from error


def is_gone(error: BaseException) -> bool:
    return any(
        isinstance(cause, FileNotFoundError | ConnectionRefusedError | ConnectionResetError)
        for cause in _causes(error)
    )


def explain_refusal(error: BaseException, doing: str) -> IsolationUnavailable:
    if is_gone(error):
        return IsolationUnavailable(
            f"the Docker engine has stopped: it could not {doing}",
            "start the Docker engine again: sudo systemctl start docker",
        )
    reason = first_line(error)
    if "could not select device driver" in reason:
        return IsolationUnavailable(
            "the Docker engine cannot pass a GPU to a container",
            "install nvidia-container-toolkit, then sudo nvidia-ctk runtime configure "
            "--runtime=docker and sudo systemctl restart docker",
        )
    if "minimum memory limit" in reason.lower():
        return IsolationUnavailable(
            f"the Docker engine refuses so small a RAM limit: {reason}",
            "give a larger --ram, or use --isolation cgroup",
        )
    if "bind source path does not exist" in reason or "mounts denied" in reason.lower():
        return IsolationUnavailable(
            f"the Docker engine cannot access a folder of this machine: {reason}",
            "share the folder with the Docker engine (Docker Desktop: Settings, Resources, File"
            " sharing); weighin cannot use a Docker engine on another machine",
        )
    return IsolationUnavailable(
        f"the Docker engine could not {doing}: {reason}",
        "see the log of the Docker engine: sudo journalctl -u docker",
    )


def killed_at_birth(error: BaseException) -> bool:
    """Tell whether the kernel killed a container at its start, because its RAM limit is too small."""
    text = str(getattr(error, "explanation", None) or error)
    return any(message in text for message in _OOM_AT_BIRTH)


def first_line(error: BaseException) -> str:
    """Return the first line of the engine's message, without the text that the HTTP library adds."""
    text = str(getattr(error, "explanation", None) or error)
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error of the Docker SDK and all its causes, including those only in ``args``."""
    seen: list[BaseException] = []
    todo: list[object] = [error]
    while todo:
        cause = todo.pop()
        if isinstance(cause, BaseException) and not any(cause is earlier for earlier in seen):
            seen.append(cause)
            todo += [cause.__cause__, cause.__context__, *cause.args]
            yield cause
