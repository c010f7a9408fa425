"""Reaching a Docker engine, and saying in a user's words why it cannot be used."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import docker
import docker.context
import docker.utils
from docker.errors import DockerException, InvalidVersion
from requests.exceptions import RequestException

from weighin.errors import IsolationUnavailable
from weighin.probes.cgroup import this_process

OWNER_LABEL: Final = "weighin.owner"
HOST_LABEL: Final = "weighin.host"

ENGINE_ERRORS: Final = (DockerException, RequestException)
"""All that the SDK raises: its own errors, and those of its HTTP library when a line breaks."""

_OOM_AT_BIRTH: Final = (
    "container init was OOM-killed (memory limit too low?)",
    "OOM: the memory limit could be too low",
)
"""The words of runc (since 1.0) and of crun, whole: "oom" alone is in any path of a bloom-560m."""

_INSTEAD: Final = "or use --isolation cgroup or --isolation process"
_KERNEL_LINE: Final = (
    "boot with {parameter} on the kernel's command line "
    "(/etc/default/grub: GRUB_CMDLINE_LINUX, then sudo update-grub and reboot), " + _INSTEAD
)


def engine_address() -> tuple[str, Any]:
    """Return (address, TLS settings) as the docker command finds them: DOCKER_HOST, or the context."""
    settings = docker.utils.kwargs_from_env()
    if "base_url" in settings:
        return settings["base_url"], settings.get("tls")
    context = docker.context.ContextAPI.get_current_context()
    return context.Host or "unix:///var/run/docker.sock", context.TLSConfig


def connect() -> docker.APIClient:
    """Return a client of the user's engine.

    Raises:
        IsolationUnavailable: no engine, or no permission to use it.
    """
    address = os.environ.get("DOCKER_HOST", "the current context")
    try:
        address, tls = engine_address()
        _knock(address)
        return docker.APIClient(base_url=address, tls=tls or False)
    except (*ENGINE_ERRORS, OSError) as error:
        raise explain_unreachable(error, address) from error


def _knock(address: str) -> None:
    """Open the engine's socket once: where that fails, the SDK would leave its own one open."""
    if address.startswith("unix://"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(address.removeprefix("unix://"))


def explain_unreachable(error: BaseException, address: str) -> IsolationUnavailable:
    """Return why no engine can be talked to at ``address``, with the repair."""
    causes = list(_causes(error))
    if any(isinstance(cause, PermissionError) for cause in causes):
        return IsolationUnavailable(
            f"no permission to use the Docker engine at {address}",
            "sudo usermod -aG docker $USER, then log in again",
        )
    if any(isinstance(cause, FileNotFoundError | ConnectionRefusedError) for cause in causes):
        return IsolationUnavailable(
            f"no Docker engine answers at {address}",
            f"start one: sudo systemctl start docker, {_INSTEAD}",
        )
    if any(isinstance(cause, InvalidVersion) for cause in causes):
        return IsolationUnavailable(
            f"the Docker engine at {address} is too old: {first_line(error)}",
            f"install Docker 20.10 or later, {_INSTEAD}",
        )
    return IsolationUnavailable(
        f"cannot talk to the Docker engine at {address}: {first_line(error)}",
        f"see what docker info says and check DOCKER_HOST, {_INSTEAD}",
    )


def check_engine(info: dict[str, Any]) -> None:
    """Raise IsolationUnavailable where the engine that gave ``info`` cannot hold a RAM limit."""
    if info.get("OSType", "linux") != "linux":
        raise IsolationUnavailable(
            f"the Docker engine runs {info['OSType']} containers", "switch it to Linux containers"
        )
    if not info.get("MemoryLimit"):
        raise IsolationUnavailable(
            "the Docker engine cannot limit memory: the kernel's memory controller is off",
            _KERNEL_LINE.format(parameter="cgroup_enable=memory swapaccount=1"),
        )
    if not info.get("SwapLimit"):
        raise IsolationUnavailable(
            "the Docker engine cannot switch swap off: the kernel does not account for it",
            _KERNEL_LINE.format(parameter="swapaccount=1"),
        )


def owner_labels() -> dict[str, str]:
    """Return the labels that say whose a container is: a process, and where its pid is valid."""
    namespace = Path("/proc/self/ns/pid")
    where = namespace.readlink().name if namespace.exists() else ""
    return {OWNER_LABEL: this_process(), HOST_LABEL: f"{socket.gethostname()} {where}".strip()}


@contextmanager
def explained(doing: str) -> Iterator[None]:
    """Turn the SDK's errors inside into IsolationUnavailable; ``doing`` completes "could not"."""
    try:
        yield
    except ENGINE_ERRORS as error:
        raise explain_refusal(error, doing) from error


def is_gone(error: BaseException) -> bool:
    """Tell whether an engine that answered before has stopped: nobody is at its address now."""
    return any(
        isinstance(cause, FileNotFoundError | ConnectionRefusedError | ConnectionResetError)
        for cause in _causes(error)
    )


def explain_refusal(error: BaseException, doing: str) -> IsolationUnavailable:
    """Return why an engine that answered before did not do what it was asked, with the repair."""
    if is_gone(error):
        return IsolationUnavailable(
            f"the Docker engine has stopped: it could not {doing}",
            f"start it again: sudo systemctl start docker, {_INSTEAD}",
        )
    reason = first_line(error)
    if "could not select device driver" in reason:
        return IsolationUnavailable(
            "the Docker engine cannot hand a GPU to a container",
            "install nvidia-container-toolkit, then sudo nvidia-ctk runtime configure "
            "--runtime=docker and sudo systemctl restart docker",
        )
    if "bind source path does not exist" in reason or "mounts denied" in reason.lower():
        return IsolationUnavailable(
            f"the Docker engine cannot see a folder of this machine: {reason}",
            "share it with the engine (Docker Desktop: Settings, Resources, File sharing); "
            "an engine on another machine cannot be used",
        )
    return IsolationUnavailable(
        f"the Docker engine could not {doing}: {reason}",
        f"see the engine's log: sudo journalctl -u docker, {_INSTEAD}",
    )


def killed_at_birth(error: BaseException) -> bool:
    """Tell whether a limited container could not start: its limit is below what a start needs."""
    text = str(getattr(error, "explanation", None) or error)
    return any(said in text for said in _OOM_AT_BIRTH)


def first_line(error: BaseException) -> str:
    """Return what the engine said, without the HTTP library's wrapping."""
    text = str(getattr(error, "explanation", None) or error)
    return next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the error and all that led to it. urllib3 hides some of these among arguments."""
    seen: list[BaseException] = []
    todo: list[object] = [error]
    while todo:
        cause = todo.pop()
        if isinstance(cause, BaseException) and not any(cause is known for known in seen):
            seen.append(cause)
            todo += [cause.__cause__, cause.__context__, *cause.args]
            yield cause
