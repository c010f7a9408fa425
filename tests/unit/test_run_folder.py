"""The run's folder: nothing that was measured is lost, nothing damaged passes for a record."""

import json
import math
import os
import resource
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any
from unittest.mock import Mock

import pytest
from factories import make_cell, make_result, mixed_run, refused, run_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ran_commands import make_command

from weighin.cell import Cell, ModelSpec
from weighin.errors import RecordError
from weighin.records import run_folder
from weighin.records.floor import Aim, Floor
from weighin.records.run_folder import PLAN, RECORDS, checked, parse
from weighin.result import SCHEMA, Outcome, Peaks, Result, Sample
from weighin.run.measure import Measured

FIXTURE = Path(__file__).parent / "fixtures" / "records-schema1.jsonl"
PUBLISHED = {
    path.parent.name: path
    for path in sorted(Path(__file__).parents[2].glob("results/published/*/records.jsonl"))
}
AGAIN = make_result(replace(make_result().cell, repeat=1))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return run_of(tmp_path / "run", *mixed_run()[:3])


def edit(run: Path, number: int, change: Callable[[str], str]) -> None:
    """Change a line of the records by hand, as a user with an editor would."""
    lines = (run / RECORDS).read_text().splitlines()
    lines[number - 1] = change(lines[number - 1])
    (run / RECORDS).write_text("\n".join(lines) + "\n")


def wrong_outcome(line: str) -> str:
    return json.dumps(json.loads(line) | {"outcome": "okay"})


# Written and read back ----------------------------------------------------------------------------

# Written text loses what UTF-8 cannot hold: surrogates are the subject of a test below. Reading
# replaces control characters, as another does.
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


def has_all_of(written: Any, read: Any) -> bool:
    """Tell whether every value is as it was read; an older weighin did not write all keys."""
    if isinstance(read, dict):
        return all(key in written and has_all_of(written[key], read[key]) for key in read)
    if isinstance(read, list):
        return len(written) == len(read) and all(map(has_all_of, written, read))
    return type(written) is type(read) and bool(written == read)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_record_is_read_and_written_as_it_is(name: str) -> None:
    for line in PUBLISHED[name].read_bytes().splitlines():
        result = parse(Result, line, name)
        written = run_folder._encode(result, name)
        assert has_all_of(json.loads(written), json.loads(line))
        assert parse(Result, written, name) == result


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


def test_records_of_schema_1_are_still_read(tmp_path: Path) -> None:
    shutil.copy(FIXTURE, tmp_path / RECORDS)
    found = run_folder.read(tmp_path).results
    # The files of samples are named after all of a cell, so that a new field renames those to come.
    paths = [one.samples_path for one in found]
    assert list(found) == [
        replace(one, samples_path=path) for one, path in zip(mixed_run(), paths, strict=True)
    ]


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
    run_of(tmp_path, make_result(make_cell(options={"any": option})))
    (result,) = run_folder.read(tmp_path).results
    assert result.cell.options["any"] == stored


def test_bytes_that_are_no_utf8_do_not_lose_the_record(tmp_path: Path) -> None:
    run_of(tmp_path, make_result(message=b"no file x\xff".decode("utf-8", "surrogateescape")))
    assert run_folder.read(tmp_path).results[0].message == "no file x?"


def test_the_plan_comes_back_and_leaves_no_other_file(tmp_path: Path) -> None:
    cells = (make_cell("baseline"), make_cell("streaming", repeat=1))
    run_folder.write_plan(tmp_path, cells, {"timeout_s": 60.0})
    run_folder.write_plan(tmp_path, cells, {"timeout_s": 90.0})
    assert run_folder.read_plan(tmp_path) == run_folder.Plan(SCHEMA, cells, {"timeout_s": 90.0})
    assert [path.name for path in tmp_path.iterdir()] == [PLAN]
    assert run_folder.read(tmp_path).results == ()


def test_pending_compares_whole_cells(tmp_path: Path) -> None:
    cells = [
        make_cell("streaming"),
        make_cell("streaming", repeat=1),
        make_cell("streaming", options={"chunks": (1, 2)}),
        make_cell("streaming", model=ModelSpec("gpt2-xl", "m:f", {"n_layer": 2})),
    ]
    run_of(tmp_path, make_result(cells[0]), make_result(cells[2]))
    assert run_folder.pending(cells, run_folder.read(tmp_path).results) == [cells[1], cells[3]]


