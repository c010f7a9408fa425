"""A worker in a container: its pid and cgroup on this machine, its exit, and its removal."""

import contextlib
import signal
import time
from collections.abc import Callable
from math import ceil
from pathlib import Path
from typing import Final

import docker
import requests.exceptions
from docker.errors import APIError, NotFound

from weighin.child_process import signal_each
from weighin.isolation.base import Exit
from weighin.isolation.docker.engine import (
    ENGINE_ERRORS,
    elsewhere,
    explain_refusal,
    explained,
    is_gone,
)
from weighin.isolation.docker.stream import StreamChannel
from weighin.probes.cgroup import MemoryCgroup, memory_cgroup_of, pids_in, read_kernel

_BIRTH_TIMEOUT_S: Final = 2.0
_REMOVE_ATTEMPTS: Final = 50
_CREATE_ATTEMPTS: Final = 10  # 1 s in all: far more than creating a container takes
_NEWS_ATTEMPTS: Final = 5
_PAUSE_S: Final = 0.1

ENDED: Final = "the measured process ended before weighin could observe it"


class DockerRunning:
    """A worker in a container; the class implements ``weighin.isolation.base.Running``."""

    def __init__(
        self,
        client: docker.APIClient,
        container: str,
        channel: StreamChannel,
        *,
        on_close: Callable[[], None],
        known_exit: Exit | None = None,
    ) -> None:
        self.channel = channel
        self._client = client
        self._container = container
        self._on_close = on_close
        self._exit = known_exit
        self._keeper: int | None = None
        self.pid: int | None = None
        self.cgroup: Path | None = None
        self.unseen = ENDED
        if known_exit is None:
            self._locate()

    def wait(self, timeout_s: float) -> Exit:
        """Return how the worker ended; the container and its cgroup remain until ``close``.

        Raises:
            TimeoutError: the worker still runs after ``timeout_s``.
        """
        if self._exit is None:
            deadline = time.monotonic() + timeout_s
            code = self.channel.wait(timeout_s)
            if code is None:  # the keeper was killed too
                code = wait_for_container(self._client, self._container, deadline)
            killed = code - 128 if code > 128 else None
            self._exit = Exit(
                code=code if killed is None else None,
                signal=killed,
                oom_killed=killed == signal.SIGKILL
                and oom_killed(self._client, self._container, self.cgroup),
            )
        return self._exit

    def kill(self) -> None:
        """Kill the worker and its children.

        If weighin may not kill these processes, or their cgroup is not mounted here, kill the whole
        container. The last counters of its cgroup are then lost.
        """
        try:
            signal_each(self._members())
            if self.cgroup is not None:
                return
        except PermissionError:  # a rootless engine, or one with user namespaces
            pass
        with (
            explained("kill a container"),
            contextlib.suppress(APIError),
        ):  # the container may have ended
            self._client.kill(self._container, signal.SIGKILL)

    def close(self) -> None:
        self.channel.close()
        self._on_close()

    def _locate(self) -> None:
        """Find the worker's pid and cgroup.

        Raises:
            IsolationUnavailable: the engine runs on another machine.
        """
        state = self._client.inspect_container(self._container)["State"]
        if not (keeper := int(state["Pid"])):
            return
        if not is_here(self._container, keeper):
            if self._client.inspect_container(self._container)["State"]["Running"]:
                raise elsewhere()
            return
        self._keeper = keeper
        self.cgroup = memory_cgroup_of(keeper)
        if self.cgroup is None:
            self.unseen = "the container's memory cgroup is not mounted here"
            return
        deadline = time.monotonic() + _BIRTH_TIMEOUT_S
        while not (members := self._members()):
            with contextlib.suppress(TimeoutError):
                self.channel.wait(0.001)
                return
            if time.monotonic() > deadline:
                return
        self.pid, self.unseen = members[0], ""

    def _members(self) -> list[int]:
        """Return the pids in the container, oldest first, without the first process (keeper)."""
        pids = pids_in(self.cgroup) if self.cgroup else []
        return sorted(pid for pid in pids if pid != self._keeper)


def wait_for_container(client: docker.APIClient, container: str, deadline: float) -> int:
    """Return a container's exit code; raise TimeoutError if it still runs at ``deadline``."""
    left = max(deadline - time.monotonic(), 1.0)
    try:
        return int(client.wait(container, timeout=ceil(left))["StatusCode"])
    except NotFound:  # another program removed the container
        return 128 + signal.SIGKILL
    except (requests.exceptions.ReadTimeout, requests.exceptions.ConnectionError) as error:
        if is_gone(error):
            raise explain_refusal(error, "report how a container ended") from error
        raise TimeoutError from None
    except ENGINE_ERRORS as error:
        raise explain_refusal(error, "report how a container ended") from error


def oom_killed(client: docker.APIClient, container: str, cgroup: Path | None) -> bool:
    """Tell whether the kernel OOM-killed a process of the container.

    The answer comes from the kernel's counter of OOM kills or, if the cgroup is not visible, from
    the Docker engine's report. The engine learns of a kill later than the kernel counts it, so the
    report is read up to five times.
    """
    if cgroup and (kills := MemoryCgroup(cgroup).read_oom_kills()) is not None:
        return kills > 0
    for _ in range(_NEWS_ATTEMPTS):
        try:
            if client.inspect_container(container)["State"]["OOMKilled"]:
                return True
        except ENGINE_ERRORS:
            break
        time.sleep(_PAUSE_S)
    return False


def is_here(container: str, pid: int) -> bool:
    """Tell whether ``pid`` on this machine is a process of the container."""
    try:
        return container in read_kernel(Path(f"/proc/{pid}/cgroup"))
    except OSError:
        return False


def remove(client: docker.APIClient, container: str, *, certain: bool) -> None:
    """Remove a container and all processes in it; return when the container is gone.

    ``certain`` tells whether the container certainly exists. If not, the engine may still be
    creating the container, and ``remove`` tries again for 1 s.
    """
    with explained(f"remove the container {container}"):
        for attempt in range(1, _REMOVE_ATTEMPTS + 1):
            try:
                client.remove_container(container, v=True, force=True)
            except NotFound:
                if certain or attempt >= _CREATE_ATTEMPTS:
                    return
            except APIError as error:
                being_removed = error.status_code == requests.codes.conflict
                if not being_removed or attempt == _REMOVE_ATTEMPTS:
                    raise
            else:
                return
            time.sleep(_PAUSE_S)
