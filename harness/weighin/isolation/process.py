"""Run a worker or a command on this machine: as a plain process, or in memory cgroups of its own."""

import itertools
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psutil

from weighin import child_process
from weighin.cell import Cell
from weighin.errors import ConfigError, IsolationUnavailable, StillRunning
from weighin.isolation import cgroup
from weighin.isolation.base import OWN_STREAMS, Exit, Isolation, Running, Streams
from weighin.phase_reporter import read_text
from weighin.probes.cgroup import is_left_behind, members_of, memory_hierarchy, owned_name
from weighin.program_phases import VARIABLE as PHASES_VARIABLE

WORKER_VARIABLE = "WEIGHIN_WORKER"
"""The environment variable that marks a worker or command; all its processes inherit the mark."""
PASSED: Final = (
    signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2,
    signal.SIGALRM, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH,
)  # fmt: skip
"""The signals that weighin passes on to a command, and blocks in itself meanwhile."""

_UNSEEN: Final = "a plain process has no cgroup of its own"
_UNSEEN_OF_COMMAND: Final = (
    ", so these are not seen: kernel memory, huge pages, and files in memory that no process maps"
    " (memfd, /dev/shm)"
)
_PAUSE_S: Final = 0.005  # a killed process takes a moment to end, and may just have forked
_numbers = itertools.count()


class ProcessIsolation(Isolation):
    name = "process"
    limits = False

    def check(self) -> None:
        if not Path("/proc/self/clear_refs").exists():
            raise IsolationUnavailable(
                "this system has no /proc/PID/clear_refs, without which weighin cannot measure peaks",
                "run on Linux",
            )

    def start(
        self,
        cell: Cell,
        command: Sequence[str],
        folder: str = "",
        streams: Streams = OWN_STREAMS,
        _mounts: Iterable[str] = (),
    ) -> "Started":
        is_worker = cell.operation != "command"
        groups = cgroup.make(cell) if self.limits else []
        return Started(command, cell.environment, groups, folder, streams, is_worker=is_worker)

    def remove_stale(self) -> list[str]:
        # A killed run may have started the shell in which weighin runs now.
        above = [os.getpid(), *(one.pid for one in psutil.Process().parents())]
        ended = dict[int, str]()
        deadline = time.monotonic() + child_process.PATIENCE_S
        while time.monotonic() < deadline:
            found = _marks()
            ours = {found.get(pid) for pid in above}
            left = {p: m for p, m in found.items() if m not in ours and is_left_behind(m)}
            if not left:
                break
            child_process.signal_each(left)
            ended |= left
            time.sleep(_PAUSE_S)
        return [f"process {pid} of process {mark.partition('-')[0]}" for pid, mark in ended.items()]


class CgroupIsolation(ProcessIsolation):
    name = "cgroup"
    limits = True

    def check(self) -> None:
        if memory_hierarchy() is None:
            why = "this machine has no cgroup memory controller (neither v2 nor v1)"
            raise IsolationUnavailable(why, "boot with cgroup_enable=memory")
        with cgroup.temporary_group() as group:
            cgroup.limit(group, 2**40)

    def remove_stale(self) -> list[str]:
        removed = []
        for group in [one for root in cgroup.roots() for one in root.glob(f"{cgroup.PREFIX}*")]:
            if is_left_behind(group.name.removeprefix(cgroup.PREFIX)):
                with suppress(StillRunning, IsolationUnavailable):
                    cgroup.remove([group])
                    removed.append(f"cgroup {group}")
        return removed

    def describe(self) -> dict[str, str]:
        return {"groups": str(cgroup.groups_root())}


