"""Run the worker in a Docker container, under the limits that a deployment would have.

Containers have no network, no capabilities, no swap and a read-only root. The worker is a child of
a small shell (``stream.KEEPER``), so that the cgroup exists until its counters have been read.
``/tmp`` (which is also HOME) and ``/dev/shm`` are small tmpfs mounts; their files are charged to
the cell.
"""

import atexit
import contextlib
import os
import secrets
import socket
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Final

import docker
from docker.errors import APIError
from docker.types import DeviceRequest, LogConfig, Mount

from weighin.cell import Job
from weighin.errors import IsolationUnavailable
from weighin.isolation.base import Exit
from weighin.isolation.docker import packages
from weighin.isolation.docker.container import DockerRunning, remove
from weighin.isolation.docker.engine import (
    ENGINE_ERRORS,
    HOST_LABEL,
    OWNER_LABEL,
    check_engine,
    connect,
    explain_refusal,
    explained,
    killed_at_birth,
    owner_labels,
)
from weighin.isolation.docker.image import BASE_VARIABLE, PYTHON, check_base, ensure_image
from weighin.isolation.docker.image_build import DEFAULT_BASE, Progress
from weighin.isolation.docker.mounts import CODE, Bind, environment_inside, place
from weighin.isolation.docker.stream import KEEPER, StreamChannel
from weighin.probes.cgroup import is_alive
from weighin.probes.environment import settings
from weighin.protocol import encode_job
from weighin.units import MIB

_TMPFS_BYTES: Final = 64 * MIB  # for each of /tmp and /dev/shm; Docker's default for /dev/shm
_PIDS: Final = 4096  # includes threads; torch starts at least one per processor
_KILLED_AT_BIRTH: Final = Exit(code=None, signal=9, oom_killed=True)
_NOT_PASSED: Final = (
    "NVIDIA_",
    "LD_PRELOAD",
)  # NVIDIA's hook needs its own variables; LD_PRELOAD's file is not in the container


