"""Run a worker or a command on this machine: as a plain process here, or for ``cgroup`` in cgroups."""

import contextlib
import errno
import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, Final

import psutil

from weighin import child_process
from weighin.cell import Cell, Job
from weighin.child_process import (
    PATIENCE_S,
    adopt_orphans,
    end_with_parent,
    open_process,
    signal_each,
)
from weighin.errors import ConfigError, IsolationUnavailable, StillRunning
from weighin.isolation.base import Exit, Isolation, Running, Streams, connected
from weighin.probes import mounts
from weighin.probes.cgroup import (
    folders_of,
    is_left_behind,
    members_of,
    owned_name,
    read_kernel,
    start_time,
)
from weighin.program_phases import VARIABLE as PHASES_VARIABLE
from weighin.protocol import encode_job

WORKER = child_process.module("weighin.worker")
WORKER_VARIABLE = "WEIGHIN_WORKER"
"""The environment variable that marks a worker or command; all its processes inherit the mark."""
PASSED: Final = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
    signal.SIGALRM, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH,
)  # fmt: skip
"""The signals that weighin passes on to a command, and blocks in itself meanwhile."""

_UNSEEN: Final = "a plain process has no cgroup of its own"
_UNSEEN_OF_COMMAND: Final = (
    f"{_UNSEEN}, so these are not seen: kernel memory, huge pages, and"
    " files in memory that no process maps (memfd, /dev/shm)"
)
_NOT_ORPHANS: Final = ("py-spy",)  # weighin itself starts it beside a command
_PAUSE_S = 0.005  # a killed process takes a moment to end, and may just have forked
_numbers = itertools.count()


class ProcessIsolation(Isolation):
    """Runs plain processes, one for each cell (measurement)."""

    name = "process"
    limits = False

    def check(self) -> None:
        """Raise IsolationUnavailable if the system has no /proc/PID/clear_refs, which resets peaks."""
        if not Path("/proc/self/clear_refs").exists():
            raise IsolationUnavailable(
                "this system has no /proc/PID/clear_refs, without which weighin cannot measure"
                " peaks",
                "run on Linux",
            )

    def start(self, job: Job) -> "Started":
        with self._groups(job.cell) as groups:
            running = Started(WORKER, environment=job.cell.environment, groups=groups)
        running.channel.send(encode_job(job))
        return running

    def start_command(
        self, cell: Cell, folder: str, streams: Streams, _mounts: Sequence[str] = ()
    ) -> "Started":
        environment = cell.environment
        with self._groups(cell) as groups:
            return Started(
                cell.command, environment=environment, groups=groups, folder=folder, streams=streams
            )

    def _groups(self, _cell: Cell) -> AbstractContextManager[Sequence[Path]]:
        """Return the cgroups of a cell; a plain process has none."""
        return nullcontext(())

    def remove_stale(self) -> list[str]:
        """Kill what workers and commands of killed runs started; they themselves ended with weighin."""
        return end_orphans()


class Started(Running):
    """A worker or, with ``streams``, a command. It enters ``groups`` before its first instruction.

    A worker has pipes (``channel``), and a session and process group of its own, so that Ctrl-C in a
    terminal does not reach it. A command has this process's session and process group, and may use
    the terminal. Without cgroups, weighin adopts a command's orphans until ``close``, which removes
    the cgroups.
    """

    shares_terminal = True

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        groups: Sequence[Path] = (),
        folder: str = "",
        streams: Streams | None = None,
    ) -> None:
        self.groups = tuple(groups)
        self.cgroup = groups[0] if groups else None
        is_worker = streams is None
        self._why = _UNSEEN if is_worker else _UNSEEN_OF_COMMAND
        self.unseen = "" if groups else self._why
        self._tree: ProcessTree | None = None
        if is_worker or not groups:
            self._tree = ProcessTree(adopts=not is_worker or child_process.is_program)
        variables = os.environ | dict(environment or {})
        variables |= self._tree.environment if self._tree else {}
        if is_worker:
            # If weighin itself is measured, its worker must not report to the outer weighin.
            variables.pop(PHASES_VARIABLE, None)
            variables["PYTHONPATH"] = os.pathsep.join(child_process.CODE_PATH)
        try:
            with connected(streams) as (own, self.channel):
                self._popen = _start(command, variables, groups, folder, own, apart=is_worker)
        except BaseException:
            if self._tree:
                self._tree.end()
            raise
        self.pid = self._popen.pid
        self.process = open_process(self.pid)
        if self._tree:
            self._tree.begin(self.pid)

    def has_ended(self) -> bool:
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return self.is_reaped or os.waitid(os.P_PID, self.pid, options) is not None

    @property
    def is_reaped(self) -> bool:
        return self._popen.returncode is not None

    def reap(self) -> Exit:
        try:
            code = self._popen.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            return Exit(None, still_runs=True)
        return Exit(code) if code >= 0 else Exit(None, signal=-code)

    def members(self) -> list[int]:
        """Return the pids of all processes, in cgroups that they made below their own, too."""
        if self.groups:
            return members_of(self.groups[0])
        return self._tree.members() if self._tree else []

    def kill(self) -> None:
        if self.groups:
            frozen = self.members()
            kill_members(self.groups[0])
            self.send_signal(signal.SIGKILL)  # it may have left its group
            thaw(frozen)
        elif self._tree:
            thaw(self._tree.kill())

    def close(self) -> None:
        """Kill what still runs, reap the first process, remove the cgroups; a second call does nothing.

        Raises:
            StillRunning: a process does not end, not even after SIGKILL.
        """
        try:
            if not self.is_reaped:
                self.send_signal(signal.SIGKILL)
                if self.reap().still_runs:
                    removal_error(*self.groups, patience_s=0)
                    raise StillRunning(
                        f"the measured process {self.pid} does not end, not even after SIGKILL"
                    )
        finally:
            if self._tree:
                thaw(self._tree.kill())
                self._tree.end()
                if not self.groups:
                    self.unseen = self._tree.unseen(self._why)
            super().close()
        remove([*self.groups])


