"""The records of a run and its plan: which part was measured, of cells, of a shard, of a search."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import make_cell, make_result, run_of
from snapshots import Compare

from weighin.cell import Cell
from weighin.records import run_folder
from weighin.records.floor import next_cell
from weighin.result import Outcome, Result
from weighin.units import GIB

CELLS = [make_cell(name) for name in ("baseline", "sequential", "meta_copy", "streaming")]


def planned(
    folder: Path, *results: Result, cells: Sequence[Cell] = CELLS, **settings: object
) -> Path:
    """Write a run with this plan and these records."""
    run_folder.write_plan(folder, cells, settings)
    return run_of(folder, *results)


def searched(cell: Cell, floor_bytes: int) -> list[Result]:
    """The results of a search for a floor, as ``weighin floor`` makes them."""
    results: list[Result] = []
    while following := next_cell(cell, results, 0.01, 64 * GIB):
        fails = following.ram_limit_bytes is not None and following.ram_limit_bytes < floor_bytes
        outcome = Outcome.OOM_KILLED if fails else Outcome.OK
        results.append(replace(make_result(cell), cell=following, outcome=outcome))
    return results


OKS = [make_result(cell) for cell in CELLS]
SEARCHED = [make_cell(name, ram_limit_bytes=None) for name in ("streaming", "baseline")]
FIRST = searched(SEARCHED[0], 7 * GIB)
SECOND = replace(make_result(SEARCHED[1]), outcome=Outcome.STRATEGY_FAILED)
SEARCH: dict[str, Any] = {"cells": SEARCHED, "within": 0.01}
RUNS: dict[str, tuple[Sequence[Result], dict[str, Any]]] = {
    "nothing yet": ([], {}),
    "the first": (OKS[:1], {}),
    "all but one": (OKS[:3], {}),
    "all, of which one failed": ([*OKS[:3], replace(OKS[3], outcome=Outcome.MEASUREMENT_FAILED)], {}),
    "the first of a shard": (OKS[:1], {"shard": "1/2"}),
    "all of a shard": (OKS[::2], {"shard": "1/2"}),
    "a search whose last cell is missing": (FIRST[:-1], SEARCH),
    "the first of two searches": (FIRST, SEARCH),
    "two searches, one without a floor": ([*FIRST, SECOND], SEARCH),
}  # fmt: skip


def test_how_far_a_run_came(tmp_path: Path, same: Compare) -> None:
    texts = []
    for number, (what, (results, settings)) in enumerate(RUNS.items()):
        found = run_folder.read(run := planned(tmp_path / str(number), *results, **settings))
        lines = [f"{found.coverage}, missing {found.missing}", *found.warnings]
        texts.append("\n  ".join([what, *lines]).replace(str(run), "RUN"))
    same("coverage.txt", "\n".join(texts) + "\n")


def test_of_a_run_without_a_plan_nobody_knows(tmp_path: Path) -> None:
    (planned(tmp_path, OKS[0]) / run_folder.PLAN).unlink()
    records = run_folder.read(tmp_path)
    assert (records.coverage, records.missing, records.warnings) == (None, None, ())


def test_a_command_stays_as_it_was_typed(tmp_path: Path) -> None:
    words = ("sh", "-c", "echo ::1\n\x1b[1m", "::group", "a ::b")
    cell = Cell.of_command("sh", words, "process")
    settings = {"commands": [{"name": "sh", "command": list(words), "marks": ["^::ready"]}]}
    run = planned(tmp_path, make_result(cell), cells=[cell], **settings)
    records = run_folder.read(run)
    assert str(records.coverage) == "1 of 1 cells measured"
    assert records.results[0].cell.command == words
    assert run_folder.read_plan(run).settings == settings


EDITED: list[dict[str, Any]] = [
    {"within": None}, {"within": {}}, {"within": "x"}, {"within": float("1e308") * 10}, {"within": -0.1},
    {"within": 0.02, "aim": "zz"}, {"within": 0.02, "aim": []},
]  # fmt: skip


@pytest.mark.parametrize("settings", EDITED, ids=str)
def test_an_edited_search_is_read_as_cells(tmp_path: Path, settings: dict[str, Any]) -> None:
    run = planned(tmp_path, *OKS[:2])
    plan = run / run_folder.PLAN
    text = json.dumps(json.loads(plan.read_text()) | {"settings": settings})
    plan.write_text(text.replace("Infinity", "1e400"))
    assert str(run_folder.read(run, past_damage=True).coverage) == "2 of 4 cells measured"