def test_repeats_of_other_code_are_told(tmp_path: Path) -> None:
    for n, code in enumerate(("b", None, "a")):
        run_of(tmp_path, make_result(make_cell("streaming", repeat=n), sources_hash=code))
    run_of(tmp_path, make_result(make_cell("baseline"), sources_hash="c"))
    assert run_folder.read(tmp_path).warnings == (
        "streaming: one row of the tables mixes repeats of different code",
    )


# What cannot be written ---------------------------------------------------------------------------


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size: EFBIG, where a full disk says ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_record_that_finds_no_room_leaves_no_half_of_it(run: Path) -> None:
    before = (run / RECORDS).read_bytes()
    with files_of_at_most(len(before) + 100):
        said = refused(run_folder.append, run, AGAIN)
    assert (run / RECORDS).read_bytes() == before
    assert said.startswith(
        f"cannot write {run / RECORDS}: File too large; the measurement of {AGAIN.cell.id} is lost\n"
    )
    assert "--out FOLDER" in said


def test_a_record_that_cannot_be_synced_is_taken_back(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = Mock(side_effect=OSError(28, "No space left on device"))
    before = (run / RECORDS).read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        assert refused(run_folder.append, run, AGAIN)
    assert (run / RECORDS).read_bytes() == before
    run_folder.append(run, AGAIN)
    assert run_folder.read(run).results == (*mixed_run()[:3], AGAIN)


def test_samples_that_find_no_room_are_told_and_leave_nothing(tmp_path: Path) -> None:
    (tmp_path / "samples").mkdir()
    measured = Measured(make_result(samples_path="samples/x.csv"), [Sample(*range(8))] * 1000)
    with files_of_at_most(1000):
        said = refused(measured.finish, tmp_path)
    assert said.startswith(
        f"cannot write {tmp_path}/samples/x.csv: File too large; the record of its cell is kept"
    )
    assert list((tmp_path / "samples").iterdir()) == []


@pytest.mark.parametrize(
    ("cell", "said"),
    [
        (make_cell(options={"rate": float("nan")}), "cannot be written as JSON"),
        (make_cell(ram_limit_bytes=2**63), "ram_limit_bytes"),  # it could not be read back
    ],
    ids=["not a number", "too large"],
)
def test_a_figure_that_no_reader_takes_is_not_written(
    tmp_path: Path, cell: Cell, said: str
) -> None:
    assert said in refused(run_folder.append, tmp_path, make_result(cell))
    assert not (tmp_path / RECORDS).exists()


# What is read of a damaged run --------------------------------------------------------------------


@pytest.mark.parametrize("kept", [1, 40, -2])
def test_a_torn_last_line_is_a_warning_and_is_cut_by_the_next_append(run: Path, kept: int) -> None:
    path = run / RECORDS
    *whole, last = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(whole) + last[:kept])
    records = run_folder.read(run)
    assert records.results == tuple(mixed_run()[:2])
    (warning,) = records.warnings
    assert warning.startswith(f"{path}, line 3 is incomplete, because the run was killed")
    assert warning.endswith(f"weighin bench --resume {run} repeats it")
    run_folder.append(run, AGAIN)
    assert run_folder.read(run) == run_folder.Records((*mixed_run()[:2], AGAIN))


def test_a_whole_last_line_without_newline_and_unknown_keys_are_read(run: Path) -> None:
    edit(run, 1, lambda line: json.dumps(json.loads(line) | {"added_later": {"any": "thing"}}))
    (run / RECORDS).write_bytes((run / RECORDS).read_bytes().rstrip())
    assert run_folder.read(run) == run_folder.Records(tuple(mixed_run()[:3]))
    run_folder.append(run, AGAIN)
    assert run_folder.read(run).results == (*mixed_run()[:3], AGAIN)


def test_a_bad_line_in_the_middle_is_named_with_its_repair(run: Path) -> None:
    edit(run, 2, lambda line: line[:30])
    message, repair = refused(run_folder.read, run).split("\n")
    path = run / RECORDS
    assert message.startswith(f"{path}, line 2: not JSON: ")
    assert repair == (
        f"delete the line and repeat its measurement: sed -i 2d {path} && weighin bench --resume {run}"
    )
    (run / PLAN).write_text("[]")  # its repair comes after that of a line
    assert "line 2: " in refused(run_folder.read, run)


