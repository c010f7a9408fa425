"""A checkpoint format that cannot hold a model: its strategies are skipped, and the others run."""

from pathlib import Path
from typing import Any

import pytest

from weighin.cell import Cell
from weighin.checkpoint import cache
from weighin.errors import FormatLimit
from weighin.isolation.process import ProcessIsolation
from weighin.plan.loads import plan_cell
from weighin.plan.task import Progress, Run
from weighin.records import run_folder
from weighin.result import Outcome
from weighin.run.runner import run
from weighin.suite import registry

REASON = "the names of 148 tensors do not fit into the index"


@pytest.fixture(autouse=True)
def _format_with_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``per_param`` refuse every model, as a package's format may."""
    ensure = cache.ensure

    def limited(model: Any, fmt: str, **settings: Any) -> cache.Prepared:
        if fmt == "per_param":
            raise FormatLimit(REASON, "choose another format")
        return ensure(model, fmt, **settings)

    monkeypatch.setattr(cache, "ensure", limited)
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("WEIGHIN_LOCK", str(tmp_path / "lock"))


def measured(folder: Path, *strategies: str) -> dict[str, tuple[Outcome, str]]:
    planned = []
    for name in strategies:
        info = registry.strategy(name)
        cell = Cell(registry.model("gpt2-tiny"), name, "process", format=info.formats[0])
        planned.append(plan_cell(cell, info))
    run_folder.write_plan(folder, [each.cell for each in planned])
    results = run(Run(folder, planned, ProcessIsolation()), Progress())
    return {one.cell.strategy: (one.outcome, one.message) for one in results}


def test_other_strategies_run(tmp_path: Path) -> None:
    assert measured(tmp_path / "run", "per_param", "mmap_assign", "per_param_mmap") == {
        "per_param": (Outcome.SKIPPED, REASON),
        "mmap_assign": (Outcome.OK, ""),
        "per_param_mmap": (Outcome.SKIPPED, REASON),
    }


def test_a_run_without_any_other_strategy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatLimit, match=REASON):
        measured(tmp_path / "run", "per_param")
