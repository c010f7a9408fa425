"""A run's folder of somebody else: no link in it is followed, and no text in it commands a terminal."""

import json
import os
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from factories import ENVIRONMENT, make_cell, make_result
from typed_here import typed

from weighin.cell import Cell
from weighin.errors import RecordError
from weighin.files import write_text
from weighin.records import run_folder
from weighin.run.measure import Measured

EVIL = "\x1b]52;c;Y3Vyb\x07\x1b[2J\n::error::PWNED\n::stop-commands::zz\u202e"
READERS = (
    "report theirs", "report theirs --format md,csv", "check theirs --budget 'peak_rss <= 9 GiB' --all",
    "compare theirs theirs", "history .", "bench --resume theirs",
)  # fmt: skip


@pytest.fixture
def theirs(here: Path) -> Path:
    """A run with two series whose free texts differ, in the current folder."""
    folder = here / "theirs"
    cells = [
        make_cell(options={"x": EVIL}, environment={"OMP_NUM_THREADS": EVIL}),
        make_cell(options={"x": 1}),
    ]
    run_folder.write_plan(folder, cells)
    for number, cell in enumerate(cells):
        environment = ENVIRONMENT | {"settings": {"MALLOC_X": EVIL, EVIL: str(number)}, EVIL: "x"}
        result = make_result(cell, environment=environment)
        run_folder.append(folder, replace(result, warnings=(EVIL,)))
    return folder


def inert(text: str) -> bool:
    orders = [line for line in text.splitlines() if line.strip("│| ").startswith("::")]
    return not {"\x1b", "\x07", "\u202e"} & set(text) and not orders


@pytest.mark.parametrize("line", READERS)
def test_no_text_of_a_run_reaches_a_terminal_or_a_log_as_a_command(theirs: Path, line: str) -> None:
    assert inert(typed(line)[1])
    for kind in ("md", "html", "csv"):
        assert [path for path in theirs.glob(f"*.{kind}") if not inert(path.read_text())] == []


@pytest.mark.parametrize("verb", ["report", "run --resume"])
@pytest.mark.usefixtures("here")
def test_no_word_of_a_command_reaches_a_terminal_or_a_log_as_a_command(verb: str) -> None:
    cells = [Cell.of_command("mine", ("sh", "-c", EVIL, f"{n}"), "process") for n in range(2)]
    settings = {"commands": [{"name": "mine", "command": ["sh", EVIL]}], "cwd": EVIL}
    run_folder.write_plan(Path("theirs"), cells, settings)
    run_folder.append(Path("theirs"), make_result(cells[0]))
    assert inert(typed(f"{verb} theirs")[1])


def test_a_report_replaces_a_link_and_keeps_its_file(theirs: Path, tmp_path: Path) -> None:
    (mine := tmp_path / "mine").write_text("mine")
    for name in ("report.md", "report.html", "summary.csv", "peaks.png", "timeline.png"):
        (theirs / name).symlink_to(mine)
    typed("report theirs")
    assert mine.read_text() == "mine"
    assert (theirs / "summary.csv").read_text().startswith("strategy,")


def test_a_link_at_the_name_of_an_unfinished_file_is_not_written_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (mine := tmp_path / "mine").write_text("mine")
    names: list[Path] = []
    monkeypatch.setattr(os, "fsync", lambda _: names.extend(tmp_path.glob(".report.md.*")))
    write_text(tmp_path / "report.md", "one")
    names[0].symlink_to(mine)
    (tmp_path / f".report.md.{os.getpid()}.tmp").symlink_to(mine)
    write_text(tmp_path / "report.md", "two")
    assert (mine.read_text(), (tmp_path / "report.md").read_text()) == ("mine", "two")


@pytest.mark.parametrize("name", ["records.jsonl", "plan.json", "samples"])
def test_a_resumed_run_writes_through_no_link(theirs: Path, tmp_path: Path, name: str) -> None:
    (mine := tmp_path / "mine").mkdir()
    (mine / "photo").write_text("mine")
    records = (theirs / "records.jsonl").read_text()
    (theirs / "records.jsonl").write_text("".join(records.splitlines(keepends=True)[:1]))
    (theirs / name).unlink(missing_ok=True)
    (theirs / name).symlink_to(mine if name == "samples" else mine / "photo")
    refused = pytest.raises(RecordError, match="symbolic link")
    with refused if name == "records.jsonl" else nullcontext():
        run_folder.append(theirs, make_result(make_cell(options={"x": 1})))
    if name == "samples":
        sampled = make_result(make_cell(options={"x": 1}), samples_path="samples/a.csv")
        with pytest.raises(RecordError, match="symbolic link"):
            Measured(sampled).finish(theirs)
    assert [path.name for path in mine.iterdir()] == ["photo"]
    assert (mine / "photo").read_text() == "mine"


def test_samples_are_read_from_regular_files_of_the_run_alone(theirs: Path) -> None:
    (theirs / "samples").mkdir()
    (theirs / "samples" / "zero.csv").symlink_to("/dev/zero")
    assert run_folder.read_samples(theirs, "samples/zero.csv") == []
    (theirs / "samples" / "zero.csv").unlink()
    (theirs / "samples").rmdir()
    (theirs / "samples").symlink_to("/dev")
    assert run_folder.read_samples(theirs, "samples/zero") == []


def test_a_token_in_a_message_is_hidden(theirs: Path) -> None:
    token = "hf_" + "aB3" * 10
    result = make_result(make_cell("baseline"), message=f"401 for {token}", warnings=(token,))
    assert run_folder.append(theirs, result).message == "401 for hf_***"
    line = json.loads((theirs / "records.jsonl").read_text().splitlines()[-1])
    assert (line["message"], line["warnings"]) == ("401 for hf_***", ["hf_***"])
