"""The run's folder: nothing that was measured is lost, nothing damaged passes for a record."""

import json
import math
import os
import shutil
from collections import Counter, defaultdict
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
from factories import make_cell, make_result, mixed_run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ran_commands import make_command

from weighin.cell import Cell, ModelSpec
from weighin.errors import RecordError
from weighin.records import run_folder
from weighin.records.floor import Aim, Floor
from weighin.records.run_folder import parse
from weighin.result import SCHEMA, Outcome, Peaks, Result

FIXTURE = Path(__file__).parent / "fixtures" / "records-schema1.jsonl"


def edit(run: Path, number: int, change: dict[str, Any]) -> None:
    """Change keys of one record by hand, as a user with an editor would."""
    path = run / run_folder.RECORDS
    lines = path.read_text().splitlines()
    lines[number - 1] = json.dumps(json.loads(lines[number - 1]) | change)
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for result in mixed_run()[:3]:
        run_folder.append(tmp_path / "run", result)
    return tmp_path / "run"


@pytest.mark.parametrize(
    "cell",
    [
        make_cell(model=ModelSpec("tied", "tied:net", {"apart": {"float32": [("a", "b")]}})),
        make_command("a\u00a0b.py"),
    ],
    ids=["tuples", "unprintable"],
)
def test_a_search_finds_the_result_of_the_cell_that_it_planned(cell: Cell, run: Path) -> None:
    result = run_folder.append(run, make_result(cell))
    assert Floor(cell, [result], Aim.ENDS).results == [result]


def test_what_was_appended_is_read_back(run: Path) -> None:
    assert run_folder.read(run) == run_folder.Records(tuple(mixed_run()[:3]))


def test_a_record_that_cannot_be_synced_is_taken_back(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = run / run_folder.RECORDS
    before = path.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched, pytest.raises(RecordError):
        patched.setattr(os, "fsync", full)
        run_folder.append(run, mixed_run()[3])
    assert path.read_bytes() == before
    run_folder.append(run, mixed_run()[3])
    assert run_folder.read(run).results == tuple(mixed_run()[:4])


def test_records_of_schema_1_are_still_read(tmp_path: Path) -> None:
    shutil.copy(FIXTURE, tmp_path / run_folder.RECORDS)
    results = run_folder.read(tmp_path).results
    assert [r.outcome for r in results] == [
        Outcome.OK, Outcome.OOM_KILLED, Outcome.TIMEOUT, Outcome.SKIPPED,
        Outcome.STRATEGY_FAILED, Outcome.WRONG_WEIGHTS,
    ]  # fmt: skip
    # The files of samples are named after all of a cell, so that a new field renames those to come.
    named = [
        replace(r, samples_path=one.samples_path)
        for r, one in zip(mixed_run(), results, strict=True)
    ]
    assert list(results) == named


@pytest.mark.parametrize("kept", [1, 40, -2])
def test_a_torn_last_line_is_a_warning_and_is_cut_by_the_next_append(run: Path, kept: int) -> None:
    path = run / run_folder.RECORDS
    *whole, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole) + last[:kept])
    records = run_folder.read(run)
    assert records.results == tuple(mixed_run()[:2])
    assert records.warnings == (
        f"{path}, line 3 is incomplete, because the run was killed while it wrote the line: the"
        f" measurement of this line counts as missing; weighin bench --resume {run} repeats it",
    )
    run_folder.append(run, make_result())
    assert run_folder.read(run) == run_folder.Records((*mixed_run()[:2], make_result()))


def test_a_whole_last_line_without_newline_is_kept(run: Path) -> None:
    path = run / run_folder.RECORDS
    path.write_bytes(path.read_bytes().rstrip())
    assert run_folder.read(run) == run_folder.Records(tuple(mixed_run()[:3]))
    run_folder.append(run, make_result())
    assert len(run_folder.read(run).results) == 4


