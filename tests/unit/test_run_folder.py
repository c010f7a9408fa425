"""The run's folder: nothing that was measured is lost, nothing damaged passes for a record."""

import json
import math
import os
import re
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
from snapshots import Compare

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


LOCK = Lock()
OPTIONS: dict[str, tuple[object, object]] = {
    "a defaultdict": (defaultdict(list, a=[1]), {"a": [1]}),
    "a counter": (Counter("a"), {"a": 1}),
    "a module": (math, str(math)),
    "a lock": (LOCK, str(LOCK)),
    "a class, not an object of it": (Cell, str(Cell)),
}


def test_an_option_of_any_kind_is_stored(tmp_path: Path) -> None:
    options = {name: option for name, (option, _) in OPTIONS.items()}
    run_of(tmp_path, make_result(make_cell(options=options)))
    (result,) = run_folder.read(tmp_path).results
    assert result.cell.options == {name: stored for name, (_, stored) in OPTIONS.items()}


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
    before = (run / RECORDS).read_bytes()
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    assert refused(run_folder.append, run, AGAIN, kind=RecordError)
    assert (run / RECORDS).read_bytes() == before


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
    ("changes", "said"),
    [
        ({"options": {"rate": float("nan")}}, "cannot be written as JSON"),
        ({"ram_limit_bytes": 2**63}, "ram_limit_bytes"),  # it could not be read back
    ],
)
def test_a_figure_that_no_reader_takes_is_not_written(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    assert said in refused(run_folder.append, tmp_path, make_result(make_cell(**changes)))
    assert not (tmp_path / RECORDS).exists()


# What is read of a damaged run --------------------------------------------------------------------


def changed(line: str, **fields: object) -> str:
    return json.dumps(json.loads(line) | fields) + "\n"


DAMAGE: dict[str, Callable[[str, str, str], str]] = {
    "one byte of the last line": lambda one, two, last: one + two + last[:1],
    "40 bytes of the last line": lambda one, two, last: one + two + last[:40],
    "all but two bytes of the last line": lambda one, two, last: one + two + last[:-2],
    "a whole last line without its end": lambda one, two, last: one + two + last[:-1],
    "a key of a later version": lambda one, two, last: one + changed(two, added={"any": "thing"}) + last,
    "half a line in the middle": lambda one, two, last: f"{one}{two[:30]}\n{last}",
    "an unknown outcome": lambda one, two, last: one + changed(two, outcome="okay") + last,
    "twelve lines": lambda one, two, last: one + changed(two, outcome="okay") + last + 11 * '{"schema": 99}\n',
}  # fmt: skip
"""What is left of three lines."""


def test_what_is_read_of_a_damaged_run(run: Path, same: Compare) -> None:
    records = (*mixed_run()[:3], AGAIN)
    lines, texts = (run / RECORDS).read_text().splitlines(keepends=True), []

    def read(**options: bool) -> list[str]:
        found = run_folder.read(run, **options)
        numbers = [records.index(one) + 1 for one in found.results]
        return [f"results {numbers}", *found.warnings]

    for name, damage in DAMAGE.items():
        (run / RECORDS).write_text(damage(*lines))
        try:
            said = read()
            run_folder.append(run, AGAIN)
            said += ["after an append:", *read()]
        except RecordError as error:
            said = [*str(error).splitlines(), "past the damage:", *read(past_damage=True)]
        texts.append("\n  ".join([f"{name}:", *said]).replace(str(run), "RUN"))
    same("damaged_runs.txt", "\n".join(texts) + "\n")


def test_a_line_is_repaired_before_the_plan(run: Path) -> None:
    (run / PLAN).write_text("[]")
    assert PLAN in refused(run_folder.read, run)
    (run / RECORDS).write_text("{}\n")
    assert f"{RECORDS}, line 1: " in refused(run_folder.read, run)


@pytest.mark.parametrize(
    ("code", "why", "repair"),
    [(13, "Permission denied", "change its permissions"), (21, "Is a directory", "put a regular file there")],
)  # fmt: skip
def test_an_unreadable_file_has_a_repair(
    run: Path, monkeypatch: pytest.MonkeyPatch, code: int, why: str, repair: str
) -> None:
    monkeypatch.setattr(run_folder, "read_bytes", Mock(side_effect=OSError(code, why)))
    path = run / RECORDS
    assert refused(run_folder.read, run, kind=RecordError) == (
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


POSSIBLE: list[dict[str, Any]] = [
    {},
    {"rss_bytes": 0, "load_ns": 2**63 - 1, "minor_faults": 5},
    {"rss_bytes": None, "major_faults": "text"},
    {"repeat": -1, "code": 2**64},  # no amounts
    {"options": {"gap_ns": -1}, "kwargs": {"a_bytes": -1}, "environment": {"b_ns": -1}},
    {"phases": [{"start_ns": 5, "end_ns": 5}], "load_ns": 3, "ready_ns": 3},
    {"start_ns": 5, "end_ns": None, "load_ns": None, "ready_ns": 1},
    {"ranks": [1, None, "x", [{"rss_bytes": 1}]]},
]
IMPOSSIBLE: dict[str, dict[str, Any]] = {
    "rss_bytes: impossible value -1": {"rss_bytes": -1},
    f"load_ns: impossible value {2**63}": {"load_ns": 2**63},
    "minor_faults: impossible value -5": {"minor_faults": -5},
    "a.b.c_ns: impossible value -2": {"a": {"b": {"c_ns": -2}}},
    "ranks.1.rss_bytes: impossible value -1": {"ranks": [{"rss_bytes": 1}, {"rss_bytes": -1}]},
    "phases.0.end_ns: earlier than start_ns": {"phases": [{"start_ns": 5, "end_ns": 4}]},
    "ready_ns: less than load_ns": {"load_ns": 4, "ready_ns": 3},
    "b_ns: impossible value -1": {"options": {"a_ns": -1}, "b_ns": -1},
    "storage.settings.a_ns: impossible value -1": {"storage": {"settings": {"a_ns": -1}}},
    "then.a_ns: impossible value -1": {"first": {"a_ns": 1}, "then": {"a_ns": -1}},
}


def test_an_impossible_value_is_named_with_its_place() -> None:
    for record in POSSIBLE:
        checked(record)
    for complaint, record in IMPOSSIBLE.items():
        with pytest.raises(ValueError, match=f"^{re.escape(complaint)}"):
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
