"""Results and samples for tests, acted out from a small script of phases.

A script is a list of (phase, seconds, anonymous GiB at its end, file-backed GiB at its end).
Memory grows linearly within a phase; a cell whose cgroup charge would pass its limit is killed.
"""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from weighin.cell import Cell, ModelSpec
from weighin.errors import HarnessError
from weighin.plan.loads import cells_of
from weighin.plan.task import Planned
from weighin.records import run_folder
from weighin.result import (
    SCHEMA,
    Cost,
    Faults,
    Memory,
    Outcome,
    Peaks,
    Phase,
    Pressure,
    Result,
    Sample,
)
from weighin.settings.definition import (
    MODELS,
    Settings,
    check_suite,
    in_file,
    merge,
    read_suite_file,
)
from weighin.suite.registry import StrategyInfo
from weighin.units import GIB, MIB

Script = Sequence[tuple[str, float, float, float]]


def read_suite(path: Path, kind: str = MODELS) -> Settings:
    """Return the settings of a suite file alone, without options of a command line."""
    return merge([(in_file(path), read_suite_file(path, kind))], kind)


MODEL = ModelSpec("gpt2-xl", "weighin.models.gpt2:build", {"n_layer": 48, "n_embd": 1600})
MODEL_BYTES = 1_638_022_400 * 4 + 48 * 1024 * 1024 * 4  # parameters and masks
LIMIT = 8 * GIB
START_NS = 4_000_000_000_000
ENVIRONMENT: dict[str, Any] = {
    "cpu": "Example CPU", "kernel": "6.18.0", "torch": "2.13.0", "cgroup_version": 2,
    "machine": "testbench",
}  # fmt: skip
IMPORT = ("import", 1.6, 0.19, 0.11)
SCRIPTS: dict[str, Script] = {
    "baseline": (IMPORT, ("build", 9.0, 6.5, 0.12), ("read", 7.0, 12.8, 0.12), ("apply", 2, 12.8, 0.12)),
    "sequential": (IMPORT, ("build", 9.0, 6.5, 0.12), ("read", 7.0, 12.8, 0.12), ("copy", 2, 12.8, 0.12)),
    "meta_copy": (IMPORT, ("build", 0.1, 0.2, 0.12), ("allocate", 0.01, 0.2, 0.12), ("read", 7.0, 6.5, 0.12), ("apply", 2.5, 12.8, 0.12)),
    "mmap_assign": (
        IMPORT, ("build", 0.1, 0.2, 0.12), ("map", 0.03, 0.21, 0.13), ("assign", 0.01, 0.21, 0.13),
        ("buffers", 0.3, 0.4, 0.13), ("touch", 5.0, 0.4, 6.42), ("forward", 0.8, 0.5, 6.42),
    ),
    "per_param": (
        IMPORT, ("build", 0.1, 0.2, 0.12), ("allocate", 0.01, 0.2, 0.12), ("load", 9.5, 6.8, 0.13),
        ("touch", 0.7, 6.5, 0.13), ("forward", 0.8, 6.6, 0.13),
    ),
    "streaming": (IMPORT, ("build", 0.1, 0.2, 0.12), ("stream", 6.5, 6.55, 0.2), ("touch", 0.7, 6.5, 0.13), ("forward", 0.8, 6.6, 0.13)),
}  # fmt: skip


def refused(
    act: Callable[..., object],
    *arguments: Any,
    kind: type[HarnessError] = HarnessError,
    **options: Any,
) -> str:
    """Return what a user is told by a call that weighin refuses: the message, and the repair below."""
    with pytest.raises(kind) as caught:
        act(*arguments, **options)
    return str(caught.value)


