"""Measure what weighin itself costs and how true its figures are: ``make self-bench``.

Two tables, written to the blocks of the page --out:

- the wall time that weighin adds to a load, and the processor time of its own process, in each isolation;
- the memory of C programs whose need is known (``tests/known_commands.py``), according to weighin,
  ru_maxrss, psutil at 100 ms, and optimum-benchmark's tracker.

Run nothing else during the quarter of an hour that the measurement takes. A C compiler is needed. The page
lists each isolation that could not be measured, such as cgroup without root. Install optimum-benchmark
without its dependencies into a folder of its own::

    .venv/bin/pip install --no-deps --target /tmp/optimum optimum-benchmark
    make self-bench ARGS="--optimum /tmp/optimum"
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path
from statistics import median_low
from typing import Any, Final

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import known_commands
from page_blocks import filled
from rounds import interleaved

from weighin.errors import HarnessError, IsolationUnavailable
from weighin.isolation import select
from weighin.plan.start import start
from weighin.plan.task import Progress
from weighin.result import Outcome, Result
from weighin.run import runner
from weighin.settings.definition import check_suite
from weighin.units import KIB, MIB

BLOCK: Final = "benchmarks/self_bench.py"
MODEL: Final = "gpt2-small"
PROGRAMS: Final = ("spend", "forks", "shares", "maps", "child")
NOTEBOOK_S: Final = 0.1
_CELL_HEADS: Final = ("isolation", "added s", "the load itself s", "processor s")
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
Tool = Callable[[Command], int]
"""Runs a command to its end, and returns the peak of its memory in bytes."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="of each load and of each program")
    parser.add_argument("--optimum", default="", help="the folder that has optimum-benchmark")
    parser.add_argument("--out", type=Path, help="the page; without it, the blocks are printed")
    asked = parser.parse_args()
    about, no_optimum = _about_optimum(asked.optimum)
    with tempfile.TemporaryDirectory(prefix="weighin-self-", dir="/var/tmp") as name:  # not a tmpfs
        folder = Path(name)
        (programs := folder / "programs").mkdir()
        known_commands.build(programs)
        try:
            cells, environment = _cells(folder, asked.repeats)
            amounts = _amounts(programs, folder, asked.repeats, asked.optimum, no_optimum)
        except HarnessError as error:
            sys.exit(f"error: {error}")
    blocks = {
        f"{BLOCK} machine": _machine(environment, about, asked.repeats),
        f"{BLOCK} cells": cells,
        f"{BLOCK} amounts": amounts,
    }  # fmt: skip
    if asked.out:
        asked.out.write_text(filled(asked.out.read_text(), blocks))
    else:
        print(*blocks.values(), sep="\n\n")


def _machine(about: Mapping[str, Any], optimum: str, repeats: int) -> str:
    parts = [
        f"Medians of {repeats} interleaved repeats",
        about["cpu"],
        f"psutil {version('psutil')}",
        *([optimum] if optimum else []),
        f"{datetime.now(UTC):%Y-%m-%d}",
    ]
    return " · ".join(parts)


def table(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    names: int,
    refused: Mapping[str, str] | None = None,
) -> str:
    """Return a table, and below it the reason for each line or column that it lacks."""
    # Its module is not imported before: what weighin's own process imports is a part of its cost.
    from weighin.show.table import Table

    reasons = [f"\nThe table lacks {name}: {why}." for name, why in (refused or {}).items()]
    return "\n".join([Table.of(heads, rows, names=names).markdown(), *reasons])


def _cells(folder: Path, repeats: int) -> tuple[str, Mapping[str, Any]]:
    """Return what weighin adds to each load but the first in each isolation, and the machine as in a record."""
    refused: dict[str, str] = {}
    ways: dict[str, Any] = {}
    for name in reversed(select.NAMES):
        try:
            _cell(folder, name, is_probed=False)
            ways[name] = partial(_cell, folder, name, is_probed=True)
        except IsolationUnavailable as error:
            refused[name] = error.message
    taken = interleaved(ways, repeats)
    rows = []
    for name, found in taken.items():
        parts = zip(*(cost for cost, _ in found), strict=True)
        rows.append([name, *(f"{median_low(part) / 1e9:.2f}" for part in parts)])
    result = next(result for found in taken.values() for _, result in found)
    return table(_CELL_HEADS, rows, 1, refused), result.environment