class Started(Running):
    """A worker or a command, in ``groups`` from its first instruction on. A worker has a session of its own, which
    Ctrl-C does not reach; a command may use the terminal. Without cgroups, weighin adopts its orphans until ``close``.
    """

    shares_terminal = True

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        groups: Sequence[Path] = (),
        folder: str = "",
        streams: Streams = OWN_STREAMS,
        *,
        is_worker: bool = False,
    ) -> None:
        self.groups, self.cgroup = groups, groups[0] if groups else None
        self._tree: ProcessTree | None = None
        variables = os.environ | dict(environment or {})
        if not groups:
            self.unseen = _UNSEEN + ("" if is_worker else _UNSEEN_OF_COMMAND)
        if not groups or is_worker:
            self._tree = ProcessTree(adopts=not is_worker or child_process.is_program)
            variables[WORKER_VARIABLE] = self._tree.mark
        if is_worker:
            # If weighin itself is measured, its worker must not report to the outer weighin.
            variables.pop(PHASES_VARIABLE, None)
            variables["PYTHONPATH"] = child_process.path_of_worker(command[0])
        place = {**streams._asdict(), "env": variables, "cwd": (not is_worker and folder) or None}
        try:
            self._popen = self._start(command, place, is_worker)
        except BaseException:
            if self._tree:
                self._tree.end()
            cgroup.remove(groups)
            raise
        self.pid = self._popen.pid
        self.process = child_process.open_process(self.pid)
        if self._tree:
            self._tree.pid = self.pid

    def _start(
        self, command: Sequence[str], place: dict[str, Any], is_worker: bool
    ) -> "subprocess.Popen[Any]":
        # Popen would go on to the next program of this name where the first is no binary.
        program = shutil.which(command[0], path=place["env"].get("PATH")) or command[0]
        here, files = os.getpid(), [f"{group}/cgroup.procs" for group in self.groups]

        def begin() -> None:
            """Enter the cgroups, and end with the parent, before the command's first instruction."""
            signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED)
            for file in files:
                os.write(os.open(file, os.O_WRONLY), b"0")  # 0 stands for the process that writes
            child_process.end_with_parent(here)

        try:
            return subprocess.Popen(
                command,
                executable=program,
                **place,
                start_new_session=is_worker,
                close_fds=is_worker,  # a shell passes descriptors on, for make -j and diff <(a) <(b)
                # Without one, Popen calls vfork.
                preexec_fn=begin if files or not is_worker else None,  # noqa: PLW1509
            )
        except subprocess.SubprocessError:  # of ``begin``
            where = f": it could not enter its cgroup ({', '.join(files)})" if files else ""
            raise IsolationUnavailable(f"the process cannot be started{where}") from None
        except OSError as error:
            if is_worker:
                raise
            raise ConfigError(
                f"cannot start {command[0]!r} in {place['cwd'] or ''}: {error.strerror}",
                "give a command as in a shell: weighin run -- python train.py",
            ) from None

    def has_ended(self) -> bool:
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return bool(self.ended or os.waitid(os.P_PID, self.pid, options))

    def reap(self) -> Exit:
        try:
            code = self._popen.wait(child_process.PATIENCE_S)
        except subprocess.TimeoutExpired:
            return Exit(None, still_runs=True)
        self.ended = Exit(code) if code >= 0 else Exit(None, signal=-code)
        return self.ended

    def members(self) -> list[int]:
        if self.groups:
            return members_of(self.groups[0])
        return self._tree.members() if self._tree else []

    def kill(self) -> None:
        if self.groups:
            cgroup.kill_members(self.groups[0])
            self.send_signal(signal.SIGKILL)  # it may have left its group
        elif self._tree:
            self._tree.kill()

    def close(self) -> None:
        ended = self.ended
        try:
            self.send_signal(signal.SIGKILL)
            ended = ended or self.reap()
        finally:
            if self._tree:
                self._tree.end()
            super().close()
        try:
            cgroup.remove(self.groups, waits=not ended.still_runs)
        finally:
            if ended.still_runs:
                why = f"the measured process {self.pid} does not end, not even after SIGKILL"
                raise StillRunning(why)


class ProcessTree:
    """The processes of a worker or command: a child of this process, and its descendants. With ``adopts``, weighin
    is a child subreaper until ``end``. A child that it gets meanwhile counts as an orphan, unless it ran before, or
    was seen below a process that did (``_foreign``). Another program, such as pytest, starts children itself and
    adopts none: orphans are then found by ``mark``, the value of a variable that they inherit.
    """

    def __init__(self, *, adopts: bool) -> None:
        self.mark, self.pid = owned_name(next(_numbers)), 0
        self._adopts = adopts
        self._adopted_before = adopts and child_process.adopt_orphans()
        self._is_over = False
        self._foreign = set(psutil.Process().children(recursive=True)) if adopts else set()

    def members(self) -> list[int]:
        """Return the pids of the processes that have not ended; reap orphans that have."""
        here, family, foreign, found = os.getpid(), {self.pid}, set[int](), []
        for one in psutil.Process().children(recursive=True):  # a parent is before its children
            with suppress(psutil.NoSuchProcess, ChildProcessError):  # it has ended, and was reaped
                parent = one.ppid()
                is_orphan = self._adopts and parent == here and one.pid != self.pid
                if one in self._foreign or parent in foreign:
                    foreign.add(one.pid)
                    self._foreign.add(one)
                elif is_orphan and one.name() == "py-spy":  # weighin itself starts it
                    continue
                elif is_orphan or one.pid == self.pid or parent in family:
                    family.add(one.pid)
                    if one.status() != psutil.STATUS_ZOMBIE:
                        found.append(one.pid)
                    elif is_orphan:
                        os.waitpid(one.pid, os.WNOHANG)
        return found if self._adopts else sorted({*found, *self._marked()})

    def _marked(self) -> list[int]:
        return [pid for pid, mark in _marks().items() if mark == self.mark]

    def kill(self) -> list[int]:
        """Kill all processes, except those of another user, such as sudo's; return the pids of the killed."""
        killed = []
        for pid in sorted({*self.members(), *self._marked()}):
            with suppress(PermissionError):
                child_process.signal_each([pid])
                killed.append(pid)
        return killed

    def end(self) -> None:
        """Kill all processes, wait up to 10 s for their end, and adopt no more orphans. A second call does nothing."""
        if self._is_over:
            return
        self._is_over, deadline = True, time.monotonic() + child_process.PATIENCE_S
        try:
            while self.kill() and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
        finally:
            if self._adopts:
                child_process.adopt_orphans(adopt=self._adopted_before)


def _marks() -> dict[int, str]:
    prefix, found = f"{WORKER_VARIABLE}=", {}
    for pid in psutil.pids():
        with suppress(OSError):  # it has ended, or is another user's
            for variable in read_text(f"/proc/{pid}/environ").split("\0"):
                if variable.startswith(prefix):
                    found[pid] = variable.removeprefix(prefix)
    return found
