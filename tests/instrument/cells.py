"""One cell in one call: real workers under any isolation, run by ``weighin.run.cell_runner.measure``."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import leftovers

from weighin.cell import CacheState, Cell, Job, ModelSpec, Operation
from weighin.checkpoint import cache as checkpoints
from weighin.disk.pace import Pace
from weighin.isolation import select
from weighin.isolation.base import Isolation, Running
from weighin.isolation.cgroup import temporary_group
from weighin.probes.cgroup import MemoryCgroup, PeakMark
from weighin.records.thrashing import Reference
from weighin.result import UNNAMED, Phase, Result
from weighin.run import save_target
from weighin.run.cell_runner import Setting, measure
from weighin.suite.registry import data_folder, model, read_strategy
from weighin.units import MIB

AS_IT_IS = Pace()

FILE_BYTES = 64 * MIB
"""Size of ``known.bin``: a file of known size to map."""

LARGE = ModelSpec(
    "tied-large",
    "weighin.models.tied:tied",
    {"vocab_size": 32768, "emb_dim": 768, "n_layers": 2, "n_heads": 4},
)
"""150 MiB: large beside all noise, small enough to be made in a second."""


def known_file(strategies: Path) -> Path:
    """Return where ``known.bin`` lies: in a folder that every worker finds on its ``sys.path``."""
    return strategies.parent / "data" / "known.bin"


@dataclass(slots=True)
class Watched:
    """An isolation that remembers its last worker, so that a test can look at it from outside."""

    inner: Isolation
    running: Running | None = None

    def start(self, job: Job) -> Running:
        self.running = self.inner.start(job)
        return self.running

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


_prepared: dict[str, Watched] = {}


def prepared_isolation(name: str) -> Watched:
    if name not in _prepared:
        isolation = select.named(name)
        isolation.check()
        isolation.prepare()
        _prepared[name] = Watched(isolation)
    return _prepared[name]


@dataclass(frozen=True, slots=True)
class Bench:
    """Measures one cell and returns its Result; its run's folder is ``run``."""

    run: Path
    strategies: Path
    _numbers: Iterator[int] = field(default_factory=count)

    def __call__(
        self,
        strategy: str,
        isolation: Watched,
        *,
        model_name: str = "tied-tiny",
        spec: ModelSpec | None = None,
        limit_bytes: int | None = None,
        cache_state: CacheState = "cold",
        passes: int = 1,
        timeout_s: float = 120.0,
        files: Sequence[Path] = (),
        on_phase: Callable[[str], None] = lambda _: None,
        operation: Operation = "load",
        environment: dict[str, str] | None = None,
        ranks: int = 1,
        dtype: str = "float32",
        fmt: str = "",
        reference: Reference | None = None,
        use: str = "",
        use_path: str = "",
        disk: Pace = AS_IT_IS,
        **options: Any,
    ) -> Result:
        """``options`` are the strategy's; ``files`` are made cold beside the checkpoint's."""
        spec = spec or model(model_name)
        ours = self.strategies / f"{strategy}.py"
        theirs = data_folder("strategies") / ("saving" if operation == "save" else "") / ours.name
        info = read_strategy(ours if ours.exists() else theirs, operation)
        fmt = fmt or info.formats[0]
        checkpoint = checkpoints.ensure(spec, fmt if operation == "load" else "pt")
        cell = Cell(
            spec,
            strategy,
            isolation.inner.name,
            ram_limit_bytes=limit_bytes,
            dtype=dtype,
            format=fmt,
            cache=cache_state,
            options=options,
            passes=0 if use else passes,
            repeat=next(self._numbers),
            operation=operation,
            environment=environment or {},
            ranks=ranks,
            use=use,
            disk_bytes_per_s=disk.bytes_per_s,
            disk_latency_ns=disk.latency_ns,
        )
        job = Job(
            cell,
            str(checkpoint.path),
            str(checkpoint.manifest_path),
            str(info.path),
            timeout_s=timeout_s,
            use_path=use_path,
            python_path=(str(known_file(self.strategies).parent),),  # containers see it, too
        )
        setting = Setting(
            isolation, self.run, {}, on_phase=on_phase, stall_from_bytes=disk.stall_from_bytes
        )
        paths = [checkpoint.path] if checkpoint.path.is_file() else [*checkpoint.path.iterdir()]
        model_bytes = checkpoint.manifest().model_bytes(dtype)
        writes = operation == "save" or use == "save"
        with save_target.target(model_bytes) if writes else nullcontext("") as target:
            job = replace(job, target=str(target))
            result = measure(setting, job, [*paths, *files], model_bytes, reference)
        assert leftovers.all_of(os.getpid(), str(self.strategies.parent)) == []
        return result

    def samples(self, result: Result) -> list[dict[str, int | None]]:
        """Return the samples of a result, as they were written."""
        assert result.samples_path
        with (self.run / result.samples_path).open() as file:
            return [
                {name: int(value) if value else None for name, value in row.items()}
                for row in csv.DictReader(file)
            ]


@cache
def keeps_marks_of_phases() -> bool:
    """Tell whether this kernel puts a cgroup's mark back: v1 does, v2 since Linux 6.12."""
    with temporary_group() as group, closing(PeakMark(MemoryCgroup(group))) as mark:
        return mark.reset()


def names_of(result: Result) -> list[str]:
    """Return the names of a result's phases, without what lay between two of them."""
    return [
        phase.name for phase in result.phases if phase.name != UNNAMED
    ]  # on a busy machine there is one now and then


def phases_of(result: Result) -> dict[str, Phase]:
    """Return a result's phases by name, where each name is there once."""
    return {phase.name: phase for phase in result.phases}