def test_a_bad_line_in_the_middle_is_named_with_its_repair(run: Path) -> None:
    path = run / run_folder.RECORDS
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[1][:30], lines[2]]) + "\n")
    with pytest.raises(RecordError) as caught:
        run_folder.read(run)
    assert caught.value.message.startswith(f"{path}, line 2: not JSON: ")
    assert caught.value.repair == (
        f"delete the line and repeat its measurement: sed -i 2d {path} && weighin bench --resume"
        f" {run}"
    )


def test_unknown_keys_are_ignored(run: Path) -> None:
    edit(run, 1, {"added_later": {"any": "thing"}})
    assert run_folder.read(run).results == tuple(mixed_run()[:3])


def test_a_run_without_a_finished_cell_is_empty(tmp_path: Path) -> None:
    run_folder.write_plan(tmp_path, [make_cell()])
    assert run_folder.read(tmp_path).results == ()


def test_a_folder_that_cannot_be_written_has_a_repair(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RecordError) as caught:
        run_folder.append(tmp_path / "file" / "run", make_result())
    assert caught.value.message == (
        f"cannot write {tmp_path / 'file' / 'run' / run_folder.RECORDS}: Not a directory;"
        f" the measurement of {make_result().cell.id} is lost"
    )
    assert "--out FOLDER" in caught.value.repair
    with pytest.raises(RecordError):
        run_folder.write_plan(tmp_path / "file", [])