def git(folder: Path, *words: str) -> str:
    """Return what git prints in a folder, typed by somebody who may commit there."""
    who = ("user.name=a", "user.email=a@b", "commit.gpgsign=false", "safe.directory=*")
    settings = [word for one in who for word in ("-c", one)]
    command = ["git", "-C", str(folder), *settings, *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def planned(
    models: Sequence[ModelSpec],
    strategies: Sequence[tuple[StrategyInfo, dict[str, Any]]],
    *,
    dtypes: Mapping[str, str] | None = None,
    own_formats: Mapping[str, str] | None = None,
    **options: Any,
) -> list[Planned]:
    """Return the cells of these models and strategies under the options of a suite."""
    suite = check_suite({"models": "any", **options})
    return cells_of(
        suite, models, strategies, "process", dtypes=dtypes or {}, own_formats=own_formats or {}
    )


def make_cell(strategy: str = "mmap_assign", **changes: Any) -> Cell:
    cell = Cell(MODEL, strategy, isolation="docker", ram_limit_bytes=LIMIT)
    return replace(cell, **changes)


def make_result(
    cell: Cell | None = None,
    script: Script | None = None,
    outcome: Outcome | None = None,
    **changes: Any,
) -> Result:
    """The Result of acting out a script; ``outcome`` overrides what came of it."""
    cell = cell or make_cell()
    script = script or SCRIPTS.get(cell.strategy, SCRIPTS["streaming"])
    samples, phases, last = _play(script, cell.ram_limit_bytes)
    killed = last is not None
    load = [p for p in phases if p.name not in {"import", "touch", "forward"}]
    touch = next((p for p in phases if p.name == "touch"), load[-1] if load else phases[0])
    ready_ns = samples[-1].t_ns if killed else touch.end_ns
    loading = [s for s in samples if phases[0].end_ns < s.t_ns <= ready_ns]
    load_ns = load[-1].end_ns - load[0].start_ns if load and not killed else None
    base = Result(
        schema=SCHEMA,
        cell=cell,
        outcome=outcome or (Outcome.OOM_KILLED if killed else Outcome.OK),
        message=f"killed by the kernel for lack of memory in phase {last!r}" if killed else "",
        last_phase=last,
        model_bytes=MODEL_BYTES,
        baseline=phases[0].end,
        peaks=Peaks(
            rss_bytes=max(s.rss_bytes for s in loading) + MIB // 2,
            cgroup_bytes=max(s.cgroup_bytes or 0 for s in loading),
            anon_sampled_bytes=max(s.anon_bytes for s in loading),
            file_sampled_bytes=max(s.file_bytes for s in loading),
        ),
        phases=tuple(phases),
        load_ns=load_ns,
        ready_ns=None if load_ns is None else touch.end_ns - load[0].start_ns,
        faults=Faults(minor=120_000, major=40, workingset_refault_file=0),
        pressure=Pressure(some_ns=12_000_000, full_ns=9_000_000),
        oom_kills=int(killed),
        exit_code=137 if killed else 0,
        cached_bytes_at_start=0,
        cost=Cost(wall_ns=samples[-1].t_ns - START_NS, import_ns=1_600_000_000),
        samples_path=f"samples/{cell.id}.csv",
        started_at="2025-01-02T03:04:05+00:00",
        environment=dict(ENVIRONMENT),
    )
    return replace(base, **changes)


def make_skipped(strategy: str = "direct_cuda", reason: str = "needs the device cuda") -> Result:
    return Result(SCHEMA, make_cell(strategy), Outcome.SKIPPED, reason)


def make_samples(result: Result, script: Script | None = None) -> list[Sample]:
    script = script or SCRIPTS.get(result.cell.strategy, SCRIPTS["streaming"])
    return _play(script, result.cell.ram_limit_bytes)[0]


def run_of(folder: Path, *results: Result, **settings: Any) -> Path:
    """Write a run of these results, and a plan of its cells where there are settings; return its folder."""
    if settings:
        run_folder.write_plan(folder, [one.cell for one in results], settings)
    for result in results:
        run_folder.append(folder, result)
    return folder


def write_samples(run: Path, result: Result, samples: Iterable[Sample] | None = None) -> Path:
    """Write the cell's sample file as the sampler does: a header, and nothing for None."""
    assert result.samples_path is not None
    path = run / result.samples_path
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Sample)])
        writer.writeheader()
        writer.writerows(asdict(sample) for sample in samples or make_samples(result))
    return path


def notebook_run() -> list[Result]:
    """Six strategies at 8 GiB: three are killed, three live."""
    formats = {"per_param": "per_param", "streaming": "safetensors"}
    return [make_result(make_cell(name, format=formats.get(name, "pt"))) for name in SCRIPTS]


def mixed_run() -> list[Result]:
    """One cell of each outcome that a CPU run can have."""
    return [
        make_result(make_cell("streaming", format="safetensors")),
        make_result(make_cell("baseline")),
        make_result(make_cell("sequential"), SCRIPTS["streaming"], Outcome.TIMEOUT,
                    message="not ready after 600 s", last_phase="copy",
                    load_ns=None, ready_ns=None, exit_code=137),
        make_skipped(),
        make_result(make_cell("broken"), SCRIPTS["streaming"][:2], Outcome.STRATEGY_FAILED,
                    message="KeyError: 'h.0.attn|bias'", last_phase="read",
                    load_ns=None, ready_ns=None, exit_code=1),
        make_result(make_cell("lossy"), outcome=Outcome.WRONG_WEIGHTS,
                    message="h.0.attn.mask differs from the checkpoint"),
    ]  # fmt: skip


def _play(script: Script, limit: int | None) -> tuple[list[Sample], list[Phase], str | None]:
    """Samples every 20 ms, finished phases, and the phase in which the cell was killed."""
    samples: list[Sample] = []
    phases: list[Phase] = []
    now, anon, file = START_NS, 0.02, 0.01
    for name, seconds, anon_end, file_end in script:
        start, steps = now, max(2, round(seconds * 50))
        for step in range(1, steps + 1):
            part = step / steps
            now = start + round(seconds * 1e9 * part)
            look = _sample(now, anon + (anon_end - anon) * part, file + (file_end - file) * part)
            if limit is not None and look.rss_bytes + MIB > limit:
                return samples, phases, name
            samples.append(look)
        anon, file = anon_end, file_end
        phases.append(_phase(name, start, now, samples[-steps:]))
    return samples, phases, None


def _sample(t_ns: int, anon: float, file: float) -> Sample:
    anon_bytes, file_bytes = round(anon * GIB), round(file * GIB)
    return Sample(
        t_ns=t_ns, rss_bytes=anon_bytes + file_bytes, anon_bytes=anon_bytes, file_bytes=file_bytes,
        shmem_bytes=0, swap_bytes=0, minor_faults=1000, major_faults=3,
        cgroup_bytes=anon_bytes + file_bytes, cgroup_file_bytes=file_bytes,
    )  # fmt: skip


def _phase(name: str, start_ns: int, end_ns: int, samples: list[Sample]) -> Phase:
    last = samples[-1]
    end = Memory(last.rss_bytes, last.anon_bytes, last.file_bytes, 0, 0, last.cgroup_bytes)
    peak = max(s.rss_bytes for s in samples) + MIB
    return Phase(name, start_ns, end_ns, peak, end, 1000, 3, peak_cgroup_bytes=end.cgroup_bytes)
