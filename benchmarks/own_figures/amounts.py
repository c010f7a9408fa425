"""Measure programs whose memory is known, with weighin and with three other ways side by side."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import known_commands
import psutil
from known_commands import Known

from weighin.errors import IsolationUnavailable
from weighin.isolation import select
from weighin.units import KIB

SHOWN: Final = ("spend", "forks", "shares", "maps", "child")
NOTEBOOK_S: Final = 0.1
WEIGHIN: Final = {"cgroup": "weighin, cgroup", "process": "weighin, process"}
MAX_RSS: Final = "ru_maxrss"
NOTEBOOK: Final = "psutil, 100 ms"
OPTIMUM: Final = "optimum-benchmark"

Tool = Callable[[tuple[str, ...]], int]
"""Runs a command to its end, and returns its memory in bytes as the tool tells it."""

_WAIT_CODE: Final = """
import os, sys
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(pid, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""As /usr/bin/time does: in a small program, because ru_maxrss begins with the peak of the parent."""

_OPTIMUM_CODE: Final = """
import importlib.metadata, json, multiprocessing, sys
from importlib.util import find_spec, module_from_spec

sys.path += filter(None, sys.argv[1:])
if find_spec("optimum_benchmark") is None:
    sys.exit("it is not installed")
# Without their own code, which imports the backends and what they need: the tracker needs none of them.
for package in ("optimum_benchmark", "optimum_benchmark.trackers"):
    sys.modules[package] = module_from_spec(find_spec(package))
multiprocessing.set_start_method("fork")
from optimum_benchmark.trackers import memory

interval_s = memory.MEMORY_CONSUMPTION_SAMPLING_RATE
about = {"version": importlib.metadata.version("optimum-benchmark"), "interval_s": interval_s}
print(json.dumps(about), flush=True)
while line := sys.stdin.readline():
    tracker = memory.MemoryTracker("cpu", "pytorch")
    tracker.monitored_pid = int(line)
    with tracker.track():
        print("tracking", flush=True)
        sys.stdin.readline()
    print(tracker.get_max_memory().max_ram, flush=True)
"""
"""Tracks each process whose pid comes in a line, until the next line."""


@dataclass(frozen=True, slots=True)
class Amounts:
    """The memory of each program as each tool tells it, in bytes, once for each repeat.

    Attributes:
        figures: by the program's id, then by the tool.
        refused: why a tool is missing, by the tool.
        optimum: optimum-benchmark with its version and its interval; empty without it.
    """

    known: Sequence[Known]
    figures: Mapping[str, Mapping[str, Sequence[int]]]
    refused: Mapping[str, str]
    optimum: str

    @property
    def tools(self) -> list[str]:
        """The tools that were there, in their order."""
        return list(self.figures[self.known[0].id])


def measure(programs: Path, folder: Path, repeats: int, optimum: str) -> Amounts:
    """Run each known program under each tool, ``repeats`` times and interleaved.

    ``optimum`` is a folder that has optimum-benchmark; empty for none.
    """
    (file := folder / "file").write_bytes(bytes(known_commands.FILE_BYTES))
    known = [one for one in known_commands.KNOWN if one.name in SHOWN]
    refused: dict[str, str] = {}
    tools: dict[str, Tool] = {}
    with ExitStack() as opened:
        for isolation, name in WEIGHIN.items():
            try:
                select.named(isolation).check()
                tools[name] = _weighin(isolation, folder)
            except IsolationUnavailable as error:
                refused[name] = error.message
        tools |= {MAX_RSS: _max_rss, NOTEBOOK: _notebook}
        tracker = opened.enter_context(_optimum(optimum))
        if isinstance(tracker, str):
            refused[OPTIMUM] = tracker
        else:
            tools[OPTIMUM] = tracker.track
        figures: dict[str, dict[str, list[int]]] = {
            one.id: {name: [] for name in tools} for one in known
        }
        for _ in range(repeats):
            for one in known:
                for name, tool in tools.items():
                    figures[one.id][name].append(tool(one.command(programs, file)))
    about = "" if isinstance(tracker, str) else tracker.about
    return Amounts(known, figures, refused, about)


def _weighin(isolation: str, folder: Path) -> Tool:
    def run(command: tuple[str, ...]) -> int:
        out = folder / f"run-{time.monotonic_ns()}"
        options = ("--no-stacks", "--isolation", isolation, "--out", str(out))
        weighin = (sys.executable, "-P", "-m", "weighin", "run", *options, "--", *command)
        subprocess.run(weighin, check=True, capture_output=True, stdin=subprocess.DEVNULL)
        return int(json.loads((out / "records.jsonl").read_text())["ran"]["needed_bytes"])

    return run


def _max_rss(command: tuple[str, ...]) -> int:
    small = (sys.executable, "-I", "-S", "-c", _WAIT_CODE, *command)
    ended = subprocess.run(small, check=True, capture_output=True, text=True)
    return int(ended.stdout) * KIB


def _notebook(command: tuple[str, ...]) -> int:
    """Sample the RSS of the command's process with psutil, in a thread, as the notebook does."""
    readings: list[int] = []
    ended = threading.Event()
    with _held(command) as (pid, release):
        process = psutil.Process(pid)

        def sample() -> None:
            while not ended.is_set():
                readings.append(process.memory_info().rss)
                time.sleep(NOTEBOOK_S)

        thread = threading.Thread(target=sample)
        thread.start()
        time.sleep(random.uniform(0, NOTEBOOK_S))  # noqa: S311 (a program begins between any two samples)
        release()
        ended.set()
        thread.join()
    return max(readings)


class _Tracker:
    """optimum-benchmark's MemoryTracker in a Python of its own, which follows one process at a time."""

    def __init__(self, process: subprocess.Popen[str], about: str) -> None:
        self._process = process
        self.about = about

    def track(self, command: tuple[str, ...]) -> int:
        with _held(command) as (pid, release):
            self._ask(str(pid))
            release()
            return round(float(self._ask("")) * 1e6)  # its MB are 1e6 bytes

    def _ask(self, line: str) -> str:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        if not (answer := self._process.stdout.readline()):
            assert self._process.stderr
            sys.exit(
                f"error: the tracker of optimum-benchmark ended: {self._process.stderr.read()}"
            )
        return answer


@contextmanager
def _optimum(folder: str) -> Iterator[_Tracker | str]:
    """Yield the tracker of a folder, or the reason why there is none."""
    with subprocess.Popen(
        [sys.executable, "-P", "-W", "ignore", "-c", _OPTIMUM_CODE, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout and process.stderr
        if line := process.stdout.readline():
            about = json.loads(line)
            yield _Tracker(
                process,
                f"optimum-benchmark {about['version']} (RSS, every {about['interval_s'] * 1000:g} ms)",
            )
            process.communicate()
        else:
            words = process.stderr.read().strip().splitlines()
            yield words[-1] if words else "it ended without a word"


@contextmanager
def _held(command: tuple[str, ...]) -> Iterator[tuple[int, Callable[[], None]]]:
    """Start a command that waits; yield its pid, and a function that runs it to its end.

    After its end the process is a zombie until this block ends, so that nobody else gets its pid.
    """
    gate = ("sh", "-c", 'read -r line && exec "$0" "$@"', *command)
    with subprocess.Popen(gate, stdin=subprocess.PIPE) as process:
        assert process.stdin

        def release() -> None:
            assert process.stdin
            process.stdin.write(b"\n")
            process.stdin.flush()
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

        yield process.pid, release
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
