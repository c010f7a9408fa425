"""Measure a sampler: its share of one processor, and the gaps between its samples.

The samplers are those of a load and of a command, with everything that they read, as a cell has them.
They watch a process that holds a known amount of memory and sleeps. This process does nothing else
meanwhile, so its processor time is the sampler's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from own_figures.spread import Gaps
from weighin.cell import Cell
from weighin.errors import IsolationUnavailable
from weighin.isolation import select
from weighin.isolation.base import Running, Streams
from weighin.probes.cgroup import Cgroup
from weighin.probes.sampler import Sampler
from weighin.result import Sample

INTERVALS_MS: Final = (1, 5, 20)
ISOLATIONS: Final = ("process", "cgroup")
"""The parent samples a container on its own machine as it samples a cgroup."""
BASE_MIB: Final = 64
SPIKE_MIB: Final = 256
_TAKEN_S: Final = 0.5  # by now the program has taken its memory
_PATIENCE_S: Final = 60

Stop = Callable[[], list[Sample]]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampler at one interval. ``share`` is of one processor, from 0 to 1."""

    body: str
    isolation: str
    interval_ms: int
    is_busy: bool
    share: float
    gaps: Gaps


def measure(programs: Path, seconds: float) -> list[Sampled]:
    """Measure each sampler for ``seconds`` at each interval, on this machine as it is and when busy."""
    found = []
    for is_busy in (False, True):
        with _every_processor_busy(is_busy=is_busy):
            for isolation in ISOLATIONS:
                try:
                    select.named(isolation).check()
                except IsolationUnavailable:
                    continue
                for body, begin in (("load", _of_a_load), ("command", _of_a_command)):
                    for interval_ms in INTERVALS_MS:
                        share, gaps = _watched(programs, isolation, begin, interval_ms, seconds)
                        found.append(Sampled(body, isolation, interval_ms, is_busy, share, gaps))
    return found


def _watched(
    programs: Path,
    isolation: str,
    begin: Callable[[Running, float], Stop],
    interval_ms: int,
    seconds: float,
) -> tuple[float, Gaps]:
    held_ms = round((seconds + _PATIENCE_S) * 1000)
    command = (str(programs / "spend"), str(SPIKE_MIB), str(held_ms), str(BASE_MIB))
    cell = Cell.of_command("spend", command, isolation)
    started = select.named(isolation).start(cell, command, str(programs), Streams())
    with closing(started) as running:
        time.sleep(_TAKEN_S)
        start_ns, start_cpu_ns = time.monotonic_ns(), time.process_time_ns()
        stop = begin(running, interval_ms / 1000)
        time.sleep(seconds)
        samples = stop()
        cpu_ns, wall_ns = time.process_time_ns() - start_cpu_ns, time.monotonic_ns() - start_ns
    return cpu_ns / wall_ns, Gaps.between([sample.t_ns for sample in samples])


def _of_a_load(running: Running, interval_s: float) -> Stop:
    cgroup = Cgroup(running.cgroup) if running.cgroup else None
    return _started(
        Sampler(running.pid, running.members, cgroup, loading=[running.pid], interval_s=interval_s)
    )


def _of_a_command(running: Running, interval_s: float) -> Stop:
    cgroup = Cgroup(running.cgroup) if running.cgroup else None
    return _started(Sampler(running.pid, running.members, cgroup, interval_s=interval_s))


def _started(sampler: Sampler) -> Stop:
    sampler.start()
    return sampler.stop


@contextmanager
def _every_processor_busy(*, is_busy: bool) -> Iterator[None]:
    """Keep every processor busy with a program each, if asked."""
    with ExitStack() as ended:
        for _ in range((os.cpu_count() or 1) if is_busy else 0):
            spinning = subprocess.Popen([sys.executable, "-I", "-c", "while True: pass"])
            ended.callback(spinning.wait)
            ended.callback(spinning.kill)
        yield