def test_what_is_whole_is_read_beside_the_damage(run: Path) -> None:
    edit(run, 2, wrong_outcome)
    records = run_folder.read(run, past_damage=True)
    assert records.results == (mixed_run()[0], mixed_run()[2])
    assert isinstance(records.damage, RecordError)
    assert records.warnings == (f"{records.damage.message}: this line is left out",)
    with (run / RECORDS).open("a") as file:
        file.writelines('{"schema": 99}\n' for _ in range(11))
    records = run_folder.read(run, past_damage=True)
    assert len(records.results) == 2
    assert records.damage
    assert records.warnings == (f"{records.damage.message}: this line is left out, and 11 more",)


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
    monkeypatch.setattr(run_folder, "read_bytes", Mock(side_effect=OSError(code, why)))
    path = run / RECORDS
    assert refused(run_folder.read, run) == (
        f"cannot read {path}: {why}\n{repair}; to see what it is: ls -ld {path}"
    )


def test_only_a_folder_in_which_nothing_was_measured_is_discarded(
    tmp_path: Path, run: Path
) -> None:
    new, noted = tmp_path / "new", tmp_path / "noted"
    for folder in (new, noted, run):
        run_folder.write_plan(folder, [make_cell()])
    (new / "samples").mkdir()
    (noted / "notes.txt").touch()
    for folder in (new, noted, run, tmp_path / "none"):
        run_folder.discard_unmeasured(folder)
    assert not new.exists()
    assert [path.name for path in noted.iterdir()] == ["notes.txt"]
    assert (run / PLAN).exists()


# Values that no measurement can have ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({}, ""),
        ({"rss_bytes": 0, "load_ns": 2**63 - 1, "minor_faults": 5}, ""),
        ({"rss_bytes": None, "major_faults": "text"}, ""),
        ({"repeat": -1, "code": 2**64}, ""),  # no amounts
        ({"options": {"gap_ns": -1}, "kwargs": {"a_bytes": -1}, "environment": {"b_ns": -1}}, ""),
        ({"phases": [{"start_ns": 5, "end_ns": 5}], "load_ns": 3, "ready_ns": 3}, ""),
        ({"start_ns": 5, "end_ns": None, "load_ns": None, "ready_ns": 1}, ""),
        ({"ranks": [1, None, "x", [{"rss_bytes": 1}]]}, ""),
        ({"rss_bytes": -1}, "rss_bytes: impossible value -1"),
        ({"load_ns": 2**63}, f"load_ns: impossible value {2**63}"),
        ({"minor_faults": -5}, "minor_faults: impossible value -5"),
        ({"a": {"b": {"c_ns": -2}}}, "a.b.c_ns: impossible value -2"),
        ({"ranks": [{"rss_bytes": 1}, {"rss_bytes": -1}]}, "ranks.1.rss_bytes: impossible value -1"),
        ({"phases": [{"start_ns": 5, "end_ns": 4}]}, "phases.0.end_ns: earlier than start_ns"),
        ({"load_ns": 4, "ready_ns": 3}, "ready_ns: less than load_ns"),
        ({"options": {"a_ns": -1}, "b_ns": -1}, "b_ns: impossible value -1"),
        ({"storage": {"settings": {"a_ns": -1}}}, "storage.settings.a_ns: impossible value -1"),
        ({"first": {"a_ns": 1}, "then": {"a_ns": -1}}, "then.a_ns: impossible value -1"),
    ],
)  # fmt: skip
def test_an_impossible_value_is_named_with_its_place(
    record: dict[str, Any], complaint: str
) -> None:
    if complaint:
        with pytest.raises(ValueError) as caught:
            checked(record)
        assert complaint in str(caught.value)
    else:
        checked(record)


def test_texts_keep_their_lines_and_lose_their_control_characters() -> None:
    record = {
        "message": "a\x1b[31m\n\tb",
        "warnings": ["x\x00", 5, None, True],
        "cell": {"strategy": "s\x07", "options": {"text": "o\x07"}, "settings": "s\x07"},
    }
    assert checked(record) == {
        "message": "a?[31m\n\tb",
        "warnings": ["x?", 5, None, True],
        "cell": {"strategy": "s?", "options": {"text": "o\x07"}, "settings": "s?"},
    }
