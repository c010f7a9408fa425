"""Run the worker (the measured process), or any command, in a Docker container with a RAM limit.

The image is empty: the container sees this machine's own programs at their paths (``visible``), and so
runs the same torch as a plain process. With ``--image``, a command runs in an image.
"""

import io
import os
import re
import secrets
import socket
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import docker
import docker.context
import docker.utils
from docker.errors import ImageNotFound
from docker.types import LogConfig, Mount

from weighin import child_process
from weighin.cell import Cell, ModelSpec
from weighin.errors import ConfigError, IsolationUnavailable
from weighin.isolation import visible
from weighin.isolation.base import Isolation, Streams
from weighin.isolation.docker_process import (
    ENGINE_ERRORS,
    NOT_FOR_SHELLS,
    DockerStarted,
    elsewhere,
    explained,
    first_line,
    remove,
)
from weighin.probes import environment
from weighin.probes.cgroup import is_left_behind, lock_suffix, this_process
from weighin.units import MIB

IMAGE: Final = "weighin-empty:1"
_TMP: Final = "/tmp"  # noqa: S108 (inside the container)
_TMPFS_BYTES: Final = 64 * MIB  # for each of /tmp and /dev/shm; Docker's default for /dev/shm
_CLOSED: Final[Mapping[str, Any]] = {
    "network_mode": "none",
    "ipc_mode": "private",
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["label=disable", "no-new-privileges"],
    "pids_limit": 4096,  # includes threads; torch starts at least one per processor
    "shm_size": _TMPFS_BYTES,
    "tmpfs": {_TMP: f"size={_TMPFS_BYTES},mode=1777"},
}
_tried: set[Any] = set()  # the engines that have started a container for this process


