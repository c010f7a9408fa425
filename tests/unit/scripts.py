"""Whole scripts for ``fakes.FakeRunning``, and what a watch makes of them."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import pytest
from fakes import FakeRunning, KnownListener, Silent, begin, done, loaded, phase, ready

from weighin.cell import Cell, Job, ModelSpec
from weighin.isolation.base import Exit
from weighin.probes import cgroup
from weighin.probes.cgroup import Cgroup
from weighin.records.verdict import Reference
from weighin.result import Result
from weighin.run import measure as measuring
from weighin.run.loads import LoadSpec
from weighin.run.measure import Measured, Watch
from weighin.settings.definition import Settings

JOB = Job(Cell(ModelSpec("m", "a:b"), "s", "process"), "/c", "/m", "/s.py")
SETTINGS = Settings(timeout_s=0.25)
KILLED = Exit(None, signal=9)

BASELINE = (begin("import"), phase("import", 900), begin("prepare"), phase("prepare", 800), fakes.baseline())  # fmt: skip
LOADED = (*BASELINE, begin("read"), phase("read", 500), phase("other", 400), loaded())
DONE = (*LOADED, begin("touch"), phase("touch", 450), ready(), begin("forward"), phase("forward", 990), done())  # fmt: skip


class FakeSampler(Silent):
    """Stands for the sampler, and what it reads, where a test says what it has seen."""

    last_peak_rss_bytes: int | None = None

    def __init__(self, _pid: int, _members: object, cgroup: Cgroup | None = None, **_: Any) -> None:
        self.last_peaks_rss_bytes = [self.last_peak_rss_bytes]
        self._group = cgroup

    def raise_limit(self) -> None:
        if self._group:
            self._group.raise_limit()


def followed(
    running: Any,
    *,
    ranks: int = 1,
    job: Job = JOB,
    settings: Settings = SETTINGS,
    reference: Reference | None = None,
    disk: Any = None,
    before_load: Callable[[], None] = lambda: None,
    on_phase: Callable[[str], object] = str,
) -> tuple[Result, Watch]:
    """Watch a played worker from its start to its result."""
    kind: Any = type("PlayedSpec", (LoadSpec,), {"before_load": lambda _: before_load()})
    spec = kind(job, settings=settings)
    spec.disk, spec.on_phase = disk, on_phase
    with tempfile.TemporaryDirectory() as folder:
        running.listener = KnownListener(Path(folder), ranks)
        watch = Watch(spec, running.listener, reference)
        watch.begin(running)
        try:
            watch.wait()
            watch.end()
        finally:
            watch.close()
    watch.seen.printed = running.stderr_tail if isinstance(running, FakeRunning) else b""
    result = measuring.result_of(spec, watch, 10**18)
    return replace(result, environment=watch.ranks[0].told.environment), watch


def watched(running: FakeRunning, say: Callable[[str], object] = str) -> Result:
    return followed(running, on_phase=say)[0]


def take(
    isolation: Any,
    job: Job,
    files: Sequence[Path] = (),
    model_bytes: int | None = None,
    environment: dict[str, Any] | None = None,
    reference: Reference | None = None,
    steady: bool = False,
) -> Measured:
    settings = SETTINGS.model_copy(update={"steady": steady})
    spec = LoadSpec(job, files, model_bytes, settings)
    return measuring.measure(isolation, spec, environment, reference)


def measure(isolation: Any, run: Path, *arguments: Any, **options: Any) -> Result:
    """Measure one cell, and write its samples to the folder ``run``."""
    measured = take(isolation, *arguments, **options)
    measured.finish(run)
    return measured.result


@pytest.fixture(name="sampler")
def fake_sampler(monkeypatch: pytest.MonkeyPatch) -> type[FakeSampler]:
    kind = type("Seen", (FakeSampler,), {})
    monkeypatch.setattr(measuring, "Sampler", kind)
    monkeypatch.setattr(cgroup, "pressure_file_of", lambda pid: None)
    return kind
