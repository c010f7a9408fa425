"""Run the worker (the measured process), or any command, in a Docker container with a RAM limit.

The image is empty: the container sees this machine's own programs at their paths (``visible``), and so
runs the same torch as a plain process. With ``--image``, a command runs in an image.
"""

import io
import os
import secrets
import socket
import tarfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import docker
from docker.types import LogConfig, Mount

from weighin import child_process
from weighin.cell import Cell, Job, ModelSpec
from weighin.errors import ConfigError
from weighin.isolation import preload, visible
from weighin.isolation.base import Isolation, Streams
from weighin.isolation.docker.engine import check_engine, connect, explained, find_image, remove
from weighin.isolation.docker.process import NOT_FOR_SHELLS, DockerStarted
from weighin.probes import environment
from weighin.probes.cgroup import is_left_behind, lock_suffix, this_process
from weighin.protocol import encode_job
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
    count as the cell's memory. Commands run in ``image``, or without one, see what workers see.
    """

    name = "docker"
    limits = True

    def __init__(self, image: str = "") -> None:
        self._image = image

    def check(self) -> None:
        """Raise IsolationUnavailable unless a process in a container can be started and seen here."""
        if self._info.get("ID") not in _tried:
            check_engine(self._info)
            self._start_worker(Cell(ModelSpec("", ""), "check", self.name), [":"]).close()
            _tried.add(self._info.get("ID"))

    def prepare(self, progress: Callable[[str], None] = lambda _: None, /) -> None:
        """Pull the user's image if it is missing."""
        if self._image:
            find_image(self._client, self._image, progress)

    def start(self, job: Job) -> DockerStarted:
        seen = [*visible.of_job(job), *job.mounts]
        worker = child_process.module("weighin.worker")
        running = self._start_worker(job.cell, worker, seen, job.target)
        running.channel.send(encode_job(job))
        return running

    def _start_worker(
        self, cell: Cell, command: Sequence[str], seen: Iterable[str] = (), target: str = ""
    ) -> DockerStarted:
        passed = environment.settings() | cell.environment
        variables = {name: v for name, v in passed.items() if not name.startswith("NVIDIA_")} | {
            "PATH": os.environ.get("PATH", os.defpath),
            "PYTHONPATH": os.pathsep.join(child_process.CODE_PATH),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": _TMP,
        }
        every = [*visible.of_machine(), *seen, *preload.libraries(variables)]
        binds = visible.binds(every, [target])
        settings = self._create(cell, self._empty_image, binds, target, **_CLOSED)
        return DockerStarted(self._client, None, command=command, variables=variables, **settings)

    def start_command(
        self, cell: Cell, folder: str, streams: Streams, mounts: Sequence[str] = ()
    ) -> DockerStarted:
        """Start a command in its working folder, which the container sees at the same path.

        The container sees ``mounts`` read-only. Except for the limits, the mounts, the user and the
        first process, it equals the container of ``docker run``.
        """
        if folder in ("", "/"):
            raise ConfigError(
                f"the current folder {folder or '(deleted)'} cannot be mounted into a container",
                "cd to the folder of the program",
            )
        for path in mounts:
            if not Path(path).exists():
                raise ConfigError(f"--mount {path}: there is no such file or folder")
        binds = visible.binds(() if self._image else visible.of_machine(), [folder, *mounts])
        variables = {"TERM": os.environ["TERM"]} if "TERM" in os.environ else {}
        command, shell = cell.command, visible.SHELL
        if self._image:
            shell, files = visible.own_shell()
            binds |= files
            with explained("describe an image"):
                described = self._client.inspect_image(self._image)["Config"]  # type: ignore[no-untyped-call]
            lines = [line.split("=", 1) for line in described.get("Env") or () if "=" in line]
            variables |= {name: value for name, value in lines if name in NOT_FOR_SHELLS}
            command = (*(described.get("Entrypoint") or ()), *command)
        else:
            variables |= {"PATH": os.environ.get("PATH", os.defpath), "HOME": _TMP}
        image = self._image or self._empty_image
        settings = self._create(cell, image, binds, folder, shell=shell, workdir=folder)
        variables |= cell.environment
        return DockerStarted(
            self._client, streams, command=command, variables=variables, **settings
        )

    def _create(
        self, cell: Cell, image: str, binds: Mapping[str, str], writable: str, *,
        shell: Sequence[str] = visible.SHELL, workdir: str = _TMP, **host: Any
    ) -> dict[str, Any]:  # fmt: skip
        """Create a container, and return the arguments of ``DockerStarted`` for a process in it."""
        written = (writable, os.path.realpath(writable)) if writable else ()
        host = {"security_opt": ["label=disable"], "auto_remove": True, **host}
        host["log_config"] = LogConfig(type="none")
        host["mounts"] = [Mount(t, s, "bind", read_only=t not in written) for t, s in binds.items()]
        if cell.ram_limit_bytes is not None and self._info.get("CgroupVersion", "1") == "1":
            host["mem_swappiness"] = 0
        if cell.needs_gpu:  # the driver's libraries are in /usr
            devices = [path for path in Path("/dev").glob("nvidia*") if path.is_char_device()]
            host["devices"] = [f"{path}:{path}:rwm" for path in devices]
        options = " ".join(self._info.get("SecurityOptions") or [])
        if "name=userns" in options:  # else this user's files would be another user's
            host["userns_mode"] = "host"
        # Root in a container of a rootless engine is this user.
        user = "" if "name=rootless" in options else f"{os.getuid()}:{os.getgid()}"
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
                user=user,
                working_dir=workdir,
                labels=labels,
            )["Id"]
        limit = cell.ram_limit_bytes  # equal limits: no swap
        limits = {"mem_limit": limit, "memswap_limit": limit} if limit is not None else {}
        where = {"user": user, "workdir": workdir}
        return {"container": container, "shell": shell, "limits": limits, **where}

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
        entries = {name: self._info.get(key) for name, key in facts.items()} | {
            "image": self._image
        }
        return {name: str(value) for name, value in entries.items() if value}

    @cached_property
    def _client(self) -> docker.APIClient:
        return connect()

    @cached_property
    def _info(self) -> dict[str, Any]:
        with explained("describe itself"):
            return dict(self._client.info())

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
