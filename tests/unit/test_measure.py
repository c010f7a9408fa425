"""One cell, from an isolation's start to a Result: what is written beside the record."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import pytest
from fakes import BASELINE, JOB, PlayedIsolation, Silent, done, measure, ready, take

from weighin.cell import Job
from weighin.probes import environment, page_cache
from weighin.probes.cgroup import Counters
from weighin.result import Outcome, Sample
from weighin.run import loads
from weighin.units import MIB


def test_the_record_keeps_a_hash_of_the_code_that_decides_its_figures(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def load(job): ...\n")
    job = replace(JOB, strategy_path=str(mine))

    def measured(job: Job) -> str | None:
        script = [fakes.baseline(), fakes.loaded(), ready(), done()]
        return measure(PlayedIsolation(script), tmp_path, job, [], None).sources_hash

    first = measured(job)
    assert first == environment.code_digest(mine) == measured(job)
    use = tmp_path / "use.py"
    use.write_text("def use(model): ...\n")
    assert measured(replace(job, use_path=str(use))) not in (first, None)
    mine.write_text("def load(job): pass\n")
    assert measured(job) not in (first, None)
    mine.unlink()  # the cell fails; the run goes on
    assert measured(job) is None


def test_a_steady_load_gets_its_memory_when_it_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []

    @contextmanager
    def held(wanted_bytes: int, spare_bytes: int) -> Iterator[int]:
        seen.append(f"holds {wanted_bytes} and leaves {spare_bytes}")
        yield wanted_bytes
        seen.append("gives back")

    monkeypatch.setattr(loads, "held", held)
    monkeypatch.setattr(loads, "SETTLED_S", 0.0)
    script: list[Any] = [
        lambda: seen.append("imports torch"),
        fakes.baseline(),
        lambda: seen.append("loads"),
        fakes.loaded(),
        ready(),
        done(),
    ]
    result = measure(PlayedIsolation(script), tmp_path, JOB, [], 100, steady=True)
    assert seen == ["holds 300 and leaves 0", "imports torch", "gives back", "loads"]
    assert result.touched_bytes_before == 300


def test_a_steady_warm_load_finds_room_for_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def held(wanted_bytes: int, spare_bytes: int) -> AbstractContextManager[int]:
        asked.append((wanted_bytes, spare_bytes))
        return nullcontext(0)

    monkeypatch.setattr(loads, "held", held)
    monkeypatch.setattr(loads, "SETTLED_S", 0.0)
    for cell in (replace(JOB.cell, cache="warm"), replace(JOB.cell, operation="save")):
        script = [fakes.baseline(), fakes.loaded(), ready(), done()]
        measure(PlayedIsolation(script), tmp_path, replace(JOB, cell=cell), [], 100, steady=True)
    assert asked == [(300, 100), (300, 100)]


@pytest.mark.parametrize(
    ("left", "warnings"),
    [
        (0, ()),
        (3 * MIB, ("3.000 MiB of the checkpoint could not be dropped from the page cache",)),
        (
            None,
            (
                "weighin cannot tell whether the checkpoint left the page cache: Linux"
                " reports cached pages only to a user who owns the files or may write them",
            ),
        ),
    ],
)
def test_a_checkpoint_that_is_not_proven_cold_is_told_of(
    left: int | None, warnings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "drop", lambda _: left)
    script = [fakes.baseline(), fakes.loaded(), ready(), done()]
    (file := tmp_path / "model.pt").touch()
    job = replace(JOB, checkpoint=str(file))
    result = measure(PlayedIsolation(script), tmp_path, job, [file], None)
    assert result.cached_bytes_at_start == left
    assert result.warnings == warnings


def test_a_worker_that_got_out_of_its_limit_is_not_ok(tmp_path: Path) -> None:
    class Escaped(Silent):
        escape = "python (pid 12) left its cgroup for /x"

    result = measure(
        PlayedIsolation([*BASELINE, done()], inside=Escaped()), tmp_path, JOB, [], None
    )
    assert (result.outcome, result.message) == (
        Outcome.STRATEGY_FAILED,
        "python (pid 12) left its cgroup for /x, so its figures and its limit are not valid; it ended"
        " with ok",
    )


@pytest.mark.parametrize(
    ("isolation", "outcome", "who"),
    [
        ("process", Outcome.STRATEGY_FAILED, "the strategy"),
        ("docker", Outcome.MEASUREMENT_FAILED, "another program"),  # it is mounted read-only
    ],
)
@pytest.mark.parametrize(
    "change",
    [
        lambda path: path.write_bytes(b"longer"),
        lambda path: path.with_name("new").replace(path),
        lambda path: os.utime(path, ns=(1, 1)),
        Path.unlink,
    ],
)
def test_a_checkpoint_that_changed_during_the_cell_voids_it(
    tmp_path: Path,
    change: Callable[[Path], object],
    isolation: str,
    outcome: Outcome,
    who: str,
) -> None:
    checkpoint = tmp_path / "model.pt"
    checkpoint.write_bytes(b"old")
    (tmp_path / "new").write_bytes(b"old")
    script: list[Any] = [*BASELINE, lambda: change(checkpoint), done()]
    job = replace(JOB, cell=replace(JOB.cell, isolation=isolation))
    result = take(PlayedIsolation(script, name=isolation), job, [checkpoint], None, {}).result
    assert result.outcome is outcome
    assert result.message == (
        f"{who} changed the checkpoint's files during the measurement: model.pt; it ended with ok"
    )


@pytest.mark.parametrize(
    ("count", "named"),
    [(1, "0"), (3, "0, 1, 2"), (4, "0, 1, 2 and 1 more"), (5, "0, 1, 2 and 2 more")],
)
def test_up_to_three_changed_files_are_named(tmp_path: Path, count: int, named: str) -> None:
    files = [tmp_path / str(number) for number in range(count)]
    for file in files:
        file.touch()
    script: list[Any] = [*BASELINE, lambda: [file.write_text("x") for file in files], done()]
    result = take(PlayedIsolation(script), JOB, files, None, {}).result
    assert result.message == (
        f"the strategy changed the checkpoint's files during the measurement: {named}; it ended"
        " with ok"
    )


def test_a_voided_failure_says_how_it_ended_before(tmp_path: Path) -> None:
    (file := tmp_path / "a").touch()
    script: list[Any] = [*BASELINE, file.unlink, fakes.failed("wrong_weights", "1 tensor differs")]
    result = take(PlayedIsolation(script), JOB, [file], None, {}).result
    assert result.message.endswith("a; it ended with wrong_weights: 1 tensor differs")


def test_a_watch_that_fails_releases_its_worker(tmp_path: Path) -> None:
    class Broken(Silent):
        def counters(self) -> Counters:
            raise RuntimeError("odd")

    started: list[fakes.FakeRunning] = []

    class Noting(PlayedIsolation):
        def start(self, *arguments: Any) -> fakes.FakeRunning:
            started.append(super().start(*arguments))
            return started[-1]

    with pytest.raises(RuntimeError, match="odd"):
        measure(Noting([*BASELINE, done()], inside=Broken()), tmp_path, JOB, [], None)
    assert started[0].closed == 1


class Unstartable(Silent):
    def start(self) -> None:
        raise RuntimeError("odd")

    def stop(self) -> list[Sample]:
        raise RuntimeError("cannot join thread before it is started")


@pytest.mark.parametrize(
    ("step", "inside"),
    [
        ("weighin.run.loads.LoadSpec.start", None),
        ("weighin.run.measure.Watch.wait", None),
        ("weighin.run.listener.Listener.close", None),
        ("weighin.run.measure.Watch.wait", Unstartable()),
    ],
)
def test_a_cell_that_breaks_off_leaves_no_log_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, inside: Silent | None
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("odd")

    log = os.open(os.devnull, os.O_RDONLY)
    monkeypatch.setattr("weighin.probes.kernel_log.position", lambda: log)
    monkeypatch.setattr(step, fail)
    with pytest.raises(RuntimeError, match="odd"):
        measure(PlayedIsolation([*BASELINE, done()], inside=inside), tmp_path, JOB, [], None)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(log)
