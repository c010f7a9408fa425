"""The runs of shards become one run; what does not belong together is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from factories import make_cell, make_result
from ran_commands import make_command, make_ran, settings_of

from weighin.cell import Cell
from weighin.cli import app
from weighin.errors import RecordError
from weighin.plan import start
from weighin.records import run_folder
from weighin.records.run_folder import Shard, parse_shard
from weighin.result import Result
from weighin.run.merge import merge

PLAN = [make_cell(name) for name in ("baseline", "sequential", "streaming", "mmap_assign")]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def result_of(cell: Cell) -> Result:
    day = 1 + PLAN.index(replace(cell, repeat=0)) if replace(cell, repeat=0) in PLAN else 9
    return make_result(
        cell,
        started_at=f"2026-11-{day:02}T10:00:00.000+00:00",
        samples_path=f"samples/{cell.id}.csv",
    )


def shard(text: str, plan: list[Cell] = PLAN, **settings: Any) -> Path:
    """Write the run of a shard, in which all of its cells have a record."""
    folder = Path(f"shard-{text.replace('/', '-')}")
    run_folder.write_plan(folder, plan, {"seed": 0, "shard": text} | settings)
    (folder / "samples").mkdir()
    for cell in parse_shard(text).of(plan):
        run_folder.append(folder, result_of(cell))
        (folder / "samples" / f"{cell.id}.csv").write_text(f"samples of {cell.strategy}")
    return folder


def refused(*folders: Path) -> str:
    with pytest.raises(RecordError) as caught:
        merge(folders, Path("whole"))
    assert not Path("whole").exists()
    return str(caught.value)


def test_all_shards_become_the_whole_run() -> None:
    merged = merge([shard("2/2"), shard("1/2")], Path("whole"))
    assert (merged.missing, merged.missing_shards, merged.warnings) == ((), (), ())
    found = run_folder.read(Path("whole")).results
    assert [each.cell for each in found] == PLAN  # in the order of measurement
    for cell in PLAN:
        text = Path("whole", "samples", f"{cell.id}.csv").read_text()
        assert text == f"samples of {cell.strategy}"
    plan = run_folder.read_plan(Path("whole"))
    assert list(plan.cells) == PLAN
    assert plan.settings == {"seed": 0}  # so that --resume measures all that is missing
    assert sorted(path.name for path in Path().iterdir()) == ["shard-1-2", "shard-2-2", "whole"]


def test_the_samples_of_each_rank_are_merged_too() -> None:
    plan = [make_cell("streaming", ranks=2)]
    folder = shard("1/1", plan)
    names = [f"samples/{plan[0].id}-rank{rank}.csv" for rank in (0, 1)]
    for name in names:
        (folder / name).write_text(name)
    merge([folder], Path("whole"))
    assert [Path("whole", name).read_text() for name in names] == names


def test_missing_cells_and_shards_are_named() -> None:
    first = shard("1/4")
    records = first / "records.jsonl"
    merged = merge([first, shard("3/4")], Path("whole"))
    assert merged.missing == (PLAN[1], PLAN[3])
    assert merged.missing_shards == (Shard(2, 4), Shard(4, 4))
    assert records.exists()
    result = CliRunner().invoke(app.app, ["merge", "shard-1-4", "shard-3-4", "--out", "again"])
    assert result.exit_code == 0
    assert result.stdout == "again: 2 of 4 cells (measurements) are measured\n"
    assert result.stderr == (
        "note: missing: 2 cells; no run of shard 2/4, 4/4 was given; weighin bench --resume again"
        " measures them\n"
    )
    result = CliRunner().invoke(
        app.app, ["merge", "shard-1-4", "shard-3-4", "--out", "json", "--json", "-"]
    )
    assert json.loads(result.stdout) == {
        "schema": 1,
        "run": "json",
        "records": 2,
        "missing": [PLAN[1].id, PLAN[3].id],
        "missing_shards": ["2/4", "4/4"],
    }


def test_a_shard_that_was_cut_off_is_merged_with_a_warning() -> None:
    cut = shard("1/2")
    with (cut / "records.jsonl").open("a") as file:
        file.write('{"schema": 1, "ce')
    merged = merge([cut, shard("2/2")], Path("whole"))
    assert len(merged.results) == 4
    assert len(merged.warnings) == 1
    assert "line 3 is incomplete" in merged.warnings[0]


def test_two_records_of_one_cell_are_refused() -> None:
    first = shard("1/2")
    assert refused(first, shard("2/2"), first) == (
        f"shard-1-2 and shard-1-2 both measured the cell {PLAN[0].id}\n"
        "leave one of the two folders out of weighin merge"
    )


def test_runs_of_other_cells_are_refused() -> None:
    other = [*PLAN[:3], make_cell("per_param", format="per_param")]
    assert refused(shard("1/2"), shard("2/2", other)).startswith(
        "shard-1-2 and shard-2-2 have different plans: 4 and 4 cells, of which 2 are in one plan only"
    )


def test_runs_of_other_settings_are_refused() -> None:
    assert refused(shard("1/2"), shard("2/2", seed=1)) == (
        "the runs in shard-1-2 and shard-2-2 have different plans (seed: 0 and 1), and only runs of one plan can be merged\n"
        "merge only runs of one plan: the same suite, the same options and the same version of weighin"
    )


def test_a_run_is_not_overwritten() -> None:
    folder = shard("1/2")
    with pytest.raises(RecordError, match="already contains a run"):
        merge([folder], folder)


def test_a_merged_run_of_commands_is_resumed_by_its_own_verb(tmp_path: Path) -> None:
    cells = [make_command(repeat=repeat) for repeat in (0, 1)]
    first, second = Path("first"), Path("second")
    for folder, part in ((first, "1/2"), (second, "2/2")):
        settings = settings_of(cells[0], shard=parse_shard(part))
        run_folder.write_plan(folder, cells, settings.as_json())
    run_folder.append(first, make_ran(cells[0]))
    merged = merge([first], Path("part"))
    assert merged.again == "weighin run --resume part"
    run_folder.append(second, make_ran(cells[1]))
    whole = merge([first, second], Path("whole"))
    assert [result.cell for result in whole.results] == cells
    assert run_folder.read(Path("whole")).missing == 0


def test_a_merged_run_is_ours_if_all_its_parts_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    parts = [shard("1/2"), shard("2/2")]
    plans = [(part / "plan.json").read_bytes() for part in parts]
    start.remember(plans[0])
    merge(parts, Path("half"))
    assert not start.is_ours(Path("half/plan.json").read_bytes())
    start.remember(plans[1])
    merge(parts, Path("whole"))
    assert start.is_ours(Path("whole/plan.json").read_bytes())


def test_a_changed_plan_that_is_put_back_during_a_merge_is_not_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    folder = shard("1/1")
    ours = (folder / "plan.json").read_bytes()
    start.remember(ours)
    path = folder / run_folder.PLAN
    path.write_bytes(ours.replace(b'"seed": 0', b'"seed": 1'))
    write_plan = run_folder.write_plan

    def put_back(*arguments: Any) -> bytes:
        path.write_bytes(ours)
        return write_plan(*arguments)

    monkeypatch.setattr(run_folder, "write_plan", put_back)
    merge([folder], Path("whole"))
    assert run_folder.read_plan(Path("whole")).settings["seed"] == 1
    assert not start.is_ours(Path("whole/plan.json").read_bytes())


def test_runs_without_a_common_division_have_no_missing_shards() -> None:
    whole = Path("unsharded")
    run_folder.write_plan(whole, PLAN, {"seed": 0})
    run_folder.append(whole, result_of(PLAN[1]))
    merged = merge([shard("1/4"), whole], Path("whole"))
    assert (merged.missing_shards, merged.missing) == ((), (PLAN[2], PLAN[3]))
    other = merge([shard("2/4"), shard("1/3")], Path("other"))
    assert (other.missing_shards, other.missing) == ((), (PLAN[2],))


def test_up_to_three_settings_that_differ_are_named() -> None:
    changes: dict[str, Any] = {"seed": 1, "steady": True, "a": 1, "b": 2}
    assert refused(shard("1/2"), shard("2/2", **changes)).startswith(
        "the runs in shard-1-2 and shard-2-2 have different plans (a: None and 1; b: None and 2; seed: 0 and 1), and only runs of one plan can be merged\n"
    )


def test_the_same_cells_in_another_order_are_another_plan() -> None:
    assert "4 and 4 cells, of which 0 are in one plan only in another order" in refused(
        shard("1/2"), shard("2/2", PLAN[::-1])
    )


def test_a_plan_with_more_cells_names_one_of_them() -> None:
    more = [*PLAN, make_cell("per_param", format="per_param")]
    assert "4 and 5 cells, of which 1 are in one plan only, for example per_param" in refused(
        shard("1/2"), shard("2/2", more)
    )


def test_parts_of_engines_that_differ_are_merged() -> None:
    merged = merge([shard("1/2", engine={"jobs": 2}), shard("2/2")], Path("whole"))
    assert merged.missing == ()
    assert run_folder.read_plan(Path("whole")).settings == {"seed": 0}
