"""Read the stacks of a command's Python processes with py-spy when the command uses most memory: a command
that is killed for lack of memory prints no traceback. py-spy stops each process while it reads it.
"""

import shutil
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from weighin import install
from weighin.files import parse_json
from weighin.phase_reporter import read_text
from weighin.probes.cgroup import room_in
from weighin.probes.process import read_status
from weighin.result import Stack
from weighin.text import one_line
from weighin.units import MIB

_MOST_FRAMES: Final = 40
_PATIENCE_S: Final = 3.0
_GROWTH: Final = 0.05
_GROWTH_BYTES: Final = 16 * MIB
_MUCH: Final = 1 / 4  # of the last reading's usage: one is at least at 4/5 of a sampled peak
_MUCH_BYTES: Final = 32 * MIB
_SOON_NS: Final = 50_000_000  # to the limit; a reading takes about 20 ms
_LEAST_SHARE: Final = 0.75  # of the limit; a stack at less usage tells nothing of the peak
_MARGIN: Final = 0.1
_MARGIN_BYTES: Final = 32 * MIB
_STEPS_IN_MARGIN: Final = 16  # readings while the usage rises through the margin, at most


class StackTaker:
    """Reads stacks, for ``frozen_ns`` in all, in which py-spy stops processes for moments."""

    def __init__(self, pids: Callable[[], list[int]], cgroup: Path | None = None) -> None:
        self.frozen_ns = 0
        self._pids = pids
        self._limit = room_in(cgroup) if cgroup else None
        self._start_s = self._reading_s = self._read_s = time.monotonic()
        self._taken_ns = self._taken_bytes = 0
        self._last = (0, 0)
        self._was_near = False
        self._reading: list[Future[list[Stack]]] = []
        self._looks: deque[list[Stack]] = deque(maxlen=8)
        self._others: set[Path] = set()  # programs that are not Python
        ours = shutil.which("py-spy", path=Path(sys.executable).parent)
        self._program = ours or shutil.which("py-spy") or ""
        self._error = "no Python process used more memory than before"
        if not self._program:
            self._error = f"py-spy is not installed: {install.command('stacks')}"

    @property
    def stacks(self) -> tuple[Stack, ...]:
        """The stacks of the last 8 readings, the oldest first, when the last one has ended."""
        self._keep()
        return tuple(stack for look in self._looks for stack in look)

    @property
    def why(self) -> str:
        return "" if self.stacks else self._error

    def look(self, t_ns: int, usage_bytes: int) -> None:
        """Begin to read stacks if the usage at ``t_ns`` is near the limit, or much above the last one. The stacks'
        usage is the largest until the reading has ended.
        """
        is_read = all(one.done() for one in self._reading)
        if self._reading and usage_bytes > self._taken_bytes:
            self._taken_ns, self._taken_bytes = t_ns, usage_bytes
        if not is_read:
            return
        self._keep()
        if not self._program or not self._is_worth(t_ns, usage_bytes):
            return
        sizes = {}
        for pid in self._pids():
            with suppress(OSError):  # the process has ended, or is another user's
                if _program_of(pid) not in self._others:
                    sizes[pid] = read_status(pid).get("VmRSS", 0)
        if pids := sorted(sizes, key=lambda pid: -sizes[pid])[:4]:
            self._taken_ns, self._taken_bytes = t_ns, usage_bytes
            self._reading_s = self._read_s = time.monotonic()
            pool = ThreadPoolExecutor(len(pids))
            try:
                for pid in pids:
                    self._reading.append(pool.submit(self._dump, pid))
            except RuntimeError as error:  # this user has too many processes
                self._error = f"py-spy does not start: {error}"
            pool.shutdown(wait=False)

    def _keep(self) -> None:
        found = []
        for one in self._reading:
            if error := one.exception():
                self._error = f"the answer of py-spy cannot be read: {error!r}"
            else:
                found += one.result()
        if found:
            t_ns, usage_bytes = self._taken_ns, self._taken_bytes
            self._looks.append([replace(x, t_ns=t_ns, usage_bytes=usage_bytes) for x in found])
        if self._reading:
            self.frozen_ns += int((self._read_s - self._reading_s) * 1e9)
            self._reading = []

    def _is_worth(self, t_ns: int, usage_bytes: int) -> bool:
        """Near the limit, where the kernel may kill the command at any moment, the first reading is always made. One
        at a usage that is higher by a quarter waits for no pause.
        """
        (before_ns, before_bytes), self._last = self._last, (t_ns, usage_bytes)
        growth = usage_bytes - self._taken_bytes
        least_bytes = max(_GROWTH_BYTES, self._taken_bytes * _GROWTH)
        is_much = growth >= max(_MUCH_BYTES, self._taken_bytes * _MUCH)
        if self._limit and usage_bytes > _LEAST_SHARE * self._limit:
            rate = (usage_bytes - before_bytes) / max(t_ns - before_ns, 1)
            margin_bytes = max(_MARGIN_BYTES, int(self._limit * _MARGIN))
            if self._limit - usage_bytes <= max(margin_bytes, rate * _SOON_NS):
                if not self._was_near:
                    self._was_near = True
                    return True
                least_bytes = margin_bytes // _STEPS_IN_MARGIN
        is_allowed = self.frozen_ns / 1e9 <= 0.05 * (time.monotonic() - self._start_s)
        return growth >= least_bytes and (is_allowed or is_much)

    def _dump(self, pid: int) -> list[Stack]:
        """Return a process's stacks. One with a thread in uninterruptible sleep, which does not stop, is read without
        a stop after 1 second, and so is one that strace or a debugger traces.
        """
        states, found = dict[int, str](), list[Stack]()
        with suppress(OSError):  # the process has ended
            for task in Path(f"/proc/{pid}/task").iterdir():
                states[int(task.name)] = read_text(f"{task}/stat").rpartition(")")[2].split()[0]
        for options in ((), ("--nonblocking",)):
            left_s = self._reading_s + _PATIENCE_S - time.monotonic()
            if not options and "D" in states.values():
                left_s = min(left_s, 1.0)
            try:
                ended = subprocess.run(
                    [self._program, "dump", "--json", *options, "--pid", str(pid)],
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=max(left_s, 0),
                    start_new_session=True,  # Ctrl-C must not end py-spy
                    check=False,
                )
                found = _stacks_of(pid, parse_json(ended.stdout), states)
                break
            except subprocess.TimeoutExpired:
                self._error = f"py-spy got no answer within {_PATIENCE_S:.0f} s"
            except OSError as error:  # for example, this user has too many processes
                self._error = f"py-spy does not start: {error.strerror}"
                break
            except ValueError:  # of no JSON
                why = ended.stderr.decode(errors="replace").partition("Stack backtrace")[0]
                if options or "Failed to suspend" not in why:
                    self._note_failure(pid, why)
                    break
            finally:
                self._read_s = time.monotonic()
        return found

    def _note_failure(self, pid: int, error: str) -> None:
        with suppress(OSError):
            program = _program_of(pid)
            if "ermission" in error:
                self._error = (
                    "this user may not read the memory of the command's processes: run as root,"
                    " or sudo sysctl kernel.yama.ptrace_scope=0"
                )
            elif "python" in program.name or "/libpython" in read_text(f"/proc/{pid}/maps"):
                self._error = f"py-spy cannot read {one_line(str(program))}: {one_line(error)}"
            else:
                self._others.add(program)


def _program_of(pid: int) -> Path:
    return Path(f"/proc/{pid}/exe").readlink()


def _stacks_of(pid: int, threads: list[Any], states: dict[int, str]) -> list[Stack]:
    """Return up to 8 stacks: of threads that run, then of that with the GIL and the main thread, then of others."""
    folder, half, stacks = "", _MOST_FRAMES // 2, []
    with suppress(OSError):
        folder = f"{Path(f'/proc/{pid}/cwd').readlink()}/"

    def order(thread: Any) -> tuple[bool, bool, bool]:
        number = thread["os_thread_id"]
        return states.get(number) not in ("R", "D"), not thread["owns_gil"], number != pid

    for each in sorted((one for one in threads if one["frames"]), key=order)[:8]:
        lines = [
            one_line(f"{one['name']} ({one['filename'].removeprefix(folder)}:{one['line']})")
            for one in each["frames"]
        ]
        if len(lines) > _MOST_FRAMES:
            lines = [*lines[:half], *lines[-half:]]
        name = one_line(each["thread_name"] or f"thread {each['os_thread_id']}")
        stacks.append(Stack(0, pid, name, 0, tuple(lines)))
    return stacks