def test_a_figure_that_json_cannot_hold(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot be written as JSON"):
        run_folder.append(tmp_path, make_result(make_cell(options={"rate": float("nan")})))


@pytest.mark.parametrize(
    ("option", "stored"),
    [
        (defaultdict(list, a=[1]), {"a": [1]}),
        (Counter("a"), {"a": 1}),
        (math, str(math)),
        (LOCK := Lock(), str(LOCK)),
        (Cell, str(Cell)),  # a class, not an object of it
    ],
    ids=["a defaultdict", "a counter", "a module", "a lock", "a class"],
)
def test_an_option_of_any_kind_is_stored(tmp_path: Path, option: object, stored: object) -> None:
    cell = make_cell(options={"any": option})
    run_folder.append(tmp_path, make_result(cell))
    (result,) = run_folder.read(tmp_path).results
    assert result.cell.options["any"] == stored


def test_bytes_that_are_no_utf8_do_not_lose_the_record(tmp_path: Path) -> None:
    run_folder.append(
        tmp_path, make_result(message=b"no file x\xff".decode("utf-8", "surrogateescape"))
    )
    assert run_folder.read(tmp_path).results[0].message == "no file x?"


def test_the_plan_comes_back_and_leaves_no_other_file(tmp_path: Path) -> None:
    cells = (make_cell("baseline"), make_cell("streaming", repeat=1))
    run_folder.write_plan(tmp_path, cells, {"timeout_s": 60.0})
    run_folder.write_plan(tmp_path, cells, {"timeout_s": 90.0})
    assert run_folder.read_plan(tmp_path) == run_folder.Plan(SCHEMA, cells, {"timeout_s": 90.0})
    assert [path.name for path in tmp_path.iterdir()] == [run_folder.PLAN]


def test_pending_compares_whole_cells(tmp_path: Path) -> None:
    cells = [
        make_cell("streaming"),
        make_cell("streaming", repeat=1),
        make_cell("streaming", options={"chunks": (1, 2)}),
        make_cell("streaming", model=ModelSpec("gpt2-xl", "m:f", {"n_layer": 2})),
    ]
    for cell in (cells[0], cells[2]):
        run_folder.append(tmp_path, make_result(cell))
    assert run_folder.pending(cells, run_folder.read(tmp_path).results) == [cells[1], cells[3]]


# Written text loses what UTF-8 cannot hold: surrogates are the subject of a test above. Reading
# replaces control characters: tests/unit/test_foreign.py.
words = st.text(st.characters(exclude_categories=["C", "Z"]), max_size=12)
sizes = st.none() | st.integers(0, 2**63 - 1)
free = st.dictionaries(words, st.none() | st.booleans() | st.integers(-9, 9) | words, max_size=3)
cells = st.builds(
    Cell, st.builds(ModelSpec, words, words, free), words, words, sizes, options=free,
    cache=st.sampled_from(["cold", "warm"]), repeat=st.integers(0, 9),
)  # fmt: skip
results = st.builds(
    Result, st.just(SCHEMA), cells, st.sampled_from(Outcome), words, st.none() | words, sizes,
    peaks=st.builds(Peaks, sizes, sizes, sizes), load_ns=sizes, environment=free,
    warnings=st.lists(words, max_size=2).map(tuple),
)  # fmt: skip


@given(results)
@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
def test_every_result_survives_its_json(result: Result) -> None:
    line = run_folder._encode(result, "cell")
    assert b"\n" not in line
    assert parse(Result, line, "records.jsonl, line 1") == result


def test_what_is_whole_is_read_beside_the_damage(run: Path) -> None:
    edit(run, 2, {"outcome": "okay"})
    records = run_folder.read(run, past_damage=True)
    assert records.results == (mixed_run()[0], mixed_run()[2])
    assert isinstance(records.damage, RecordError)
    assert records.warnings == (f"{records.damage.message}: this line is left out",)


def test_the_repair_of_a_line_comes_before_that_of_the_plan(run: Path) -> None:
    edit(run, 2, {"outcome": "okay"})
    (run / run_folder.PLAN).write_text("[]")
    with pytest.raises(RecordError, match="line 2: "):
        run_folder.read(run)


def test_many_damaged_lines_are_counted(run: Path) -> None:
    with (run / run_folder.RECORDS).open("a") as file:
        file.writelines('{"schema": 99}\n' for _ in range(12))
    records = run_folder.read(run, past_damage=True)
    assert len(records.results) == 3
    assert records.damage
    assert records.warnings == (f"{records.damage.message}: this line is left out, and 11 more",)


def test_repeats_of_other_code_are_told(tmp_path: Path) -> None:
    cells = [make_cell("streaming", repeat=repeat) for repeat in range(3)]
    for cell, code in zip(cells, ("b", None, "a"), strict=True):
        run_folder.append(tmp_path, make_result(cell, sources_hash=code))
    run_folder.append(tmp_path, make_result(make_cell("baseline"), sources_hash="c"))
    assert run_folder.read(tmp_path).warnings == (
        "streaming: one row of the tables mixes repeats of different code",
    )


def test_a_run_without_a_record_is_discarded_and_others_are_kept(tmp_path: Path, run: Path) -> None:
    new = tmp_path / "new"
    run_folder.write_plan(new, [make_cell()])
    (new / "samples").mkdir()
    run_folder.discard_unmeasured(new)
    assert not new.exists()
    run_folder.write_plan(run, [make_cell()])
    run_folder.discard_unmeasured(run)
    assert (run / run_folder.PLAN).exists()
    run_folder.write_plan(new, [make_cell()])
    (new / "notes.txt").touch()
    run_folder.discard_unmeasured(new)
    assert [path.name for path in new.iterdir()] == ["notes.txt"]
    run_folder.discard_unmeasured(tmp_path / "none")


@pytest.mark.parametrize(
    ("code", "why", "repair"),
    [
        (13, "Permission denied", "change its permissions"),
        (21, "Is a directory", "put the file itself there"),
    ],
)
def test_an_unreadable_file_has_a_repair(
    run: Path, monkeypatch: pytest.MonkeyPatch, code: int, why: str, repair: str
) -> None:
    def fail(*_: object, **__: object) -> bytes:
        raise OSError(code, why)

    monkeypatch.setattr(run_folder, "read_bytes", fail)
    with pytest.raises(RecordError) as caught:
        run_folder.read(run)
    path = run / run_folder.RECORDS
    assert (
        str(caught.value)
        == f"cannot read {path}: {why}\n{repair}; to see what it is: ls -ld {path}"
    )


def test_a_cell_that_cannot_be_read_back_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="ram_limit_bytes"):
        run_folder.append(tmp_path, make_result(make_cell(ram_limit_bytes=2**63)))
    assert not (tmp_path / "records.jsonl").exists()
