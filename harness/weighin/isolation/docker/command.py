"""A command in a container, as the child of the keeper, which is the container's first process."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import docker
from docker.errors import APIError

from weighin.child_process import open_process, ready, signal_each, wait_for_end
from weighin.errors import IsolationUnavailable
from weighin.isolation.base import Exit
from weighin.isolation.docker.attachment import Attachment
from weighin.isolation.docker.container import is_here, oom_killed, wait_for_container
from weighin.isolation.docker.engine import elsewhere, explained
from weighin.isolation.docker.keeper import Keeper
from weighin.probes.cgroup import MemoryCgroup, PeakMark, memory_cgroup_of, pids_in

KILLED_AT_BIRTH: Final = Exit(code=None, signal=signal.SIGKILL, oom_killed=True)

_BIRTH_TIMEOUT_S: Final = 30.0
_PROGRAM_TIMEOUT_S: Final = 0.1
_LOOK_S: Final = 0.0005
_EXIT_TIMEOUT_S: Final = 2.0


class DockerCommand:
    """A command in a container; the class implements ``weighin.isolation.base.RunningCommand``."""

    shares_terminal = False

    def __init__(
        self,
        client: docker.APIClient,
        container: str,
        keeper: Keeper,
        attachment: Attachment,
        *,
        on_close: Callable[[], None],
    ) -> None:
        """``container`` exists but has not started; ``attachment`` has the container's streams."""
        self._client, self._container = client, container
        self._keeper, self._attachment = keeper, attachment
        self._on_close = on_close
        self._exit: Exit | None = None
        self._process: int | None = None
        self.pid = 0
        self.cgroup: Path | None = None
        self.helpers: frozenset[int] = frozenset()
        self.unseen = "the kernel killed the container at its RAM limit, before the command started"

    def begin(self, *, limited: bool) -> None:
        """Start the container, find its processes, and let the command begin.

        Raises:
            IsolationUnavailable: the engine runs on another machine, the container's cgroup is not
                mounted here, or the keeper (the container's first process) did not start.
        """
        self._client.start(self._container)
        keeper = int(self._state()["Pid"])
        is_visible = keeper and is_here(self._container, keeper)
        if not is_visible and self._state()["Running"]:
            raise elsewhere()
        self.cgroup = memory_cgroup_of(keeper) if is_visible else None
        child = self._keeper.wait_for_child(keeper, _BIRTH_TIMEOUT_S) if is_visible else None
        if child and self.cgroup is None:
            raise IsolationUnavailable(
                "the memory cgroup of the container is not mounted on this machine",
                "use --isolation cgroup or process",
            )
        pid = next((pid for pid in self.members() if _pid_inside(pid) == child), 0) if child else 0
        if not pid or self.cgroup is None:
            self._explain_stillbirth(limited=limited)
            return
        self.pid = pid
        self.helpers = frozenset(self.members()) - {self.pid}
        self.unseen = ""
        self._process = open_process(self.pid)
        mark = PeakMark(MemoryCgroup(self.cgroup))
        mark.reset()  # so that the peak does not include the container's own start
        mark.close()
        self._attachment.interrupted = self.send_signal
        self._attachment.begin()
        self._keeper.go()
        self._wait_for_program(keeper)

    def _wait_for_program(self, keeper: int) -> None:
        """Wait at most 0.1 s until the keeper's child is the command (has another command line)."""
        deadline = time.monotonic() + _PROGRAM_TIMEOUT_S
        while _command_line(self.pid) == _command_line(keeper) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)

    def _state(self) -> dict[str, Any]:
        return dict(self._client.inspect_container(self._container)["State"])

    def end_at_birth(self) -> None:
        """Record that the RAM limit was too small for the engine to start the container."""
        self._exit = KILLED_AT_BIRTH
        self.cgroup = None

    def _explain_stillbirth(self, *, limited: bool) -> None:
        if limited and oom_killed(self._client, self._container, self.cgroup):
            self.end_at_birth()
            return
        raise IsolationUnavailable(
            "weighin's shell, which starts the command in the container, did not start in this image",
            "see whether the command starts without weighin: docker run IMAGE COMMAND; or name"
            " another image: --image IMAGE",
        )

    def wait(self, timeout_s: float) -> bool:
        return wait_for_end(self._process, self._has_ended, timeout_s)

    def _has_ended(self) -> bool:
        if self._exit is not None:
            return True
        if self._process is not None:
            return bool(ready([self._process], 0))
        return self.pid not in self.members()

    def reap(self) -> Exit:
        """Return how the command ended, after all its output has been passed on."""
        if self._exit is None:
            self._exit = self._keeper.exit(_EXIT_TIMEOUT_S) or self._exit_of_container()
            if self._exit.signal == signal.SIGKILL:
                killed = oom_killed(self._client, self._container, self.cgroup)
                self._exit = Exit(None, signal.SIGKILL, oom_killed=killed)
            self._keeper.end_output(self._attachment.mark)
            self._attachment.finish()
        return self._exit

    def _exit_of_container(self) -> Exit:
        """Return the command's exit as the engine reports it, because the keeper was killed too."""
        self.unseen = "the container was killed with its command, so the last counters are lost"
        deadline = time.monotonic() + _EXIT_TIMEOUT_S
        code = wait_for_container(self._client, self._container, deadline)
        return Exit(code) if code <= 128 else Exit(None, signal=code - 128)

    def send_signal(self, number: int) -> None:
        if self.pid and self._exit is None:
            with contextlib.suppress(PermissionError):
                signal_each([self.pid], number)

    def members(self) -> list[int]:
        """Return the pids in the container, except those of weighin's helpers."""
        pids = pids_in(self.cgroup) if self.cgroup else []
        return [pid for pid in pids if pid not in self.helpers]

    def kill(self) -> None:
        """Kill all processes of the container except weighin's helpers.

        If this user may not kill them, kill the whole container.
        """
        killed: set[int] = set()
        try:
            while new := set(self.members()) - killed:
                signal_each(new)
                killed |= new
        except PermissionError:  # a rootless engine, or one with user namespaces
            with explained("kill a container"), contextlib.suppress(APIError):
                self._client.kill(self._container, signal.SIGKILL)

    def close(self) -> None:
        if self._process is not None:
            os.close(self._process)
            self._process = None
        self._keeper.close()
        self._attachment.close()
        self._on_close()


def _pid_inside(pid: int) -> int | None:
    """Return the pid that a process has in its own pid namespace; None if the process has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return None
    line = next(line for line in status.splitlines() if line.startswith("NSpid:"))
    return int(line.split()[-1])


def _command_line(pid: int) -> bytes | None:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # the process has ended
        return None