class DockerIsolation(Isolation):
    """Runs processes in Docker containers, one container for each cell.

    A worker has no network, no capabilities and a read-only root; its small /tmp (also HOME) and /dev/shm
    count as the cell's memory. Commands run in ``image``, or without one, see what workers see; except
    for the limits, the mounts, the user and the first process, their container is that of ``docker run``.
    """

    name = "docker"
    limits = True

    def __init__(self, image: str = "") -> None:
        self._image = image

    def check(self) -> None:
        """Raise IsolationUnavailable unless a process in a container can be started and seen here."""
        if self._info.get("ID") not in _tried:
            check_engine(self._info)
            self.start(Cell(ModelSpec("", ""), "check", self.name), [":"]).close()
            _tried.add(self._info.get("ID"))

    def prepare(self, progress: Callable[[str], None] = lambda _: None, /) -> None:
        """Pull the user's image if it is missing; raise IsolationUnavailable if that is not possible."""
        if not self._image:
            return
        try:
            try:
                self._client.inspect_image(self._image)  # type: ignore[no-untyped-call]
            except ImageNotFound:
                progress(f"pulling {self._image}")
                repository, tag = docker.utils.parse_repository_tag(self._image)
                self._client.pull(repository, tag=tag or "latest")
        except ENGINE_ERRORS as error:
            raise IsolationUnavailable(
                f"the image {self._image} does not exist here and cannot be pulled from a registry:"
                f" {first_line(error)}",
                "choose an image that `docker images` lists: --image IMAGE; or leave --image out, and"
                " the container sees this machine's own programs",
            ) from error

    def start(
        self,
        cell: Cell,
        command: Sequence[str],
        folder: str = "",
        streams: Streams | None = None,
        mounts: Iterable[str] = (),
    ) -> DockerStarted:
        image, mounts = self._image if streams else "", [*mounts]
        if streams and folder in ("", "/"):
            raise ConfigError(
                f"the current folder {folder or '(deleted)'} cannot be mounted into a container",
                "cd to the folder of the program",
            )
        for path in mounts if streams else ():
            if not Path(path).exists():
                raise ConfigError(f"--mount {path}: there is no such file or folder")
        variables = {"TERM": os.environ["TERM"]} if streams and "TERM" in os.environ else {}
        shell: Sequence[str] = visible.SHELL
        if image:
            shell, files = visible.own_shell()
            binds = visible.binds((), [folder, *mounts]) | files
            with explained("describe an image"):
                described = self._client.inspect_image(image)["Config"]  # type: ignore[no-untyped-call]
            lines = [line.split("=", 1) for line in described.get("Env") or () if "=" in line]
            variables |= {name: value for name, value in lines if name in NOT_FOR_SHELLS}
            command = (*(described.get("Entrypoint") or ()), *command)
        else:
            variables |= {"PATH": os.environ.get("PATH", os.defpath), "HOME": _TMP}
            if not streams:
                variables |= environment.settings()
                variables["PYTHONPATH"] = os.pathsep.join(child_process.CODE_PATH)
                variables["PYTHONDONTWRITEBYTECODE"] = "1"
            libraries = visible.preloaded(variables | cell.environment)
            binds = visible.binds([*visible.of_machine(), *libraries], [folder, *mounts])
        # Root in a container of a rootless engine is this user.
        user = "" if "name=rootless" in self._options else f"{os.getuid()}:{os.getgid()}"
        where = {"user": user, "workdir": folder if streams else _TMP}
        closed = {} if streams else _CLOSED
        container = self._create(
            cell, image or self._empty_image, shell, binds, folder, where, closed
        )
        variables |= cell.environment
        limit_bytes = cell.ram_limit_bytes
        return DockerStarted(
            self._client, container, shell, command, variables, streams, limit_bytes, where
        )

    def _create(
        self,
        cell: Cell,
        image: str,
        shell: Sequence[str],
        binds: Mapping[str, str],
        writable: str,
        where: Mapping[str, str],
        closed: Mapping[str, Any],
    ) -> str:
        """Create a container whose first process only waits; return its id."""
        written = (writable, os.path.realpath(writable)) if writable else ()
        host = {"security_opt": ["label=disable"], "auto_remove": True, **closed}
        host["log_config"] = LogConfig(type="none")
        host["mounts"] = [Mount(t, s, "bind", read_only=t not in written) for t, s in binds.items()]
        if cell.ram_limit_bytes is not None and self._info.get("CgroupVersion", "1") == "1":
            host["mem_swappiness"] = 0
        if cell.needs_gpu:  # the driver's libraries are in /usr
            devices = [path for path in Path("/dev").glob("nvidia*") if path.is_char_device()]
            host["devices"] = [f"{path}:{path}:rwm" for path in devices]
        if "name=userns" in self._options:  # else this user's files would be another user's
            host["userns_mode"] = "host"
        labels = {"weighin.owner": this_process(), "weighin.host": socket.gethostname()}
        labels |= {"weighin.lock": lock_suffix(), "weighin.cell": cell.id}
        with explained("create a container"):
            container = self._client.create_container(
                image,
                [*shell[1:], "-c", "read -r _"],
                entrypoint=list(shell[:1]),
                environment=sorted(NOT_FOR_SHELLS),  # without a value: removes the image's own
                name=f"weighin-{os.getpid()}-{secrets.token_hex(4)}",
                host_config=self._client.create_host_config(**host),
                stdin_open=True,
                user=where["user"],
                working_dir=where["workdir"],
                labels=labels,
            )
            return str(container["Id"])

    def remove_stale(self) -> list[str]:
        """Remove the containers whose owner, a weighin process of this machine, has ended."""
        removed = []
        host = f"weighin.host={socket.gethostname()}"
        with explained("list the containers"):
            ours = self._client.containers(all=True, filters={"label": host})
        for container in ours:
            name, labels = container["Names"][0].lstrip("/"), container["Labels"]
            owner = labels["weighin.owner"]
            if is_left_behind(f"{owner}.{labels.get('weighin.lock', '')}"):
                remove(self._client, name)
                removed.append(f"container {name} of process {owner.partition('-')[0]}")
        return removed

    def describe(self) -> dict[str, str]:
        facts = {"engine": "ServerVersion", "cgroup_driver": "CgroupDriver"}
        facts |= {"cgroup_version": "CgroupVersion", "storage_driver": "Driver"}
        entries = {name: self._info.get(key) for name, key in facts.items()}
        entries["image"] = self._image
        return {name: str(value) for name, value in entries.items() if value}

    @cached_property
    def _client(self) -> docker.APIClient:
        return connect()

    @cached_property
    def _info(self) -> dict[str, Any]:
        with explained("describe itself"):
            return dict(self._client.info())

    @property
    def _options(self) -> str:
        return " ".join(self._info.get("SecurityOptions") or [])

    @cached_property
    def _empty_image(self) -> str:
        """The name of an image with nothing but the folder /tmp, which is made if it is missing."""
        with explained("make an empty image"):
            if not self._client.images(IMAGE):
                with tarfile.open(fileobj=(content := io.BytesIO()), mode="w") as file:
                    (folder := tarfile.TarInfo("tmp")).type = tarfile.DIRTYPE
                    folder.mode = 0o1777
                    file.addfile(folder)
                self._client.import_image_from_data(content.getvalue(), *IMAGE.split(":"))
        return IMAGE


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