class DockerIsolation:
    """Runs workers in Docker containers, one container for each cell.

    ``base_image`` is the base of the image; None means the variable WEIGHIN_BASE_IMAGE, or if that
    is not set, python:3.11-slim-bookworm. ``packages`` are the packages that the run's strategies
    need.
    """

    name = "docker"
    limits = True

    def __init__(self, base_image: str | None = None, packages: tuple[str, ...] = ()) -> None:
        self._packages = packages
        self._base = base_image or os.environ.get(BASE_VARIABLE) or DEFAULT_BASE
        self._has_base = False
        self._image: str | None = None
        self._info: dict[str, Any] | None = None
        self._containers: set[str] = set()
        atexit.register(self._remove_all)

    def check(self) -> None:
        """Raise IsolationUnavailable unless an engine answers that can run a worker under a limit.

        The engine must have the base image, or reach a registry that has it.
        """
        check_engine(self._engine_info())
        if not self._has_base:
            check_base(self._client, self._base)
            self._has_base = True

    def prepare(self, progress: Progress = lambda _: None, /) -> None:
        """Build the image if it is missing.

        Raises:
            IsolationUnavailable: the base image or a wheel is missing, or the build failed.
        """
        self._image = ensure_image(self._client, self._base, progress, self._packages)

    def added_code(self, job: Job) -> list[str]:
        """Return a line for each installed package that is mounted because the image lacks it."""
        return packages.notes(job)

    def start(self, job: Job) -> DockerRunning:
        """Start one worker for this job.

        If the limit is too small to start the container, the result reports the worker's exit, and
        no error is raised.

        Raises:
            IsolationUnavailable: the engine refused a request.
        """
        if self._image is None:
            self.prepare()
        assert self._image is not None
        inside, binds = place(job)
        running = self._start(
            (PYTHON, "-P", "-m", "weighin.worker"),
            image=self._image,
            binds=binds,
            limit_bytes=job.cell.ram_limit_bytes,
            gpu=job.cell.device.startswith("cuda"),
            labels={"weighin.cell": job.cell.id},
            environment=environment_inside(job.cell.environment),
        )
        running.channel.send(encode_job(inside))
        return running

    def remove_stale(self, *, any_lock: bool = False) -> list[str]:
        """Remove the containers whose owner, a process of this machine, is dead."""
        removed = []
        here = owner_labels()[HOST_LABEL]
        wanted = HOST_LABEL if any_lock else f"{HOST_LABEL}={here}"
        with explained("list the containers"):
            ours = self._client.containers(all=True, filters={"label": wanted})
        for container in ours:
            if not container["Labels"][HOST_LABEL].startswith(socket.gethostname()):
                continue
            name, owner = container["Names"][0].lstrip("/"), container["Labels"][OWNER_LABEL]
            if not is_alive(owner):
                remove(self._client, name, certain=True)
                removed.append(f"container {name} of process {owner.partition('-')[0]}")
        return removed

    def describe(self) -> dict[str, str]:
        """Return the engine's version, its cgroups and storage, and the image."""
        info = self._engine_info()
        entries = {
            "engine": info.get("ServerVersion"),
            "cgroup_driver": info.get("CgroupDriver"),
            "cgroup_version": info.get("CgroupVersion"),
            "storage_driver": info.get("Driver"),
            "base_image": self._base,
            "image": self._image,
        }
        return {name: str(value) for name, value in entries.items() if value}

    @cached_property
    def _client(self) -> docker.APIClient:
        return connect()

    def _engine_info(self) -> dict[str, Any]:
        if self._info is None:
            with explained("describe itself"):
                self._info = dict(self._client.info())
        return self._info

    def _start(
        self,
        command: Sequence[str],
        *,
        image: str,
        binds: Sequence[Bind] = (),
        limit_bytes: int | None = None,
        gpu: bool = False,
        labels: dict[str, str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> DockerRunning:
        """Start ``command`` as a worker; attach before the start, so that no output is lost."""
        client, name = self._client, f"weighin-{os.getpid()}-{secrets.token_hex(4)}"
        host = self._host_config(binds, limit_bytes, gpu=gpu)
        created, channel = False, None
        self._containers.add(name)  # before the request, so that an interrupt also removes it
        try:
            container = client.create_container(
                image,
                ["sh", "-c", KEEPER, "weighin", *command],
                name=name,
                host_config=host,
                stdin_open=True,
                user=self._user(),
                working_dir="/tmp",  # noqa: S108 (inside the container)
                environment=_environment(environment or {}),
                labels=owner_labels() | (labels or {}),
            )["Id"]
            created = True
            streams = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
            channel = StreamChannel(client.attach_socket(container, params=streams))
            if not (born := self._run(container, limited=limit_bytes is not None)):
                channel.end()
            return DockerRunning(
                client,
                container,
                channel,
                on_close=lambda: self._remove(name),
                known_exit=None if born else _KILLED_AT_BIRTH,
            )
        except BaseException as error:
            if channel is not None:
                channel.close()
            self._remove(name, certain=created or isinstance(error, APIError))
            if isinstance(error, ENGINE_ERRORS):
                raise explain_refusal(error, "run a container") from error
            raise

    def _run(self, container: str, *, limited: bool) -> bool:
        """Start a created container; return False if its limit killed it on start."""
        try:
            self._client.start(container)
        except APIError as error:
            if limited and killed_at_birth(error):
                return False
            raise
        return True

    def _host_config(
        self, binds: Sequence[Bind], limit_bytes: int | None, *, gpu: bool
    ) -> dict[str, Any]:
        limit: dict[str, Any] = {}
        if limit_bytes is not None:
            limit = {"mem_limit": limit_bytes, "memswap_limit": limit_bytes}  # equal: no swap
            if self._engine_info().get("CgroupVersion", "1") == "1":  # v2 has no such setting
                limit["mem_swappiness"] = 0
        return self._client.create_host_config(
            **limit,
            network_mode="none",
            ipc_mode="private",
            read_only=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            pids_limit=_PIDS,
            shm_size=_TMPFS_BYTES,
            tmpfs={"/tmp": f"size={_TMPFS_BYTES},mode=1777"},  # noqa: S108 (inside the container)
            log_config=LogConfig(type="none"),
            mounts=[
                Mount(bind.target, str(bind.source), "bind", read_only=not bind.writable)
                for bind in binds
            ],
            device_requests=[DeviceRequest(count=-1, capabilities=[["gpu"]])] if gpu else None,
        )

    def _user(self) -> str | None:
        """Return this user's uid:gid; None for a rootless engine, where root is this user."""
        options = self._engine_info().get("SecurityOptions") or []
        if any("name=rootless" in option for option in options) or not hasattr(os, "getuid"):
            return None
        return f"{os.getuid()}:{os.getgid()}"

    def _remove(self, name: str, *, certain: bool = True) -> None:
        if name in self._containers:
            remove(self._client, name, certain=certain)
            self._containers.discard(name)

    def _remove_all(self) -> None:
        with contextlib.suppress(IsolationUnavailable):  # the engine has stopped
            for name in tuple(self._containers):
                self._remove(name)


def _environment(of_cell: dict[str, str]) -> dict[str, str]:
    """Return the variables of a worker: the cell's, and this process's that affect figures."""
    passed = {name: value for name, value in settings().items() if not name.startswith(_NOT_PASSED)}
    return passed | of_cell | {"PYTHONPATH": CODE, "PYTHONDONTWRITEBYTECODE": "1", "HOME": "/tmp"}  # noqa: S108
