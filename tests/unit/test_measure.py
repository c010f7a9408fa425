"""One cell, from an isolation's start to a Result: what is written beside the record."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fakes
import pytest
from fakes import BASELINE, JOB, PlayedIsolation, Seen, done, measure, ready, take

from weighin.cell import Job
from weighin.probes import environment, page_cache
from weighin.result import Outcome
from weighin.run import loads
from weighin.units import MIB

LOAD = [fakes.baseline(), fakes.loaded(), ready(), done()]


def test_the_record_keeps_a_hash_of_the_code_that_decides_its_figures(tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def load(job): ...\n")
    job = replace(JOB, strategy_path=str(mine))

    def measured(job: Job) -> str | None:
        return measure(PlayedIsolation(LOAD), tmp_path, job, [], None).sources_hash

    first = measured(job)
    assert first == environment.code_digest(mine) == measured(job)
    use = tmp_path / "use.py"
    use.write_text("def use(model): ...\n")
    assert measured(replace(job, use_path=str(use))) not in (first, None)
    mine.write_text("def load(job): pass\n")
    assert measured(job) not in (first, None)
    mine.unlink()  # the cell fails; the run goes on
    assert measured(job) is None


@pytest.mark.parametrize(
    ("cell", "spare_bytes"),
    [({}, 0), ({"cache": "warm"}, 100), ({"operation": "save"}, 100)],
    ids=["cold", "warm", "save"],
)
def test_a_steady_load_gets_its_memory_when_it_begins_and_finds_room_for_its_cache(
    cell: dict[str, Any], spare_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
        lambda: seen.append("imports torch"), LOAD[0], lambda: seen.append("loads"), *LOAD[1:],
    ]  # fmt: skip
    job = replace(JOB, cell=replace(JOB.cell, **cell))
    result = measure(PlayedIsolation(script), tmp_path, job, [], 100, steady=True)
    held_first = f"holds 300 and leaves {spare_bytes}"
    assert seen == [held_first, "imports torch", "gives back", "loads"]
    assert result.touched_bytes_before == 300


@pytest.mark.parametrize(
    ("left", "warnings"),
    [
        (0, ()),
        (3 * MIB, ("3.000 MiB of the checkpoint could not be dropped from the page cache",)),
        (None, ("weighin cannot tell whether the checkpoint left the page cache: Linux reports cached pages only to a user who owns the files or may write them",)),
    ],
    ids=["cold", "in part", "unknown"],
)  # fmt: skip
def test_a_checkpoint_that_is_not_proven_cold_is_told_of(
    left: int | None, warnings: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_cache, "drop", lambda _: left)
    (file := tmp_path / "model.pt").touch()
    job = replace(JOB, checkpoint=str(file))
    result = measure(PlayedIsolation(LOAD), tmp_path, job, [file], None)
    assert (result.cached_bytes_at_start, result.warnings) == (left, warnings)


def test_a_worker_that_got_out_of_its_limit_is_not_ok(tmp_path: Path) -> None:
    class Escaped(Seen):
        escape = "python (pid 12) left its cgroup for /x"

    played = PlayedIsolation([*BASELINE, done()], inside=Escaped())
    result = measure(played, tmp_path, JOB, [], None)
    assert (result.outcome, result.message) == (
        Outcome.STRATEGY_FAILED,
        "python (pid 12) left its cgroup for /x, so its figures and its limit are not valid; it ended"
        " with ok",
    )


WRONG = fakes.failed("wrong_weights", "1 tensor differs")
CHANGES: dict[str, tuple[Callable[[Path], object], int, bytes, str]] = {
    "longer": (lambda path: path.write_bytes(b"longer"), 1, done(), "0; it ended with ok"),
    "another file": (lambda path: path.with_name("new").replace(path), 1, done(), "0; it ended with ok"),
    "another time": (lambda path: os.utime(path, ns=(1, 1)), 1, done(), "0; it ended with ok"),
    "gone": (Path.unlink, 1, done(), "0; it ended with ok"),
    "in a container": (Path.unlink, 1, done(), "0; it ended with ok"),  # it is mounted read-only there
    "three": (Path.unlink, 3, done(), "0, 1, 2; it ended with ok"),
    "four": (Path.unlink, 4, done(), "0, 1, 2 and 1 more; it ended with ok"),
    "five": (Path.unlink, 5, done(), "0, 1, 2 and 2 more; it ended with ok"),
    "after a failure": (Path.unlink, 1, WRONG, "0; it ended with wrong_weights: 1 tensor differs"),
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_checkpoint_that_changed_during_the_cell_voids_it(tmp_path: Path, name: str) -> None:
    change, count, end, message = CHANGES[name]
    isolation, outcome, who = "process", "strategy_failed", "the strategy"
    if name == "in a container":
        isolation, outcome, who = "docker", "measurement_failed", "another program"
    files = [tmp_path / str(number) for number in range(count)]
    for file in (*files, tmp_path / "new"):
        file.write_bytes(b"old")
    script: list[Any] = [*BASELINE, lambda: [change(file) for file in files], end]
    job = replace(JOB, cell=replace(JOB.cell, isolation=isolation))
    result = take(PlayedIsolation(script, name=isolation), job, files, None, {}).result
    changed = f"{who} changed the checkpoint's files during the measurement: {message}"
    assert (result.outcome, result.message) == (outcome, changed)


def test_a_watch_that_fails_releases_its_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(Seen):
        counters = Mock(side_effect=RuntimeError("odd"))

    close = Mock()
    monkeypatch.setattr(fakes.FakeRunning, "close", close)
    with pytest.raises(RuntimeError, match="odd"):
        measure(PlayedIsolation([*BASELINE, done()], inside=Broken()), tmp_path, JOB, [], None)
    assert close.call_count == 1


class Unstartable(Seen):
    start = Mock(side_effect=RuntimeError("odd"))
    stop = Mock(side_effect=RuntimeError("cannot join thread before it is started"))


@pytest.mark.parametrize(
    ("step", "inside"),
    [
        ("loads.LoadSpec.start", None),
        ("measure.Watch.wait", None),
        ("listener.Listener.close", None),
        ("measure.Watch.wait", Unstartable()),
    ],
    ids=["start", "wait", "close", "sampler"],
)
def test_a_cell_that_breaks_off_leaves_no_log_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, inside: Seen | None
) -> None:
    log = os.open(os.devnull, os.O_RDONLY)
    monkeypatch.setattr("weighin.probes.kernel_log.position", lambda: log)
    monkeypatch.setattr(f"weighin.run.{step}", Mock(side_effect=RuntimeError("odd")))
    with pytest.raises(RuntimeError, match="odd"):
        measure(PlayedIsolation([*BASELINE, done()], inside=inside), tmp_path, JOB, [], None)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(log)
