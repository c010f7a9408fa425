"""Measure what weighin adds to a load, in each isolation: wall time, and processor time of the parent."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from weighin.errors import IsolationUnavailable
from weighin.isolation.select import NAMES
from weighin.plan.start import start
from weighin.plan.task import Progress
from weighin.result import Outcome, Result
from weighin.run import runner
from weighin.settings.definition import check_suite

ISOLATIONS: Final = tuple(reversed(NAMES))
MODEL: Final = "gpt2-small"
STRATEGY: Final = "baseline"


@dataclass(frozen=True, slots=True)
class CellCost:
    """The wall time of one cell in its parts, and the processor time of the parent meanwhile.

    Attributes:
        before_ns: from the beginning of the cell until its worker begins to import torch.
        load_ns: the import of torch, the load, and the forward pass: the work that is measured.
        checks_ns: the rest of the worker's phases: reading every byte, comparing it, phase boundaries.
        after_ns: from the end of the last phase until the record and the samples are written.
        cpu_ns: of the parent with its sampler, without the worker and without the Docker engine.
    """

    before_ns: int
    load_ns: int
    checks_ns: int
    after_ns: int
    cpu_ns: int

    @classmethod
    def of(cls, result: Result, begun_ns: int, ended_ns: int, cpu_ns: int) -> CellCost:
        """Return the cost of a cell that ended ok; the times are of the monotonic clock."""
        cost, first, last = result.cost, result.phases[0], result.phases[-1]
        assert cost
        parts = (cost.import_ns, cost.load_ns, cost.first_use_ns)
        load_ns = sum(part for part in parts if part is not None)
        return cls(
            before_ns=first.start_ns - begun_ns,
            load_ns=load_ns,
            checks_ns=last.end_ns - first.start_ns - load_ns,
            after_ns=ended_ns - last.end_ns,
            cpu_ns=cpu_ns,
        )

    @property
    def added_ns(self) -> int:
        """The wall time of the cell without the work that is measured."""
        return self.before_ns + self.checks_ns + self.after_ns


@dataclass(frozen=True, slots=True)
class Costs:
    """The costs of every repeat in each isolation, and why an isolation has none."""

    by_isolation: Mapping[str, Sequence[CellCost]]
    refused: Mapping[str, str]
    python_ns: Sequence[int]
    """The times from the start of an empty Python program to its end."""
    environment: Mapping[str, Any]
    """The machine and the versions, as in a record."""
    model_bytes: int


def measure(folder: Path, repeats: int) -> Costs:
    """Measure the load of a small model in each isolation, ``repeats`` times and interleaved.

    The first load in each isolation is not counted.

    Raises:
        HarnessError: a run cannot start, for another reason than its isolation.
    """
    costs: dict[str, list[CellCost]] = {name: [] for name in ISOLATIONS}
    refused: dict[str, str] = {}
    python_ns: list[int] = []
    results: list[Result] = []
    for number in range(repeats + 1):
        is_counted = number > 0
        if is_counted:
            python_ns.append(_empty_python_ns())
        for name in ISOLATIONS:
            if name in refused:
                continue
            try:
                cost, result = _cell(folder / f"{name}-{number}", name, is_probed=is_counted)
            except IsolationUnavailable as error:
                refused[name] = error.message
                continue
            if is_counted:
                costs[name].append(cost)
                results.append(result)
    first = results[0]
    return Costs(costs, refused, python_ns, first.environment, first.model_bytes or 0)


def _cell(folder: Path, isolation: str, *, is_probed: bool) -> tuple[CellCost, Result]:
    """Run one cell as ``weighin bench`` does; before it, a worker is tested if none was yet."""
    options = {"models": [MODEL], "strategies": [STRATEGY], "isolation": isolation}
    run, _ = start(check_suite(options), folder)
    begun: list[int] = []
    cpu: list[int] = []

    def starting(_: object) -> None:
        begun.append(time.monotonic_ns())
        cpu.append(time.process_time_ns())

    (result,) = runner.run(replace(run, is_probed=is_probed), Progress(starting=starting))
    cpu_ns, ended_ns = time.process_time_ns() - cpu[0], time.monotonic_ns()
    if result.outcome is not Outcome.OK:
        sys.exit(f"error: {isolation}: a load of {MODEL} ended {result.outcome}: {result.message}")
    return CellCost.of(result, begun[0], ended_ns, cpu_ns), result


def _empty_python_ns() -> int:
    start_ns = time.monotonic_ns()
    subprocess.run([sys.executable, "-I", "-c", "pass"], check=True)
    return time.monotonic_ns() - start_ns
