"""Run the worker (the measured process), or any command, in a Docker container with a RAM limit.

A worker's container has no network, no capabilities, no swap and a read-only root. The worker is a
child of a small shell (``stream.KEEPER``), so that the cgroup exists until weighin has read its
counters. ``/tmp`` (also HOME) and ``/dev/shm`` are small tmpfs mounts, whose files count as the
cell's memory.
"""

import atexit
import contextlib
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import docker
from docker.errors import APIError

from weighin.cell import Cell, Job
from weighin.errors import IsolationUnavailable
from weighin.isolation.base import RunningCommand, Streams
from weighin.isolation.docker import command_start, host_config, packages
from weighin.isolation.docker.command import KILLED_AT_BIRTH
from weighin.isolation.docker.command_start import STREAMS
from weighin.isolation.docker.container import DockerRunning, remove
from weighin.isolation.docker.engine import (
    ENGINE_ERRORS,
    HOST_LABEL,
    LOCK_LABEL,
    OWNER_LABEL,
    check_engine,
    connect,
    explain_refusal,
    explained,
    killed_at_birth,
    owner_labels,
)
from weighin.isolation.docker.image import (
    BASE_VARIABLE,
    DEFAULT_BASE,
    PYTHON,
    Progress,
    check_image,
    ensure_image,
    find_image,
)
from weighin.isolation.docker.mounts import Bind, environment_inside, place
from weighin.isolation.docker.stream import KEEPER, StreamChannel
from weighin.probes.cgroup import is_left_behind
from weighin.protocol import encode_job


