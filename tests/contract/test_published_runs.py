"""What ``weighin report`` says of every published run: verdicts, survival, floors and all figures."""

import csv
import html
import json
import re
from pathlib import Path
from typing import Any

import outside
import pytest
from outside import RUNS, weighin
from snapshots import Compare

from weighin import results

FORMATS = "md,html,csv,bmf,gha"  # without pictures
EXPORTED = ("converting-files", "gpt2-medium-ranks", "gpt2-xl-8GiB", "gpt2-xl-notebook")
"""Runs whose exports are kept: a limit, ranks, a GPU, and commands. Others have the same columns."""


@pytest.fixture(scope="module", params=RUNS)
def reported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A published run whose report is written, with the report's JSON beside it."""
    folder = tmp_path_factory.mktemp("published")
    name = outside.published(request.param, folder)
    printed = weighin(folder, "report", name, "--format", FORMATS, "--json", "report.json")
    assert printed.code == 0
    assert not printed.err
    lines = [line.rstrip() for line in printed.out.splitlines()]
    (folder / "printed.txt").write_text("\n".join(lines) + "\n")
    return folder / name


def test_the_text_the_terminal_and_the_figures(reported: Path, same: Compare) -> None:
    same(f"reports/{reported.name}.md", (reported / "report.md").read_text())
    same(f"terminals/{reported.name}.txt", (reported.parent / "printed.txt").read_text())
    same(f"summaries/{reported.name}.csv", (reported / "summary.csv").read_text())


def test_the_tables_of_the_page_have_the_cells_of_the_text(reported: Path) -> None:
    page, text = ((reported / f"report.{kind}").read_text() for kind in ("html", "md"))
    rows = re.findall(r"^\| (?!---)(.*) \|$", text, re.MULTILINE)
    in_text = [[bare(cell) for cell in re.split(r"(?<!\\)\|", row)] for row in rows]
    tables = [part.partition("</table>")[0] for part in page.split("<table>")[1:]]
    own = "".join(one for one in tables if ">setting<" not in one)  # the page's own
    cells = (re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row, re.DOTALL) for row in own.split("<tr")[1:])
    assert [[bare(cell) for cell in row] for row in cells] == in_text


def test_the_json_has_the_figures_of_the_summary(reported: Path) -> None:
    document = json.loads((reported.parent / "report.json").read_text())
    with (reported / "summary.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert [as_csv(row) | {"missing_cells": ""} for row in document["series"]] == lines
    names = ("report.md", "report.html", "summary.csv", "bmf.json", "gha.json")
    assert document["files"] == [f"{reported.name}/{name}" for name in names]


def test_the_json_beside_the_figures(reported: Path, same: Compare) -> None:
    document = json.loads((reported.parent / "report.json").read_text())
    document["series"] = list(document["series"][0])
    same(f"verbs/report-{reported.name}.txt", outside.flat(document))


@pytest.mark.parametrize("name", EXPORTED)
@pytest.mark.parametrize("kind", ["bmf", "gha"])
def test_exports_for_dashboards(name: str, kind: str, tmp_path: Path, same: Compare) -> None:
    outside.published(name, tmp_path)
    assert weighin(tmp_path, "report", name, "--format", kind).code == 0
    content = json.loads((tmp_path / name / f"{kind}.json").read_text())
    same(f"exports/{name}.{kind}.txt", outside.flat(content))


def test_the_columns_of_the_data_frame(tmp_path: Path, same: Compare) -> None:
    name = outside.published("gpt2-xl-8GiB", tmp_path)
    table = results(tmp_path / name)
    kinds = {"object": "text", "str": "text", "string": "text"}
    columns = [f"{key}: {kinds.get(str(kind), kind)}" for key, kind in table.dtypes.items()]
    same("exports/frame.txt", f"{len(table)} rows\n" + "".join(f"{one}\n" for one in columns))


def bare(cell: str) -> str:
    """Return what a cell says, without spaces, signs, and marks of HTML or Markdown."""
    return re.sub(r"[^\w.+≥-]|- (?=\w)", "", html.unescape(re.sub(r"<[^>]+>", "", cell)))


def as_csv(row: dict[str, Any]) -> dict[str, str]:
    return {key: "" if value is None else str(value) for key, value in row.items()}
