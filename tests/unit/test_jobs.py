"""Cells that run at once: which runs may do so, and what is not judged of them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import make_cell, make_result, refused, run_of

from weighin.errors import ConfigError
from weighin.fleet import driver as jobs
from weighin.gate import check as checks
from weighin.isolation import cgroup
from weighin.isolation.docker import DockerIsolation
from weighin.isolation.process import CgroupIsolation, ProcessIsolation
from weighin.plan.loads import plan_cell
from weighin.plan.task import Progress, Run
from weighin.probes import environment
from weighin.run import runner
from weighin.settings.definition import Settings
from weighin.suite import registry
from weighin.units import GIB


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(environment, "free_ram_bytes", lambda: 16 * GIB)


@pytest.fixture
def _limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cgroup around the cells, with a limit of 5 GiB: 1 GiB is in use, and 2 GiB are page cache."""
    (tmp_path / "memory.usage_in_bytes").write_text(str(3 * GIB))
    (tmp_path / "memory.stat").write_text(f"total_inactive_file {2 * GIB}\n")
    (tmp_path / "memory.limit_in_bytes").write_text(str(5 * GIB))
    monkeypatch.setattr(cgroup, "groups_root", lambda: tmp_path / "groups")


def run_with(*limits: int | None, isolation: Any = None, **changes: Any) -> Run:
    info = registry.strategies("load")["streaming"]
    cell = replace(make_cell("streaming", format="safetensors"), device="cpu")
    planned = [plan_cell(replace(cell, ram_limit_bytes=limit), info) for limit in limits]
    settings = Settings().model_copy(update=changes)
    return Run(Path("run"), planned, isolation or ProcessIsolation(), settings)


def no_room(wanted: int, free: int) -> str:
    return (
        f"jobs=2: the RAM limits of 2 cells are {wanted}.000 GiB together, but only {free}.000 GiB"
        " of RAM are free\nleave jobs out, or give fewer jobs or a smaller --ram"
    )


def test_limits_that_fit_together_are_accepted() -> None:
    jobs.check_jobs(run_with(8 * GIB, 8 * GIB, 2 * GIB), 2)
    jobs.check_jobs(run_with(8 * GIB, 6 * GIB, 2 * GIB), 3)
    assert refused(jobs.check_jobs, run_with(8 * GIB, 2 * GIB, 9 * GIB), 2) == no_room(17, 16)


@pytest.mark.usefixtures("_limited")
def test_limits_fit_into_the_cgroup_around_the_cells_unless_the_engine_has_others() -> None:
    jobs.check_jobs(run_with(2 * GIB, 2 * GIB, isolation=CgroupIsolation()), 2)
    too_much = run_with(2 * GIB, 3 * GIB, isolation=CgroupIsolation())
    assert refused(jobs.check_jobs, too_much, 2) == no_room(5, 4)
    jobs.check_jobs(replace(too_much, isolation=DockerIsolation()), 2)
    node = jobs.Jobs(1, "cgroup", Path()).node()
    assert (node.ram_bytes, node.free_ram_bytes) == (5 * GIB, 4 * GIB)
    assert jobs.Jobs(1, "docker", Path()).node().free_ram_bytes == 16 * GIB


@pytest.mark.usefixtures("_limited")
def test_a_floor_is_searched_below_the_limit_of_the_cgroup_around_the_cells(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(environment, "total_ram_bytes", lambda: 16 * GIB)
    task = run_with(None, isolation=CgroupIsolation(), within=0.05)
    first = make_result(task.planned[0].cell)
    large = replace(first, peaks=replace(first.peaks, anon_sampled_bytes=7 * GIB))
    monkeypatch.setattr(runner, "run", lambda _, __, following: following([large]))
    tried: Any = runner.search(task, Progress())
    assert tried.cell.ram_limit_bytes == 5 * GIB


def test_what_cannot_run_at_once() -> None:
    for task, told in (
        (run_with(GIB, None), "jobs needs --ram"),
        (run_with(GIB, checkpoint=Path("w.pt")), "jobs with --checkpoint or storage: all cells"),
        (run_with(GIB, storage=Path("disk")), "jobs with --checkpoint or storage: all cells"),
        (run_with(GIB, steady=True), "with jobs, weighin measures only the memory of cells"),
    ):
        assert refused(jobs.check_jobs, task, 2).startswith(told)


def test_the_settings_of_an_engine() -> None:
    assert jobs.engine_settings("local", "", {}) == {}
    assert jobs.engine_settings("local", "", {}, jobs=4) == {"name": "local", "jobs": 4}
    ray = {"name": "ray", "address": "auto", "labels": {"a": "b"}}
    assert jobs.engine_settings("ray", "", {"a": "b"}) == ray
    assert refused(jobs.engine_settings, "ray", "", {}, 2) == (
        "jobs=2: with --engine ray, each node runs one cell at a time\nleave jobs out"
    )
    with jobs.opened({}) as (nodes, perform):
        assert (nodes, perform) == ((), runner.run)


@pytest.mark.parametrize(
    "chosen",
    [{"x": 1}, {"name": "ray"}, {"name": "local"}, {"name": "local", "jobs": "2"}],
    ids=str,
)
def test_an_engine_of_an_edited_plan_is_refused(chosen: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="an engine that weighin cannot use"), jobs.opened(chosen):
        pass


def test_a_budget_cannot_limit_a_time_of_cells_that_ran_at_once() -> None:
    result = make_result(make_cell("streaming"))
    at_once = replace(result, environment=result.environment | {"concurrent_cells": 4})
    run = checks.read_runs([run_of(Path("run"), at_once)])
    told = refused(checks.check, run, None, budgets=["ready <= 5s"])
    assert "limits a time" in told and "several cells ran at once" in told