class DockerIsolation:
    """Runs workers in Docker containers, one container for each cell.

    The workers' image is built on ``base_image``. None means the image that the environment
    variable WEIGHIN_BASE_IMAGE names, or if it is not set, python:3.11-slim-bookworm. The workers'
    image contains ``packages``, which the run's strategies need. Commands run in ``image``; if
    ``image`` is empty, commands run in the workers' image.
    """

    name = "docker"
    limits = True

    def __init__(
        self, base_image: str | None = None, packages: tuple[str, ...] = (), image: str = ""
    ) -> None:
        self._packages = packages
        self._given = image
        self._base = base_image or os.environ.get(BASE_VARIABLE) or DEFAULT_BASE
        self._has_base = False
        self._image: str | None = None
        self._containers: set[str] = set()
        atexit.register(self._remove_all)

    def check(self) -> None:
        """Raise IsolationUnavailable unless a Docker engine answers that can enforce a RAM limit.

        The engine must have the user's ``image``, or without one the base image, or be able to pull
        it from a registry.
        """
        check_engine(self._info)
        if not self._has_base:
            check_image(self._client, self._given or self._base, is_base=not self._given)
            self._has_base = True

    def prepare(self, progress: Progress = lambda _: None, /) -> None:
        """Build the workers' image if it is missing; if the user gave an image, pull that instead.

        Raises:
            IsolationUnavailable: an image or a wheel is missing, or the build failed.
        """
        if self._given:
            find_image(self._client, self._given, progress, is_base=False)
            self._image = self._given
            return
        self._image = ensure_image(self._client, self._base, progress, self._packages)

    def added_code(self, job: Job, /) -> list[str]:
        return [*packages.lacking(job).notes]

    def start(self, job: Job) -> DockerRunning:
        """Start one worker, in a container of its own, for the given job.

        If the RAM limit is too small for the container to start, no error is raised: ``wait`` of
        the result returns the exit of a killed worker.

        Raises:
            IsolationUnavailable: the engine refused a request.
        """
        inside, binds = place(job)
        worker = (PYTHON, "-P", "-m", "weighin.worker")
        running = self._start(worker, job.cell, binds)
        running.channel.send(encode_job(inside))
        return running

    def _start(
        self,
        command: Sequence[str],
        cell: Cell,
        binds: Sequence[Bind] = (),
    ) -> DockerRunning:
        """Start ``command`` as the worker, in a new container with the limits of ``cell``."""
        if self._image is None:
            self.prepare()
        client = self._client
        host = host_config.of_worker(client, self._info, binds, cell)
        with self._new_container() as name, contextlib.ExitStack() as opened:
            container = client.create_container(
                self._image,
                ["sh", "-c", KEEPER, "weighin", *command],
                name=name,
                host_config=host,
                stdin_open=True,
                user=host_config.user(self._info),
                working_dir="/tmp",  # noqa: S108 (inside the container)
                environment=host_config.worker_environment(environment_inside(cell.environment)),
                labels=owner_labels() | {"weighin.cell": cell.id},
            )["Id"]
            # Attached before the start, so that no output is lost.
            channel = StreamChannel(client.attach_socket(container, params=STREAMS))
            opened.callback(channel.close)
            known_exit = None
            try:
                client.start(container)
            except APIError as error:
                if cell.ram_limit_bytes is None or not killed_at_birth(error):
                    raise
                known_exit = KILLED_AT_BIRTH
                channel.end()
            running = DockerRunning(
                client,
                container,
                channel,
                on_close=lambda: self._remove(name),
                known_exit=known_exit,
            )
            opened.pop_all()
        return running

    def start_command(
        self,
        cell: Cell,
        folder: str,
        streams: Streams,
        mounts: Sequence[str] = (),
    ) -> RunningCommand:
        """Start a command in its working folder, which the container sees at the same path.

        The container sees ``mounts`` read-only. Except for the limits, the mounts, the user and the
        first process, it equals the container of ``docker run``. If the RAM limit is too small for
        the container to start, no error is raised: ``reap`` returns the exit of a killed command.

        Raises:
            IsolationUnavailable: the engine refused a request, or runs on another machine.
            ConfigError: a path cannot be mounted.
        """
        if self._image is None:
            self.prepare()
        assert self._image is not None
        with self._new_container() as name:
            return command_start.start(
                self._client,
                self._info,
                self._image,
                cell,
                folder,
                streams,
                mounts,
                name=name,
                on_close=lambda: self._remove(name),
            )

    def remove_stale(self) -> list[str]:
        """Remove the containers whose owner, a weighin process of this machine, has ended."""
        removed = []
        of_this_machine = f"{HOST_LABEL}={socket.gethostname()}"
        with explained("list the containers"):
            ours = self._client.containers(all=True, filters={"label": of_this_machine})
        for container in ours:
            name, owner = container["Names"][0].lstrip("/"), container["Labels"][OWNER_LABEL]
            if is_left_behind(f"{owner}.{container['Labels'].get(LOCK_LABEL, '')}"):
                remove(self._client, name, certain=True)
                removed.append(f"container {name} of process {owner.partition('-')[0]}")
        return removed

    def describe(self) -> dict[str, str]:
        entries = {
            "engine": self._info.get("ServerVersion"),
            "cgroup_driver": self._info.get("CgroupDriver"),
            "cgroup_version": self._info.get("CgroupVersion"),
            "storage_driver": self._info.get("Driver"),
            "base_image": None if self._given else self._base,
            "image": self._image,
        }
        return {name: str(value) for name, value in entries.items() if value}

    @cached_property
    def _client(self) -> docker.APIClient:
        return connect()

    @cached_property
    def _info(self) -> dict[str, Any]:
        with explained("describe itself"):
            return dict(self._client.info())

    @contextlib.contextmanager
    def _new_container(self) -> Iterator[str]:
        """Yield a name for a new container; remove the container if the ``with`` block fails."""
        name = f"weighin-{os.getpid()}-{secrets.token_hex(4)}"
        self._containers.add(
            name
        )  # before the request, so that an interrupted start is removed, too
        try:
            yield name
        except BaseException as error:
            self._remove(name, certain=isinstance(error, APIError))
            if isinstance(error, ENGINE_ERRORS):
                raise explain_refusal(error, "run a container") from error
            raise

    def _remove(self, name: str, *, certain: bool = True) -> None:
        if name in self._containers:
            remove(self._client, name, certain=certain)
            self._containers.discard(name)

    def _remove_all(self) -> None:
        with contextlib.suppress(IsolationUnavailable):  # the engine has stopped
            for name in tuple(self._containers):
                self._remove(name)
