"""The records of a run and its plan: which part was measured, of cells, of a shard, of a search."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from factories import make_cell, make_result

from weighin.cell import Cell
from weighin.records import run_folder
from weighin.records.floor import floors, next_cell
from weighin.result import Outcome, Result
from weighin.units import GIB

CELLS = [make_cell(name) for name in ("baseline", "sequential", "meta_copy", "streaming")]


def planned(folder: Path, count: int, cells: list[Cell] = CELLS, **settings: object) -> Path:
    """Write a run with this plan, whose first ``count`` cells have records."""
    run = folder / "run"
    run_folder.write_plan(run, cells, settings)
    for cell in cells[:count]:
        run_folder.append(run, make_result(cell))
    return run


@pytest.mark.parametrize("count", range(4))
def test_a_run_that_was_stopped_says_how_far_it_came(tmp_path: Path, count: int) -> None:
    run = planned(tmp_path, count)
    records = run_folder.read(run)
    assert records.missing == 4 - count
    assert records.warnings == (
        f"{run}: {count} of 4 cells measured; weighin bench --resume {run} measures the rest",
    )


def test_a_run_is_complete_with_cells_that_failed(tmp_path: Path) -> None:
    run = planned(tmp_path, 3)
    run_folder.append(run, make_result(CELLS[3], outcome=Outcome.MEASUREMENT_FAILED))
    records = run_folder.read(run)
    assert (records.warnings, records.missing) == ((), 0)
    assert str(records.coverage) == "4 of 4 cells measured"


def test_a_shard_is_complete_with_the_cells_of_its_own(tmp_path: Path) -> None:
    run = planned(tmp_path, 1, shard="1/2")
    assert str(run_folder.read(run).coverage) == "1 of 2 cells measured"
    run_folder.append(run, make_result(CELLS[2]))
    assert run_folder.read(run).warnings == ()


def test_of_a_run_without_a_plan_nobody_knows(tmp_path: Path) -> None:
    (planned(tmp_path, 1) / run_folder.PLAN).unlink()
    records = run_folder.read(tmp_path / "run")
    assert (records.coverage, records.missing, records.warnings) == (None, None, ())


def searched(cell: Cell, floor_bytes: int) -> list[Result]:
    """The results of a search for a floor, as ``weighin floor`` makes them."""
    results: list[Result] = []
    while following := next_cell(cell, results, 0.01, 64 * GIB):
        fails = following.ram_limit_bytes is not None and following.ram_limit_bytes < floor_bytes
        outcome = Outcome.OOM_KILLED if fails else Outcome.OK
        results.append(replace(make_result(cell), cell=following, outcome=outcome))
    return results


def test_a_search_is_complete_when_nothing_is_left_to_search(tmp_path: Path) -> None:
    first, second = (make_cell(name, ram_limit_bytes=None) for name in ("streaming", "baseline"))
    run = planned(tmp_path, 0, [first, second], within=0.01)
    whole = searched(first, 7 * GIB)
    assert floors(whole)[0].message == ""
    for result in whole[:-1]:
        run_folder.append(run, result)
    assert str(run_folder.read(run).coverage) == "0 of 2 searches for a floor finished"
    run_folder.append(run, whole[-1])
    assert run_folder.read(run).warnings == (
        f"{run}: 1 of 2 searches for a floor finished; weighin floor --resume {run} measures the rest",
    )
    run_folder.append(run, replace(make_result(second), outcome=Outcome.STRATEGY_FAILED))
    assert run_folder.read(run).warnings == ()


def test_a_command_stays_as_it_was_typed(tmp_path: Path) -> None:
    words = ("sh", "-c", "echo ::1\n\x1b[1m", "::group", "a ::b")
    cell = Cell.of_command("sh", words, "process")
    settings = {"commands": [{"name": "sh", "command": list(words), "marks": ["^::ready"]}]}
    run = planned(tmp_path, 1, [cell], **settings)
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
    run = planned(tmp_path, 2)
    plan = run / run_folder.PLAN
    text = json.dumps(json.loads(plan.read_text()) | {"settings": settings})
    plan.write_text(text.replace("Infinity", "1e400"))
    assert str(run_folder.read(run, past_damage=True).coverage) == "2 of 4 cells measured"
