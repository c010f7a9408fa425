"""Whole scripts for ``fakes.FakeRunning``, and what a watch makes of them."""

from collections.abc import Callable
from typing import Any

import fakes
import pytest
from fakes import FakeRunning, Silent, begin, done, loaded, phase, ready

from weighin.cell import Cell, Job, ModelSpec
from weighin.isolation.base import Exit
from weighin.probes.cgroup import MemoryCgroup
from weighin.result import Result
from weighin.run import supervisor
from weighin.run.supervisor import Watch

JOB = Job(Cell(ModelSpec("m", "a:b"), "s", "process"), "/c", "/m", "/s.py", timeout_s=2.5)
KILLED = Exit(None, signal=9)

BASELINE = (begin("import"), phase("import", 900), begin("prepare"), phase("prepare", 800), fakes.baseline())  # fmt: skip
LOADED = (*BASELINE, begin("read"), phase("read", 500), phase("other", 400), loaded())
DONE = (*LOADED, begin("touch"), phase("touch", 450), ready(), begin("forward"), phase("forward", 990), done())  # fmt: skip


class FakeSampler(Silent):
    """Stands for the sampler, and what it reads, where a test says what it has seen."""

    last_peak_rss_bytes: int | None = None

    def __init__(self, _pid: int, cgroup: MemoryCgroup | None = None, **_: Any) -> None:
        self.last_peaks_rss_bytes = [self.last_peak_rss_bytes]
        self._group = cgroup

    def raise_limit(self) -> None:
        if self._group:
            self._group.raise_limit()


def watched(running: FakeRunning, say: Callable[[str], None] = lambda _: None) -> Result:
    watch = Watch(running, say)
    try:
        watch.follow(JOB.timeout_s)
        ended = watch.end()
    finally:
        watch.close()
    return watch.result(JOB, ended)


@pytest.fixture(name="sampler")
def fake_sampler(monkeypatch: pytest.MonkeyPatch) -> type[FakeSampler]:
    kind = type("Seen", (FakeSampler,), {})
    monkeypatch.setattr(supervisor, "ProcessMemory", kind)
    monkeypatch.setattr(supervisor, "pressure_file_of", lambda pid: None)
    return kind