def _start(
    command: Sequence[str],
    variables: Mapping[str, str],
    groups: Sequence[Path],
    folder: str,
    streams: Streams,
    *,
    apart: bool,
) -> "subprocess.Popen[Any]":
    """Start a command as a shell does; if ``apart``, in a session and process group of its own.

    Raises:
        ConfigError: a command does not start; for a worker, OSError.
    """
    # Popen would go on to the next program of this name where the first is no binary.
    program = shutil.which(command[0], path=variables.get("PATH")) or command[0]
    with contextlib.ExitStack() as opened:
        files = [opened.enter_context((group / "cgroup.procs").open("wb", 0)) for group in groups]

        def begin() -> None:
            """Enter the cgroups, and end with the parent, before the command's first instruction."""
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)
            for file in files:
                file.write(b"0")  # 0 stands for the process that writes
            end_with_parent()

        start = partial(
            subprocess.Popen,
            cwd=folder or None,
            env=variables,
            stdin=streams.stdin,
            stdout=streams.stdout,
            stderr=streams.stderr,
            start_new_session=apart,
            close_fds=apart,  # a shell passes descriptors on, for make -j and diff <(a) <(b)
            preexec_fn=begin if groups or not apart else None,  # without one, Popen calls vfork
        )
        try:
            try:
                return start(command, executable=program)
            except OSError as error:
                if error.errno != errno.ENOEXEC or not _is_text(Path(folder, program)):
                    raise
                return start(("/bin/sh", program, *command[1:]))  # as a shell does
        except OSError as error:
            if apart:
                raise
            raise ConfigError(
                f"cannot start {command[0]!r} in {folder}: {error.strerror}",
                "give a command as in a shell: weighin run -- python train.py",
            ) from None


