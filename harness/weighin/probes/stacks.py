"""Read the stacks of a command's Python processes near its peak with py-spy: one that is killed prints no traceback."""

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
_GROWTH, _GROWTH_BYTES = 0.05, 16 * MIB  # since the last reading
_MUCH, _MUCH_BYTES = 1 / 4, 32 * MIB  # waits for no pause: one is at least at 4/5 of a sampled peak
_MARGIN, _MARGIN_BYTES = 0.1, 32 * MIB  # to the limit, where the kernel may kill at any moment


class StackTaker:
    """Reads stacks with py-spy, which stops the processes while it reads. ``frozen_ns`` is the sum of these stops."""

    def __init__(self, pids: Callable[[], list[int]], cgroup: Path | None = None) -> None:
        self.frozen_ns = 0
        self._pids = pids
        self._limit = room_in(cgroup) if cgroup else None
        self._start_s = self._reading_s = self._read_s = time.monotonic()
        self._taken = (0, 0)  # when, and the memory then
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

    def _keep(self) -> None:
        if found := [stack for one in self._reading for stack in one.result()]:
            t_ns, usage_bytes = self._taken
            self._looks.append([replace(x, t_ns=t_ns, usage_bytes=usage_bytes) for x in found])
        if self._reading:
            self.frozen_ns += int((self._read_s - self._reading_s) * 1e9)
            self._reading = []

    @property
    def why(self) -> str:
        return "" if self.stacks else self._error

    def look(self, t_ns: int, usage_bytes: int) -> None:
        """Begin to read stacks if the usage is near the limit, or much higher than during the last reading."""
        if self._reading and usage_bytes > self._taken[1]:
            self._taken = t_ns, usage_bytes
        if not all(one.done() for one in self._reading):
            return
        self._keep()
        growth = usage_bytes - self._taken[1]
        least_bytes = max(_GROWTH_BYTES, self._taken[1] * _GROWTH)
        is_due = self.frozen_ns / 1e9 <= 0.05 * (time.monotonic() - self._start_s)
        is_due = is_due or growth >= max(_MUCH_BYTES, self._taken[1] * _MUCH)
        margin_bytes = max(_MARGIN_BYTES, int((self._limit or 0) * _MARGIN))
        if self._limit and self._limit - usage_bytes <= margin_bytes:
            least_bytes, is_due = margin_bytes // 4, True  # of the 8 kept, 4 show the growth before
        if not self._program or not is_due or growth < least_bytes:
            return
        sizes = {}
        for pid in self._pids():
            with suppress(OSError):  # the process has ended, or is another user's
                if Path(f"/proc/{pid}/exe").readlink() not in self._others:
                    sizes[pid] = read_status(pid).get("VmRSS", 0)
        if pids := sorted(sizes, key=lambda pid: -sizes[pid])[:4]:
            self._taken = t_ns, usage_bytes
            self._reading_s = self._read_s = time.monotonic()
            pool = ThreadPoolExecutor(len(pids))
            try:
                for pid in pids:
                    self._reading.append(pool.submit(self._dump, pid))
            except RuntimeError as error:  # this user has too many processes
                self._error = f"py-spy does not start: {error}"
            pool.shutdown(wait=False)

    def _dump(self, pid: int) -> list[Stack]:
        why = ""
        # A process that does not stop, in an uninterruptible sleep or a debugger, is then read while it runs.
        for options in ((), ("--nonblocking",)):
            try:
                ended = subprocess.run(
                    [self._program, "dump", "--json", *options, "--pid", str(pid)],
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    timeout=2.0,
                    start_new_session=True,  # Ctrl-C must not end py-spy
                    check=False,
                )
                why = ended.stderr.decode(errors="replace").partition("Stack backtrace")[0]
                return _stacks_of(pid, parse_json(ended.stdout))
            except OSError as error:  # for example, this user has too many processes
                self._error = f"py-spy does not start: {error.strerror}"
                return []
            except subprocess.TimeoutExpired as error:
                why = why or repr(error)
            except Exception as error:  # the program is not Python, or the answer of another kind
                why = why or repr(error)
                if "Failed to suspend" not in why:
                    break
            finally:
                self._read_s = time.monotonic()
        with suppress(OSError):
            program = Path(f"/proc/{pid}/exe").readlink()
            if "ermission" in why:
                self._error = (
                    "this user may not read the memory of the command's processes: run as root,"
                    " or sudo sysctl kernel.yama.ptrace_scope=0"
                )
            elif "python" in program.name or "/libpython" in read_text(f"/proc/{pid}/maps"):
                self._error = f"py-spy cannot read {one_line(str(program))}: {one_line(why)}"
            else:
                self._others.add(program)
        return []


def _stacks_of(pid: int, threads: list[Any]) -> list[Stack]:
    """Return up to 8 stacks: of threads that run, then of that with the GIL and the main thread, then of others."""
    folder, half, stacks = "", _MOST_FRAMES // 2, []
    with suppress(OSError):
        folder = f"{Path(f'/proc/{pid}/cwd').readlink()}/"
    threads = [one for one in threads if one["frames"]]
    threads.sort(
        key=lambda one: (not one["active"], not one["owns_gil"], one["os_thread_id"] != pid)
    )
    for each in threads[:8]:
        lines = [
            one_line(f"{one['name']} ({one['filename'].removeprefix(folder)}:{one['line']})")
            for one in each["frames"]
        ]
        if len(lines) > _MOST_FRAMES:
            lines = [*lines[:half], *lines[-half:]]
        name = one_line(each["thread_name"] or f"thread {each['os_thread_id']}")
        stacks.append(Stack(0, pid, name, 0, tuple(lines)))
    return stacks
