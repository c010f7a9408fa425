"""Start a command to measure, with the streams, terminal and folder that it has without weighin."""

import contextlib
import errno
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from weighin.child_process import (
    PATIENCE_S,
    end_with_parent,
    entering,
    open_process,
    signal_each,
    wait_for_end,
)
from weighin.errors import ConfigError, StillRunning
from weighin.isolation.base import Exit, Streams
from weighin.probes import mounts
from weighin.probes.cgroup import read_kernel

UNSEEN: Final = (
    "a plain process has no cgroup of its own, so these are not seen: kernel memory, huge pages, and"
    " files in memory that no process maps (memfd, /dev/shm)"
)

PASSED: Final = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
    signal.SIGALRM, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH,
)  # fmt: skip
"""The signals that weighin passes on to a command, and blocks in itself meanwhile."""


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
    ) -> None:
        self.groups = tuple(groups)
        self.cgroup = groups[0] if groups else None
        self.unseen = "" if groups else UNSEEN
        with entering(groups) as enter:
            variables = os.environ | dict(environment)
            # Popen would go on to the next program of this name where the first is no binary.
            program = shutil.which(command[0], path=variables.get("PATH")) or command[0]
            start = partial(
                subprocess.Popen,
                cwd=folder or None,
                env=variables,
                stdin=streams.stdin,
                stdout=streams.stdout,
                stderr=streams.stderr,
                close_fds=False,  # a shell passes descriptors on, for make -j and diff <(a) <(b)
                preexec_fn=partial(_begin, enter),
            )
            try:
                try:
                    self._popen = start(command, executable=program)
                except OSError as error:
                    if error.errno != errno.ENOEXEC or not _is_text(Path(folder, program)):
                        raise
                    self._popen = start(("/bin/sh", program, *command[1:]))  # as a shell does
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
        try:
            code = self._popen.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            return Exit(None, still_runs=True)
        return Exit(code) if code >= 0 else Exit(None, signal=-code)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(PermissionError):  # sudo, for example, is another user's
            signal_each([self.pid], number)

    def close(self) -> None:
        """Kill the first process if it still runs, and reap it; repeated calls do nothing.

        Raises:
            StillRunning: the process does not end, not even after SIGKILL.
        """
        if self._process is not None:
            os.close(self._process)
            self._process = None
        if self._popen.returncode is None:
            self.send_signal(signal.SIGKILL)
            if self.reap().still_runs:
                raise StillRunning(
                    f"the command's process {self.pid} does not end, not even after SIGKILL"
                )


def thaw(pids: Iterable[int]) -> None:
    """Thaw the freezer groups (cgroup v1) of processes that got SIGKILL, which ends none in a frozen
    group; on v2 it does.
    """
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended, or the group is not this user's
            lines = read_kernel(Path(f"/proc/{pid}/cgroup")).splitlines()
            group = next((line.split(":", 2)[2] for line in lines if ":freezer:" in line), "/")
            for mount in (each.place for each in mounts.read() if "freezer" in each.options):
                for above in (own := Path(f"{mount}{group}"), *own.parents):
                    if (state := above / "freezer.state").exists():
                        state.write_text("THAWED")


def _is_text(script: Path) -> bool:
    """Tell whether a file without #! is a script, by a shell's rule: no zero byte at its beginning."""
    with script.open("rb") as file:
        return b"\0" not in file.read(128)


def _begin(enter: Callable[[], None] | None) -> None:
    """Enter the cgroups, and end with the parent; a new process calls this before the command runs."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)
    if enter:
        enter()
    end_with_parent()
