"""Tools that tell how much memory a command takes: weighin, and others beside it.

A tool is a function of a command and of a RAM limit in bytes, or None, which runs the command to its end.
"""

import json
import os
import random
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import psutil

from weighin.isolation.cgroup import limit as limit_group
from weighin.isolation.cgroup import temporary_group
from weighin.units import KIB, MIB

NOTEBOOK_S: Final = 0.1
_WAIT_CODE: Final = """
import os, sys
pid = os.posix_spawn(sys.argv[1], sys.argv[1:], os.environ)
_, status, usage = os.wait4(pid, 0)
print(usage.ru_maxrss)
sys.exit(os.waitstatus_to_exitcode(status))
"""
"""As /usr/bin/time does: in a small program, because ru_maxrss begins with the peak of the parent."""

_OPTIMUM_CODE: Final = """
import importlib.metadata, multiprocessing, sys
from importlib.util import find_spec, module_from_spec

sys.path += filter(None, sys.argv[1:])
if find_spec("optimum_benchmark") is None:
    sys.exit("it is not installed")
# Without their own code, which imports the backends and what they need: the tracker needs none of them.
for package in ("optimum_benchmark", "optimum_benchmark.trackers"):
    sys.modules[package] = module_from_spec(find_spec(package))
multiprocessing.set_start_method("fork")
from optimum_benchmark.trackers import memory

version, interval_s = importlib.metadata.version("optimum-benchmark"), memory.MEMORY_CONSUMPTION_SAMPLING_RATE
print(f"optimum-benchmark {version} (RSS, every {interval_s * 1000:g} ms)", flush=True)
if line := sys.stdin.readline():
    tracker = memory.MemoryTracker("cpu", "pytorch")
    tracker.monitored_pid = int(line)
    with tracker.track():
        print("tracking", flush=True)
        sys.stdin.readline()
    print(tracker.get_max_memory().max_ram, flush=True)
"""
"""Says what it is, and tracks the process whose pid comes in the first line, until the next line."""

Command = Sequence[str]


@dataclass(frozen=True, slots=True)
class Said:
    """What a tool said: the peak, and for a killed command its exit code and its words."""

    peak_bytes: int | None
    code: int = 0
    words: str = ""


Tool = Callable[[Command, int | None], Said]


def weighin(isolation: str, folder: Path, *options: str) -> Tool:
    """Return ``weighin run``, which writes its runs to ``folder``."""

    def run(command: Command, limit: int | None) -> Said:
        out = folder / f"run-{time.monotonic_ns()}"
        limits = ("--ram", str(limit)) if limit else ()
        ours = ("--isolation", isolation, "--out", str(out), *options, *limits)
        ended = _run([sys.executable, "-P", "-m", "weighin", "run", *ours, "--", *command])
        record = json.loads((out / "records.jsonl").read_text())
        words = _last(ended.stderr, 4).partition(" weighin: ")[0]  # the kill, not its explanation
        return Said(record["ran"]["needed_bytes"], ended.returncode, words)

    return run


def max_rss(command: Command, limit: int | None) -> Said:
    """Return the ru_maxrss of wait4."""
    ended = _run([sys.executable, "-I", "-S", "-c", _WAIT_CODE, *command], limit)
    return Said(int(ended.stdout) * KIB, ended.returncode)


def notebook(command: Command, _limit: int | None) -> Said:
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
    return Said(max(readings))


def about_optimum(folder: str) -> tuple[str, str]:
    """Return what the optimum-benchmark in a folder is, or why it cannot be used; the other is empty."""
    asked = [sys.executable, "-P", "-W", "ignore", "-c", _OPTIMUM_CODE, folder]
    ended = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)  # fmt: skip
    return ended.stdout.strip(), "" if ended.stdout else _last(ended.stderr, 1) or "it ended without a word"  # fmt: skip


def optimum(folder: str, command: Command, _limit: int | None) -> Said:
    """Return what optimum-benchmark's MemoryTracker says, in a Python of its own."""
    asked = [sys.executable, "-P", "-W", "ignore", "-c", _OPTIMUM_CODE, folder]
    pipe = subprocess.PIPE
    with (
        _held(command) as (pid, release),
        subprocess.Popen(asked, stdin=pipe, stdout=pipe, text=True) as tracker,
    ):
        assert tracker.stdin and tracker.stdout
        tracker.stdin.write(f"{pid}\n")
        tracker.stdin.flush()
        while tracker.stdout.readline().strip() != "tracking":
            if tracker.poll() is not None:
                sys.exit("error: the tracker of optimum-benchmark ended")
        release()
        return Said(round(float(tracker.communicate("\n")[0]) * 1e6))  # its MB are 1e6 bytes


