"""Cells that run at once: which runs may do so, and what is not judged of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import make_cell, make_result, run_of

from weighin.errors import ConfigError, UnknownName
from weighin.fleet import driver as jobs
from weighin.gate import check as checks
from weighin.isolation import cgroup
from weighin.isolation.docker import DockerIsolation
from weighin.isolation.process import CgroupIsolation, ProcessIsolation
from weighin.plan.loads import plan_cell
from weighin.plan.task import Planned, Progress, Run
from weighin.probes import environment
from weighin.result import Result
from weighin.run import runner
from weighin.settings.definition import Settings
from weighin.suite import registry
from weighin.units import GIB


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "free_ram_bytes", lambda: 16 * GIB)


def run_with(*limits: int | None, **changes: Any) -> Run:
    info = registry.strategies("load")["streaming"]
    cell = replace(make_cell("streaming", format="safetensors"), device="cpu")
    planned = [plan_cell(replace(cell, ram_limit_bytes=limit), info) for limit in limits]
    return Run(Path("run"), planned, ProcessIsolation(), Settings().model_copy(update=changes))


def refused(task: Run, count: int = 2) -> str:
    with pytest.raises(ConfigError) as caught:
        jobs.check_jobs(task, count)
    return str(caught.value)


def test_limits_that_fit_together_are_accepted() -> None:
    jobs.check_jobs(run_with(8 * GIB, 8 * GIB, 2 * GIB), 2)
    jobs.check_jobs(run_with(8 * GIB, 6 * GIB, 2 * GIB), 3)


def test_limits_that_do_not_fit_together() -> None:
    assert refused(run_with(8 * GIB, 2 * GIB, 9 * GIB)) == (
        "jobs=2: the RAM limits of 2 cells are 17.000 GiB together, but only 16.000 GiB of RAM are free\n"
        "leave jobs out, or change what it names"
    )


@pytest.fixture
def limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cgroup around the cells, with a limit of 5 GiB: 1 GiB is in use, and 2 GiB are page cache."""
    (tmp_path / "memory.usage_in_bytes").write_text(str(3 * GIB))
    (tmp_path / "memory.stat").write_text(f"total_inactive_file {2 * GIB}\n")
    (tmp_path / "memory.limit_in_bytes").write_text(str(5 * GIB))
    monkeypatch.setattr(cgroup, "groups_root", lambda: tmp_path / "groups")


@pytest.mark.usefixtures("limited")
def test_limits_that_do_not_fit_together_into_a_cgroup_around_the_cells() -> None:
    jobs.check_jobs(replace(run_with(2 * GIB, 2 * GIB), isolation=CgroupIsolation()), 2)
    too_much = replace(run_with(2 * GIB, 3 * GIB), isolation=CgroupIsolation())
    assert refused(too_much) == (
        "jobs=2: the RAM limits of 2 cells are 5.000 GiB together, but only 4.000 GiB of RAM are free\n"
        "leave jobs out, or change what it names"
    )
    jobs.check_jobs(
        replace(too_much, isolation=DockerIsolation()), 2
    )  # the engine's groups are others


@pytest.mark.usefixtures("limited")
def test_each_job_has_the_ram_of_the_cgroup_around_the_cells() -> None:
    node = jobs.Jobs(1, "cgroup", Path()).node()
    assert (node.ram_bytes, node.free_ram_bytes) == (5 * GIB, 4 * GIB)
    assert jobs.Jobs(1, "docker", Path()).node().free_ram_bytes == 16 * GIB


@pytest.mark.usefixtures("limited")
def test_a_floor_is_searched_below_the_limit_of_the_cgroup_around_the_cells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "total_ram_bytes", lambda: 16 * GIB)
    task = replace(run_with(None), isolation=CgroupIsolation())
    first = make_result(task.planned[0].cell)
    large = replace(first, peaks=replace(first.peaks, anon_sampled_bytes=7 * GIB))
    tried: list[int | None] = []

    def stop(_: Run, __: object, next_of: Callable[[list[Result]], Planned | None]) -> list[Result]:
        found = next_of([large])
        tried.append(found.cell.ram_limit_bytes if found else None)
        return []

    monkeypatch.setattr(runner, "run", stop)
    settings = task.settings.model_copy(update={"within": 0.05})
    runner.search(replace(task, settings=settings), Progress())
    assert tried == [5 * GIB]


def test_what_cannot_run_at_once() -> None:
    assert refused(run_with(GIB, None)).startswith("jobs needs --ram")
    for changes in ({"checkpoint": Path("w.pt")}, {"storage": Path("disk")}):
        told = refused(run_with(GIB, **changes))
        assert told.startswith("jobs with --checkpoint or storage: all cells would read")
    for own in ("steady",):
        assert refused(run_with(GIB, **{own: True})).startswith(
            "with jobs, weighin measures only the memory of cells"
        )


def test_the_settings_of_an_engine() -> None:
    assert jobs.engine_settings("local", "", {}) == {}
    assert jobs.engine_settings("local", "", {}, jobs=4) == {"name": "local", "jobs": 4}
    assert jobs.engine_settings("ray", "", {"a": "b"}) == {
        "name": "ray",
        "address": "auto",
        "labels": {"a": "b"},
    }
    with jobs.opened({}) as (nodes, perform):
        assert (nodes, perform) == ((), runner.run)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("local", "auto", {}),
            "address and labels have an effect only with --engine ray\nadd --engine ray, or leave them out",
        ),
        (
            ("ray", "", {}, 2),
            "each node of a cluster runs one cell at a time\nleave jobs out",
        ),
    ],
)
def test_settings_that_contradict(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        jobs.engine_settings(*arguments)
    assert str(caught.value) == message


def test_an_unknown_engine() -> None:
    with pytest.raises(UnknownName, match="no engine is called 'rai'"):
        jobs.engine_settings("rai", "", {})


def at_once(result: Result, cells: int = 4) -> Result:
    return replace(result, environment=result.environment | {"concurrent_cells": cells})


def test_times_of_cells_that_ran_at_once_are_not_judged(tmp_path: Path) -> None:
    result = at_once(make_result(make_cell("streaming")))
    assert result.ready_ns
    slow = replace(result, ready_ns=10 * result.ready_ns)
    before, after = run_of(Path("before"), result), run_of(Path("after"), slow)
    file = tmp_path / "baseline.json"
    checks.update(checks.read_runs([before]), file)
    judged = checks.check(checks.read_runs([after]), file)
    assert not judged.failed
    assert "times are not judged: several cells ran at once (jobs)" in judged.notes
    with pytest.raises(ConfigError, match=r"limits a time, .* several cells ran at once"):
        checks.check(checks.read_runs([after]), file, budgets=["ready <= 5s"])


def test_the_same_times_without_jobs_are_judged(tmp_path: Path) -> None:
    result = make_result(make_cell("streaming"))
    assert result.ready_ns
    slow = replace(result, ready_ns=10 * result.ready_ns)
    before, after = run_of(Path("before"), result), run_of(Path("after"), slow)
    file = tmp_path / "baseline.json"
    checks.update(checks.read_runs([before]), file)
    assert checks.check(checks.read_runs([after]), file).failed


@pytest.mark.parametrize(
    "chosen",
    [{"x": 1}, {"name": "ray"}, {"name": "local"}, {"name": "local", "jobs": "2"}],
    ids=str,
)
def test_an_engine_of_an_edited_plan_is_refused(chosen: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="an unknown engine"), jobs.opened(chosen):
        pass