class ProcessTree:
    """The processes of a worker or command: a child of this process, and its descendants.

    With ``adopts``, weighin is a child subreaper until ``end``, which becomes the parent of a descendant
    whose parent has ended. Each child that it gets meanwhile then counts as such an orphan, unless it
    started before the first process, or was seen below a process that did: those are foreign. Only the
    program ``weighin`` may adopt: in another program, such as pytest, an orphan could not be told from
    a child that the program started meanwhile. Orphans are then found by a variable that they inherit.

    Attributes:
        environment: the variable that marks the processes, also for a later run of weighin.
        spared: the names of the processes that the last ``kill`` was not allowed to kill.
    """

    def __init__(self, *, adopts: bool) -> None:
        self._mark = owned_name(next(_numbers))
        self.environment = {WORKER_VARIABLE: self._mark}
        self.spared: list[str] = []
        self._adopts = adopts
        self._adopted_before = adopts and adopt_orphans()
        self._is_over = False
        self._pid, self._began = 0, inf
        self._foreign: dict[int, int] = {}  # by pid: when it started, as pids are used again

    def begin(self, pid: int) -> None:
        """Look from now on also for ``pid``, a child of this process, and its descendants."""
        self._pid, self._began = pid, start_time(pid) or inf
        self.members()  # a foreign process that runs now may become an orphan, too

    def members(self) -> list[int]:
        """Return the pids of the processes that have not ended; reap orphans that have."""
        here, family, foreign, found = os.getpid(), {self._pid}, set[int](), []
        for one in psutil.Process().children(recursive=True):  # a parent is before its children
            with suppress(psutil.NoSuchProcess, ChildProcessError):  # it has ended, and was reaped
                parent, started = one.ppid(), start_time(one.pid)
                if started is None:
                    continue
                is_child = parent == here and one.pid != self._pid
                is_known = self._foreign.get(one.pid) == started
                if is_known or parent in foreign or (is_child and started < self._began):
                    foreign.add(one.pid)
                    self._foreign[one.pid] = started
                    continue
                is_orphan = is_child and self._adopts
                if is_orphan and one.name() in _NOT_ORPHANS:
                    continue
                if not (is_orphan or one.pid == self._pid or parent in family):
                    continue
                family.add(one.pid)
                if one.status() != psutil.STATUS_ZOMBIE:
                    found.append(one.pid)
                elif is_orphan:
                    os.waitpid(one.pid, os.WNOHANG)
        return found if self._adopts else sorted({*found, *self._marked()})

    def _marked(self) -> list[int]:
        return [pid for pid in psutil.pids() if mark_of(pid) == self._mark]

    def kill(self) -> list[int]:
        """Send SIGKILL to all processes except those of another user; return the pids of the killed."""
        killed, self.spared = [], []
        for pid in sorted({*self.members(), *self._marked()}):
            try:
                signal_each([pid])
                killed.append(pid)
            except PermissionError:
                with suppress(psutil.NoSuchProcess):
                    self.spared.append(f"{psutil.Process(pid).name()} (process {pid})")
        return killed

    def end(self) -> None:
        """Kill all processes, wait up to 10 s for the end of the killed, and adopt no more orphans."""
        deadline = time.monotonic() + PATIENCE_S
        try:
            while self.kill() and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
        finally:
            if self._adopts and not self._is_over:
                adopt_orphans(adopt=self._adopted_before)
            self._is_over = True

    def unseen(self, why: str) -> str:
        """Return ``why`` weighin sees only a part, and the processes that it was not allowed to kill."""
        spared = ", ".join(self.spared)
        return f"{why}; weighin may not end these of another user: {spared}" if spared else why


def mark_of(pid: int) -> str | None:
    """Return the mark of a process; None if it has no mark, has ended, or is another user's."""
    prefix = f"{WORKER_VARIABLE}="
    try:
        variables = read_kernel(Path(f"/proc/{pid}/environ")).split("\0")
    except OSError:
        return None
    return next((line.removeprefix(prefix) for line in variables if line.startswith(prefix)), None)


def end_orphans() -> list[str]:
    """Kill the processes whose mark names an ended weighin process; return one line for each.

    A process with the mark of this process or of one above it is not killed, because a killed run may
    have started the shell in which weighin, or a weighin around this one, runs now.
    """
    above = [one.pid for one in psutil.Process().parents()]
    ours, ended = {mark_of(pid) for pid in (os.getpid(), *above)}, dict[int, str]()
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        marks = {pid: mark for pid in psutil.pids() if (mark := mark_of(pid)) and mark not in ours}
        if not (left := {pid: mark for pid, mark in marks.items() if is_left_behind(mark)}):
            break
        signal_each(left)
        ended |= left
        time.sleep(_PAUSE_S)
    return [f"process {pid} of process {mark.partition('-')[0]}" for pid, mark in ended.items()]


def kill_members(group: Path) -> None:
    if (kill := group / "cgroup.kill").exists():  # cgroup v2 since Linux 5.14
        with contextlib.suppress(OSError):
            kill.write_text("1")
        return
    signal_each(members_of(group))


def remove(groups: list[Path]) -> None:
    """Kill the processes in the given cgroups, and remove the cgroups.

    Raises:
        StillRunning: a process in one of the cgroups does not end.
        IsolationUnavailable: a cgroup without processes cannot be removed.
    """
    if (error := removal_error(*groups, patience_s=PATIENCE_S)) is None:
        return
    if error.errno == errno.EBUSY:
        raise StillRunning(
            f"a process in the cgroup {error.filename} does not end, not even after SIGKILL"
        )
    raise IsolationUnavailable(
        f"cannot remove the cgroup {error.filename}: {error.strerror}", f"rmdir {error.filename}"
    )


def removal_error(*groups: Path, patience_s: float) -> OSError | None:
    """Kill all processes in the cgroups and below, and remove these cgroups.

    Return the error for a cgroup that remains; None if no cgroup remains.
    """
    deadline = time.monotonic() + patience_s
    left: OSError | None = None
    for group in groups:
        while group.exists():
            kill_members(group)
            try:
                for folder in folders_of(group):
                    Path(folder).rmdir()
            except FileNotFoundError:  # another process removed a group
                continue
            except OSError as error:
                if time.monotonic() > deadline:
                    left = error
                    break
                time.sleep(0.005)
    return left


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
