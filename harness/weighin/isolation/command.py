"""Start a command to measure, with the streams, terminal and folder that it has without weighin."""

import contextlib
import os
import resource
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from weighin.child_process import open_process, signal_each, wait_for_end
from weighin.errors import ConfigError
from weighin.isolation.base import Exit, Streams
from weighin.parent_process import end_with_parent

_UNSEEN: Final = (
    "a plain process has no cgroup of its own, so these are not seen: kernel memory, huge pages, and"
    " files in memory that no process maps (memfd, /dev/shm)"
)


class LocalCommand:
    """A command that is a child of this process, in this process's session and process group.

    Ctrl-C in a terminal reaches the command, and the command may use the terminal. The command
    enters the cgroups in ``groups`` before its first instruction.
    """

    helpers: frozenset[int] = frozenset()
    shares_terminal = True

    def __init__(
        self,
        command: Sequence[str],
        *,
        folder: str,
        environment: Mapping[str, str],
        streams: Streams,
        groups: Sequence[Path] = (),
        limit: int | None = None,
    ) -> None:
        """Start the command; the resource limit ``limit`` marks the command and its descendants."""
        self.groups = tuple(groups)
        self.cgroup = groups[0] if groups else None
        self.unseen = "" if groups else _UNSEEN
        with contextlib.ExitStack() as opened:
            files: list[int] = []
            for group in groups:
                files.append(os.open(group / "cgroup.procs", os.O_WRONLY | os.O_CLOEXEC))
                opened.callback(os.close, files[-1])
            try:
                self._popen = subprocess.Popen(
                    command,
                    cwd=folder,
                    env=os.environ | dict(environment),
                    stdin=streams.stdin,
                    stdout=streams.stdout,
                    stderr=streams.stderr,
                    preexec_fn=_entering(files, limit),  # noqa: PLW1509 (it makes system calls only)
                )
            except OSError as error:
                raise ConfigError(
                    f"cannot start {command[0]!r} in {folder}: {error.strerror}",
                    "give a command as in a shell: weighin run -- python train.py",
                ) from None
        self.pid = self._popen.pid
        self._process = open_process(self.pid)

    def wait(self, timeout_s: float) -> bool:
        return wait_for_end(self._process, self._has_ended, timeout_s)

    def _has_ended(self) -> bool:
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, self.pid, options) is not None

    def reap(self) -> Exit:
        code = self._popen.wait()
        return Exit(code) if code >= 0 else Exit(None, signal=-code)

    def send_signal(self, number: int) -> None:
        signal_each([self.pid], number)

    def close(self) -> None:
        """Kill the first process if it still runs, and reap it; repeated calls do nothing."""
        if self._process is not None:
            os.close(self._process)
            self._process = None
        if self._popen.returncode is None:
            self.send_signal(signal.SIGKILL)
            self._popen.wait()


def _entering(files: Sequence[int], limit: int | None) -> Callable[[], None]:
    """Return a function that a new process calls before it runs the command.

    The function enters the cgroups, sets the resource limit, and makes the process end with its
    parent.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_RTTIME)

    def enter() -> None:
        for file in files:
            os.write(file, b"0")  # 0 stands for the process that writes
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_RTTIME, (limit, hard))
        end_with_parent()

    return enter
