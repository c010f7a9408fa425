"""Measure what weighin itself costs and how true its figures are: ``make self-bench``.

Three tables, written to the blocks of the page --out:

- the wall time that weighin adds to a load, and the processor time of its own process, in each isolation;
- the share of a processor that the samplers take at 1, 5 and 20 ms, and the gaps between their samples,
  on the machine as it is and while every processor computes;
- the memory of C programs whose need is known (``tests/known_commands.py``), according to weighin,
  ru_maxrss, psutil at 100 ms, and optimum-benchmark's tracker.

Run nothing else during the quarter of an hour that the measurement takes. A C compiler is needed. The page
lists each isolation that could not be measured, such as cgroup without root. Install optimum-benchmark
without its dependencies into a folder of its own::

    .venv/bin/pip install --no-deps --target /tmp/optimum optimum-benchmark
    make self-bench ARGS="--optimum /tmp/optimum"
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median_low
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import known_commands
import tools
from page_blocks import filled
from rounds import interleaved, spread

from weighin.cell import Cell
from weighin.errors import HarnessError, IsolationUnavailable
from weighin.isolation import select
from weighin.isolation.base import Streams
from weighin.plan.start import start
from weighin.plan.task import Progress
from weighin.probes.cgroup import Cgroup
from weighin.probes.sampler import Sampler
from weighin.result import Outcome, Result
from weighin.run import runner
from weighin.settings.definition import check_suite
from weighin.units import MIB, format_bytes

BLOCK: Final = "benchmarks/self_bench.py"
MODEL: Final = "gpt2-small"
PROGRAMS: Final = ("spend", "forks", "shares", "maps", "child")
INTERVALS_MS: Final = (1, 5, 20)
BASE_MIB: Final = 64
SPIKE_MIB: Final = 256
_TAKEN_S: Final = 0.5  # by now the program has taken its memory
_PATIENCE_S: Final = 60
_CELL_HEADS: Final = (
    "isolation", "before s", "checks s", "after s", "added s", "the load itself s", "processor s",
)  # fmt: skip
_SAMPLER_HEADS: Final = (
    "samples of", "isolation", "interval", "share", "median ms", "99 % ms", "largest ms",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5, help="of each load and of each program")
    parser.add_argument("--seconds", type=float, default=5, help="of each sampler at each interval")
    parser.add_argument("--optimum", default="", help="the folder that has optimum-benchmark")
    parser.add_argument("--out", type=Path, help="the page; without it, the blocks are printed")
    asked = parser.parse_args()
    load_average = os.getloadavg()[0]
    about, no_optimum = tools.about_optimum(asked.optimum)
    with tempfile.TemporaryDirectory(prefix="weighin-self-", dir="/var/tmp") as name:  # not a tmpfs
        folder = Path(name)
        (programs := folder / "programs").mkdir()
        known_commands.build(programs)
        try:
            cells, environment = _cells(folder, asked.repeats)
            samplers = _samplers(programs, asked.seconds)
            amounts = _amounts(programs, folder, asked.repeats, asked.optimum, no_optimum)
        except HarnessError as error:
            sys.exit(f"error: {error}")
    often = f"Figures are medians of {asked.repeats} interleaved repeats; if the repeats differ, their range follows in parentheses"  # fmt: skip
    if asked.repeats == 1:
        often = "Each load and each program ran once"
    blocks = {
        f"{BLOCK} machine": f"{_machine(environment, about)}\n\n{often}. In the minute before the\nmeasurements,"
        f" the machine's load average was {load_average:.2f}.",
        f"{BLOCK} cells": cells,
        f"{BLOCK} samplers": samplers,
        f"{BLOCK} amounts": amounts,
    }  # fmt: skip
    if asked.out:
        asked.out.write_text(filled(asked.out.read_text(), blocks))
    else:
        print(*blocks.values(), sep="\n\n")


def _machine(about: Mapping[str, Any], optimum: str) -> str:
    from weighin.show import words

    parts = [
        *words.machine([about]),
        f"{about['cpus']} processors",
        f"{format_bytes(about['ram_bytes'], digits=1)} of RAM",
        f"Python {about['python']}",
        f"psutil {version('psutil')}",
        *([optimum] if optimum else []),
        f"weighin {about['weighin']}",
        f"measured {words.when_and_what([(about, datetime.now(UTC).isoformat())])}",
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
    """Return what weighin adds to a load in each isolation, and the machine as in a record.

    The first load in each isolation is not counted.
    """
    refused: dict[str, str] = {}
    ways: dict[str, Any] = {}
    for name in reversed(select.NAMES):
        try:
            _cell(folder, name, is_probed=False)
            ways[name] = partial(_cell, folder, name, is_probed=True)
        except IsolationUnavailable as error:
            refused[name] = error.message
    taken = interleaved({"python": _empty_python_ns, **ways}, repeats)
    python_ns = taken.pop("python")
    rows = []
    for name, found in taken.items():
        parts = zip(*(cost for cost, _ in found), strict=True)
        rows.append([name, *(spread(part, 1e9) for part in parts)])
    result = next(result for found in taken.values() for _, result in found)
    empty = f"An empty Python program takes {spread(python_ns, 1e9, 3)} s."
    return f"{table(_CELL_HEADS, rows, 1, refused)}\n\n{empty}", result.environment


def _cell(folder: Path, isolation: str, *, is_probed: bool) -> tuple[tuple[int, ...], Result]:
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


def cost_of(result: Result, begun_ns: int, ended_ns: int, cpu_ns: int) -> tuple[int, ...]:
    """Return the times of a cell in the order of the table's columns, in ns.

    before: from the beginning of the cell until its worker begins to import torch.
    checks: the worker's phases, without the work that is measured: reading every byte, comparing it.
    after: from the end of the last phase until the record and the samples are written.
    added: the sum of these three.
    the load itself: the import of torch, the load, and the forward pass.
    processor: of the parent with its sampler, without the worker and without the Docker engine.
    """
    cost, first, last = result.cost, result.phases[0], result.phases[-1]
    assert cost
    load_ns = sum(part or 0 for part in (cost.import_ns, cost.load_ns, cost.first_use_ns))
    before_ns, after_ns = first.start_ns - begun_ns, ended_ns - last.end_ns
    checks_ns = last.end_ns - first.start_ns - load_ns
    return before_ns, checks_ns, after_ns, before_ns + checks_ns + after_ns, load_ns, cpu_ns


def _empty_python_ns() -> int:
    start_ns = time.monotonic_ns()
    subprocess.run([sys.executable, "-I", "-c", "pass"], check=True)
    return time.monotonic_ns() - start_ns


def _samplers(programs: Path, seconds: float) -> str:
    """Return the cost and the gaps of each sampler, on this machine as it is, and when busy.

    The samplers are those of a load and of a command, with everything that they read. They watch a process
    that sleeps; this process does nothing else meanwhile, so that its processor time is the sampler's.
    """
    fields: dict[tuple[str, ...], list[list[str]]] = {}
    for is_busy in (False, True):
        with _every_processor_busy(is_busy=is_busy):
            for isolation in ("process", "cgroup"):  # a container is sampled as a cgroup
                try:
                    select.named(isolation).check()
                except IsolationUnavailable:
                    continue
                for body in ("a load", "a command"):
                    for interval_ms in INTERVALS_MS:
                        row = fields.setdefault((body, isolation, f"{interval_ms} ms"), [])
                        row.append(_sampled(programs, isolation, body, interval_ms, seconds))
    rows = [[*names, *map(" / ".join, zip(*both, strict=True))] for names, both in fields.items()]
    about = f"Each sampler watched a sleeping process of {BASE_MIB + SPIKE_MIB} MiB for {seconds:g} s."  # fmt: skip
    return f"{about}\n\n{table(_SAMPLER_HEADS, rows, 2)}"  # fmt: skip


def _sampled(
    programs: Path, isolation: str, body: str, interval_ms: int, seconds: float
) -> list[str]:
    """Return the share of one processor that a sampler takes, and three of its gaps in ms."""
    held_ms = round((seconds + _PATIENCE_S) * 1000)
    command = (str(programs / "spend"), str(SPIKE_MIB), str(held_ms), str(BASE_MIB))
    cell = Cell.of_command("spend", command, isolation)
    started = select.named(isolation).start(cell, command, str(programs), Streams())
    with closing(started) as running:
        time.sleep(_TAKEN_S)
        cgroup = Cgroup(running.cgroup) if running.cgroup else None
        loading = [running.pid] if body == "a load" else ()
        start_ns, start_cpu_ns = time.monotonic_ns(), time.process_time_ns()
        sampler = Sampler(running.pid, running.members, cgroup, loading=loading)
        sampler._interval_s = interval_ms / 1000
        sampler.start()
        time.sleep(seconds)
        samples = sampler.stop()
        cpu_ns, wall_ns = time.process_time_ns() - start_cpu_ns, time.monotonic_ns() - start_ns
    gaps_ns = gaps([sample.t_ns for sample in samples])
    return [f"{cpu_ns / wall_ns:.1%}", *(f"{gap / 1e6:.1f}" for gap in gaps_ns)]


def gaps(times_ns: Sequence[int]) -> tuple[int, int, int]:
    """Return the median time from a sample to the next, that which 99 % do not exceed, and the longest."""
    found = sorted(after - before for before, after in pairwise(times_ns))
    return median_low(found), found[math.ceil(len(found) * 0.99) - 1], found[-1]


@contextmanager
def _every_processor_busy(*, is_busy: bool) -> Iterator[None]:
    with ExitStack() as ended:
        for _ in range((os.cpu_count() or 1) if is_busy else 0):
            spinning = subprocess.Popen([sys.executable, "-I", "-c", "while True: pass"])
            ended.callback(spinning.wait)
            ended.callback(spinning.kill)
        yield


def _amounts(programs: Path, folder: Path, repeats: int, optimum: str, no_optimum: str) -> str:
    """Return the memory of each known program as each tool tells it, in MiB."""
    (file := folder / "file").write_bytes(bytes(known_commands.FILE_BYTES))
    known = {one.id: one for one in known_commands.KNOWN if one.name in PROGRAMS}
    refused: dict[str, str] = {}
    used: dict[str, tools.Tool] = {}
    for isolation in ("cgroup", "process"):
        try:
            select.named(isolation).check()
            used[f"weighin, {isolation}"] = tools.weighin(isolation, folder, "--no-stacks")
        except IsolationUnavailable as error:
            refused[f"weighin, {isolation}"] = error.message
    used |= {"ru_maxrss": tools.max_rss, "psutil, 100 ms": tools.notebook}
    if no_optimum:
        refused["optimum-benchmark"] = no_optimum
    else:
        used["optimum-benchmark"] = partial(tools.optimum, optimum)
    ways = {
        (program, name): partial(tool, one.command(programs, file), None)
        for program, one in known.items()
        for name, tool in used.items()
    }
    found = {
        key: [said.peak_bytes or 0 for said in each]
        for key, each in interleaved(ways, repeats).items()
    }
    needed = {program: one.needed_bytes for program, one in known.items()}
    return amounts(needed, list(used), found, refused)


def amounts(
    needed: Mapping[str, int],
    names: Sequence[str],
    found: Mapping[tuple[str, str], Sequence[int]],
    refused: Mapping[str, str],
) -> str:
    """Return the table of what each program needs and each tool says, and of each tool's errors."""
    rows = [
        [program, f"{size / MIB:.0f}", *(spread(found[program, name], MIB, 1) for name in names)]
        for program, size in needed.items()
    ]
    errors = ["errors", ""]
    for name in names:
        off = [figure / size - 1 for program, size in needed.items() for figure in found[program, name]]  # fmt: skip
        errors.append(f"{min(off):+.1%} to {max(off):+.1%}")
    return table(("program", "known", *names), [*rows, errors], 1, refused)


if __name__ == "__main__":
    main()