def _cell(folder: Path, isolation: str, *, is_probed: bool) -> tuple[tuple[int, int, int], Result]:
    """Run one cell as ``weighin bench`` does; unless probed, a worker is tested before it."""
    options = {"models": [MODEL], "strategies": ["baseline"], "isolation": isolation}
    run, _ = start(check_suite(options), folder / f"{isolation}-{time.monotonic_ns()}")
    begun: list[int] = []

    def starting(_: object) -> None:
        begun.extend((time.monotonic_ns(), time.process_time_ns()))

    (result,) = runner.run(replace(run, is_probed=is_probed), Progress(starting=starting))
    cpu_ns, ended_ns = time.process_time_ns() - begun[1], time.monotonic_ns()
    if result.outcome is not Outcome.OK:
        sys.exit(f"error: {isolation}: a load of {MODEL} ended {result.outcome}: {result.message}")
    return cost_of(result, begun[0], ended_ns, cpu_ns), result


def cost_of(result: Result, begun_ns: int, ended_ns: int, cpu_ns: int) -> tuple[int, int, int]:
    """Return what weighin added to a cell, the load's own time, and weighin's processor time, in ns."""
    cost = result.cost
    assert cost
    load_ns = sum(part or 0 for part in (cost.import_ns, cost.load_ns, cost.first_use_ns))
    return ended_ns - begun_ns - load_ns, load_ns, cpu_ns


def _amounts(programs: Path, folder: Path, repeats: int, optimum: str, no_optimum: str) -> str:
    """Return the memory of each known program as each tool tells it, in MiB."""
    (file := folder / "file").write_bytes(bytes(known_commands.FILE_BYTES))
    known = {one.id: one for one in known_commands.KNOWN if one.name in PROGRAMS}
    refused: dict[str, str] = {}
    used: dict[str, Tool] = {}
    for isolation in ("cgroup", "process"):
        try:
            select.named(isolation).check()
            used[f"weighin, {isolation}"] = partial(_weighin, isolation, folder)
        except IsolationUnavailable as error:
            refused[f"weighin, {isolation}"] = error.message
    used |= {"ru_maxrss": _max_rss, "psutil, 100 ms": _notebook}
    if no_optimum:
        refused["optimum-benchmark"] = no_optimum
    else:
        used["optimum-benchmark"] = partial(_optimum, optimum)
    ways = {
        (program, name): partial(tool, one.command(programs, file))
        for program, one in known.items()
        for name, tool in used.items()
    }
    needed = {program: one.needed_bytes for program, one in known.items()}
    return amounts(needed, list(used), interleaved(ways, repeats), refused)


def _weighin(isolation: str, folder: Path, command: Command) -> int:
    out = folder / f"run-{time.monotonic_ns()}"
    ours = ("--isolation", isolation, "--out", str(out), "--no-stacks")
    _printed([sys.executable, "-P", "-m", "weighin", "run", *ours, "--", *command])
    return int(json.loads((out / "records.jsonl").read_text())["ran"]["needed_bytes"] or 0)


def _max_rss(command: Command) -> int:
    """Return the ru_maxrss of wait4."""
    return int(_printed([sys.executable, "-I", "-S", "-c", _WAIT_CODE, *command])) * KIB


def _printed(command: Command) -> str:
    """Run a tool with its command to its end, and return its standard output."""
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)  # fmt: skip
    return done.stdout


def _notebook(command: Command) -> int:
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


def _about_optimum(folder: str) -> tuple[str, str]:
    """Return what the optimum-benchmark in a folder is, or why it cannot be used; the other is empty."""
    asked = [sys.executable, "-P", "-W", "ignore", "-c", _OPTIMUM_CODE, folder]
    ended = subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)  # fmt: skip
    return ended.stdout.strip(), "" if ended.stdout else ended.stderr.strip().rpartition("\n")[2] or "it ended without a word"  # fmt: skip


def _optimum(folder: str, command: Command) -> int:
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
        return round(float(tracker.communicate("\n")[0]) * 1e6)  # its MB are 1e6 bytes


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


def amounts(
    needed: Mapping[str, int],
    names: Sequence[str],
    found: Mapping[tuple[str, str], Sequence[int]],
    refused: Mapping[str, str],
) -> str:
    """Return the table of what each program needs and each tool says, and of each tool's errors."""
    rows = [
        [
            program,
            f"{size / MIB:.0f}",
            *(f"{median_low(found[program, name]) / MIB:.1f}" for name in names),
        ]
        for program, size in needed.items()
    ]
    errors = ["errors", ""]
    for name in names:
        off = [figure / size - 1 for program, size in needed.items() for figure in found[program, name]]  # fmt: skip
        errors.append(f"{min(off):+.1%} to {max(off):+.1%}")
    return table(("program", "known", *names), [*rows, errors], 1, refused)


if __name__ == "__main__":
    main()
