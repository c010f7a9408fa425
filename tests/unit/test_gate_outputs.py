"""A judgement as a reader sees it: whole texts, kept in snapshots/gate, for every kind of output."""

import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from xml.etree import ElementTree as ET

import pytest
from factories import SCRIPTS, make_cell, make_result
from rich.console import Console
from snapshots import Compare
from test_evaluate import STREAMING, grown, judged

from weighin.gate import tables
from weighin.gate.check import GateResult, evaluate
from weighin.gate.rules import Rules
from weighin.records.run_folder import Records
from weighin.records.series import summarise
from weighin.result import Outcome, Phase


def mixed() -> GateResult:
    """A tensor kept, a cell killed, one wrong, one gone, one new, one better, another kernel, a budget.

    One is killed and one is ok where that is expected, and where a time-out is.
    """
    was = [
        make_result(STREAMING),
        make_result(make_cell("mmap_assign")),
        make_result(make_cell("per_param", format="per_param")),
        make_result(make_cell("baseline"), SCRIPTS["streaming"]),
        grown(make_cell("per_module", format="per_module")),
        make_result(make_cell("meta_copy")),
        make_result(make_cell("lossy"), outcome=Outcome.WRONG_WEIGHTS),
    ]
    now = [
        grown(since=2),
        make_result(make_cell("mmap_assign")),
        make_result(make_cell("sequential")),
        make_result(make_cell("baseline")),
        make_result(make_cell("per_module", format="per_module"), SCRIPTS["streaming"]),
        make_result(make_cell("meta_copy")),
        make_result(make_cell("lossy"), outcome=Outcome.WRONG_WEIGHTS, message="1 tensor differs"),
    ]
    now = [replace(one, environment=one.environment | {"kernel": "6.19.0"}) for one in now]
    budget, expected = "above_import <= 1.04 x model", "meta_copy=oom_killed,mmap_assign=timeout"
    return judged(was, now, Rules().typed([budget], [expected]))


def unchanged() -> GateResult:
    return judged([make_result(STREAMING)], [make_result(STREAMING)])


def kept() -> GateResult:
    """Two budgets that hold, without a baseline."""
    cells = [STREAMING, make_cell("mmap_assign")]
    rules = Rules().typed(["peak_rss <= 1.2 x model"])
    series = summarise([Records([make_result(cell) for cell in cells])])
    return evaluate(None, rules, {}, series)


def terminal(judgement: GateResult, *, whole: bool = False) -> str:
    file = StringIO()
    Console(file=file, width=80).print(*tables.terminal(judgement, whole=whole))
    return file.getvalue()


def as_json(judgement: GateResult) -> str:
    return json.dumps(tables.as_json(judgement), indent=1) + "\n"


def annotations(judgement: GateResult) -> str:
    return "".join(f"{line}\n" for line in tables.annotations(judgement, "ci/base line,1.yaml"))


FORMS: dict[str, Callable[[], str]] = {
    "mixed.txt": lambda: terminal(mixed()),
    "mixed-all.txt": lambda: terminal(mixed(), whole=True),
    "mixed.md": lambda: tables.write_markdown(mixed()),
    "unchanged-all.md": lambda: tables.write_markdown(unchanged(), whole=True),
    "mixed.xml": lambda: tables.junit(mixed()),
    "mixed.json": lambda: as_json(mixed()),
    "mixed-annotations.txt": lambda: annotations(mixed()),
    "kept.txt": lambda: terminal(kept(), whole=True),
    "kept.md": lambda: tables.write_markdown(kept()),
    "kept.json": lambda: as_json(kept()),
    "unchanged.txt": lambda: terminal(unchanged()),
    "unchanged.md": lambda: tables.write_markdown(unchanged()),
}


@pytest.mark.parametrize("name", FORMS)
def test_the_whole_text(name: str, same: Compare) -> None:
    same(f"gate/{name}", FORMS[name]())


def test_names_from_elsewhere_cannot_break_any_output() -> None:
    evil = "<script>|\x1b[31m\n::error::\udc80]]>&"
    script = grown(since=2)
    phases: list[Phase] = [
        replace(one, name=evil) if one.name == "stream" else one for one in script.phases
    ]
    cell = make_cell(evil, format="safetensors")
    judgement = judged([make_result(cell, SCRIPTS["streaming"])], [replace(script, cell=cell, phases=tuple(phases))])  # fmt: skip
    assert judgement.failed
    text = tables.junit(judgement)
    ET.fromstring(text.encode())
    assert all(line.startswith("::") for line in annotations(judgement).splitlines())
    assert annotations(judgement).count("\n") == len(list(tables.annotations(judgement)))
    markdown = tables.write_markdown(judgement)
    outside = markdown.split("```")[0::2]  # in a code block nothing is interpreted
    assert not any("<script>" in part or "\x1b" in part for part in outside)
    markdown.encode()
    assert "\x1b" not in terminal(judgement)