def gnu_time(command: Command, limit: int | None) -> Said:
    ended = _run(["/usr/bin/time", "-v", *command], limit)
    size = re.search(r"Maximum resident set size \(kbytes\): (\d+)", ended.stderr)
    words = [line.strip() for line in ended.stderr.splitlines() if "signal" in line]
    return Said(int(size[1]) * KIB if size else None, ended.returncode, " ".join(words))


def runexec(peers: Path, command: Command, limit: int | None) -> Said:
    limits = (f"--memlimit={limit}B",) if limit else ()
    ours = ("--no-container", "--output", "/dev/null", *limits)
    ended = _run([str(peers / "runexec"), *ours, "--", *command])
    size = re.search(r"^memory=(\d+)B", ended.stdout, re.MULTILINE)
    told = ("terminationreason", "exitsignal", "returnvalue")
    words = [line for line in ended.stdout.splitlines() if line.startswith(told)]
    return Said(int(size[1]) if size else None, ended.returncode, " ".join(words))


def mprof(peers: Path, folder: Path, command: Command, limit: int | None) -> Said:
    (data := folder / "mprof.dat").unlink(missing_ok=True)
    ended = _run([str(peers / "mprof"), "run", "-C", "-o", str(data), *command], limit)
    lines = [line.split() for line in data.read_text().splitlines()]
    sizes = [float(words[1]) for words in lines if words[0] == "MEM"]
    return Said(round(max(sizes, default=0) * MIB), ended.returncode, _last(ended.stderr, 1))


def psrecord(peers: Path, folder: Path, command: Command, limit: int | None) -> Said:
    log = folder / "psrecord.txt"
    line = [shlex.join(command), "--include-children", "--log", str(log)]
    ended = _run([str(peers / "psrecord"), *line], limit)
    rows = [row.split() for row in log.read_text().splitlines()[1:]]
    sizes = [float(row[2]) for row in rows if len(row) > 2]
    return Said(round(max(sizes, default=0) * MIB), ended.returncode, _last(ended.stdout, 1))


def memray(peers: Path, folder: Path, command: Command, limit: int | None) -> Said:
    """Return the peak of allocations, of a Python program only."""
    if command[0] != sys.executable:
        return Said(None)
    out = folder / f"memray-{time.monotonic_ns()}.bin"
    packages = Path(sys.prefix, "lib", f"python3.{sys.version_info.minor}", "site-packages")
    python = [str(peers / "python"), "-m", "memray", "run", "-q", "-f", "-o", str(out)]
    ended = _run([*python, *command[1:]], limit, PYTHONPATH=str(packages))
    stats = _run([str(peers / "memray"), "stats", str(out)]).stdout
    size = re.search(r"Peak memory usage:\s*([\d.]+)\s*(\w?B)", stats)
    unit = {"KB": 1000, "MB": 1000**2, "GB": 1000**3}
    peak = round(float(size[1]) * unit[size[2]]) if size else None
    return Said(peak, ended.returncode, _last(ended.stderr, 1))


def peers(folder: Path, work: Path) -> dict[str, Tool]:
    """Return the tools that an environment's folder of programs has, by their names in tables."""
    tools: dict[str, Tool] = {
        "/usr/bin/time -v": gnu_time,
        "runexec": partial(runexec, folder),
        "mprof -C": partial(mprof, folder, work),
        "psrecord": partial(psrecord, folder, work),
        "memray": partial(memray, folder, work),
    }
    return {name: tool for name, tool in tools.items() if (folder / name.split()[0]).exists()}


def _run(
    command: Command, limit: int | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a tool with its command to its end, in a cgroup with this limit if there is one."""
    run = partial(
        subprocess.run, command, capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL, env=os.environ | variables,
    )  # fmt: skip
    if limit is None:
        return run()
    with temporary_group() as group:
        limit_group(group, limit)
        return run(preexec_fn=lambda: (group / "cgroup.procs").write_text("0"))


@contextmanager
def _held(command: Command) -> Iterator[tuple[int, Callable[[], None]]]:
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


def _last(text: str, number: int) -> str:
    return " ".join(line.strip() for line in text.strip().splitlines()[-number:])
