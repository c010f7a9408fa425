"""A report has the same sections, in the terminal, as markdown and as a page."""

import io
import re
from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from factories import LIMIT, make_cell, make_result, mixed_run, notebook_run, saving_run
from rich.console import Console
from sweeps import a_sweep
from test_floors_report import a_search
from test_notebook import gpu_cell

from weighin.records import run_folder
from weighin.report.html_page import render
from weighin.report.sections import of, terminal_table
from weighin.report.writing import write_markdown
from weighin.result import Outcome, Result

PUBLISHED = sorted((Path(__file__).parents[2] / "results" / "published").glob("*/records.jsonl"))
DRAWN = {"Summary", "Peak memory", "Time over peak", "Memory over time", "Machine and software"}


class Headings(HTMLParser):
    """The texts of a page's headings of the second level."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.is_in = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag == "h2":
            self.is_in = True
            self.found.append("")

    def handle_endtag(self, tag: str) -> None:
        self.is_in = self.is_in and tag != "h2"

    def handle_data(self, data: str) -> None:
        if self.is_in:
            self.found[-1] += data


def in_terminal(results: Sequence[Result], warnings: Sequence[str]) -> list[str]:
    console = Console(width=200, file=io.StringIO(), force_terminal=True)
    console.print(terminal_table(results, warnings))
    assert isinstance(console.file, io.StringIO)
    lines = (re.fullmatch(r"\x1b\[1m(.*?)\x1b\[0m *", line) for line in
             console.file.getvalue().splitlines())  # fmt: skip
    return [line[1].strip() for line in lines if line]


def in_markdown(results: Sequence[Result], warnings: Sequence[str]) -> list[str]:
    file = io.StringIO()
    write_markdown(results, file, warnings=warnings)
    return re.findall(r"^## (.*)$", file.getvalue(), re.MULTILINE)


def in_page(results: Sequence[Result], warnings: Sequence[str], run: Path) -> list[str]:
    return [one for one in Headings(render(run, results, warnings)).found if one not in DRAWN]


def same_everywhere(results: Sequence[Result], run: Path, warnings: Sequence[str] = ()) -> set[str]:
    """Check that all three have the same sections; returns their headings."""
    shown = {one.heading for one in of(results, warnings)}
    told = [
        in_terminal(results, warnings),
        in_markdown(results, warnings),
        in_page(results, warnings, run),
    ]
    for headings in told:
        assert len(headings) == len(set(headings))
        assert set(headings) == shown
    return shown


@pytest.mark.parametrize("records", PUBLISHED, ids=lambda path: path.parent.name)
def test_the_sections_of_a_published_run_are_the_same_everywhere(records: Path) -> None:
    run = records.parent
    shown = same_everywhere(run_folder.read(run).results, run)
    assert {"All results", "How to read the figures"} <= shown
    assert ("RAM floors" in shown) == ("floors" in run.name)
    assert ("Survival" in shown) == ("survival" in run.name)


@pytest.mark.parametrize(
    "results",
    [mixed_run(), notebook_run(), saving_run(2), a_sweep(), a_search(), []],
    ids=["mixed", "one limit", "saves", "sweep", "floors", "empty"],
)
def test_the_sections_of_any_run_are_the_same_everywhere(
    results: list[Result], tmp_path: Path
) -> None:
    same_everywhere(results, tmp_path)


def test_warnings_and_a_full_gpu_are_told_everywhere(tmp_path: Path) -> None:
    cell = make_cell("meta_copy", device="cuda", vram_limit_bytes=LIMIT)
    refused = make_result(
        cell, outcome=Outcome.CUDA_OOM, message="CUDA out of memory.", allocator_summary="| Cur |"
    )
    warned = replace(gpu_cell("baseline", 12.832), warnings=("the disk was busy",))
    shown = same_everywhere([warned, refused], tmp_path, ["line 7 is incomplete"])
    assert {
        "Not ok",
        "meta_copy ran out of GPU memory: the allocator's summary",
        "Warnings",
    } <= shown
