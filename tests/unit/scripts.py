"""Whole scripts for ``fakes.FakeRunning``, and what a watch makes of them."""

from collections.abc import Callable
from typing import Any

import fakes
import pytest
from fakes import FakeRunning, begin, done, loaded, phase, ready

from weighin.cell import Cell, Job, ModelSpec
from weighin.isolation.base import Exit
from weighin.probes import observer
from weighin.result import Result, Sample
from weighin.run.supervisor import Watch

JOB = Job(Cell(ModelSpec("m", "a:b"), "s", "process"), "/c", "/m", "/s.py", timeout_s=2.5)
KILLED = Exit(None, signal=9)

BASELINE = (begin("import"), phase("import", 900), begin("prepare"), phase("prepare", 800), fakes.baseline())  # fmt: skip
LOADED = (*BASELINE, begin("read"), phase("read", 500), phase("other", 400), loaded())
DONE = (*LOADED, begin("touch"), phase("touch", 450), ready(), begin("forward"), phase("forward", 990), done())  # fmt: skip


class FakeSampler:
    """Stands for the sampler where a test says what it has seen."""

    seen: tuple[Sample, ...] = ()
    last_peak_rss_bytes: int | None = None
    oom_kills: int | None = None
    has_left = False

    def __init__(self, *_: Any) -> None:
        self.samples: list[Sample] = []

    def start(self) -> None: ...

    def stop(self) -> list[Sample]:
        return list(self.seen)


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
    monkeypatch.setattr(observer, "Sampler", kind)
    monkeypatch.setattr(observer, "pressure_file_of", lambda pid: None)
    return kind
