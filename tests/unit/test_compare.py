"""``weighin compare``: runs beside each other, and what is said of each."""

from dataclasses import replace
from pathlib import Path

import pytest
from factories import SCRIPTS, make_cell, make_result
from test_check import run_of, typed
from test_evaluate import STREAMING, grown

from weighin.errors import ConfigError
from weighin.gate.compare import as_json, compare, compare_machines, write_markdown
from weighin.result import Outcome, Result
from weighin.units import GIB


def at(result: Result, commit: str, torch: str = "2.13.0") -> Result:
    return replace(result, environment=result.environment | {"git_commit": commit, "torch": torch})


@pytest.fixture(name="runs")
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two commits; in the second a tensor is kept, one cell is killed, and one is new."""
    monkeypatch.chdir(tmp_path)
    first, second = "a" * 40, "b" * 40
    baseline, sequential = make_cell("baseline"), make_cell("sequential")
    run_of(
        Path("main"),
        at(make_result(STREAMING), first),
        at(make_result(baseline, SCRIPTS["streaming"]), first),
    )
    run_of(
        Path("branch"),
        at(grown(), second, "2.14.0"),
        at(make_result(baseline), second, "2.14.0"),
        at(make_result(sequential, outcome=Outcome.TIMEOUT), second, "2.14.0"),
    )
    return [Path("main"), Path("branch")]


def test_the_whole_text(runs: list[Path]) -> None:
    code, text = typed("compare", *runs, "--metrics", "above_import,ready")
    assert code == 0
    assert [line.rstrip() for line in text.splitlines()] == [
        "A = main: commit aaaaaaaaaa, torch 2.13.0",
        "B = branch: commit bbbbbbbbbb, torch 2.14.0",
        "",
        " series      metric                A           B",
        " ───────────────────────────────────────────────",
        " streaming   above_import  6.450 GiB   6.770 GiB",
        "                                          +5.0 %",
        "             ready            7.30 s      7.30 s",
        "                                          +0.0 %",
        " baseline    outcome              ok  oom_killed",
        "             above_import  6.450 GiB           -",
        "             ready            7.30 s           -",
        " sequential  outcome               -     timeout",
        "",
        "all: gpt2-xl float32 cpu cold docker ram=8GiB",
        "2 figures compared with A: 1 larger and 0 smaller beyond noise",
    ]


def test_the_whole_markdown(runs: list[Path]) -> None:
    assert typed("compare", *runs, "--metrics", "anon", "--markdown", "sub/out.md")[0] == 0
    assert Path("sub/out.md").read_text() == (
        "- A = main: commit aaaaaaaaaa, torch 2.13.0\n"
        "- B = branch: commit bbbbbbbbbb, torch 2.14.0\n"
        "\n"
        "| series | metric | A | B |\n"
        "| --- | --- | ---: | ---: |\n"
        "| streaming | anon (sampled) | 6.550 GiB | 6.870 GiB **+327.7 MiB (+4.9 %)** |\n"
        "| baseline | outcome | ok | oom_killed |\n"
        "| baseline | anon (sampled) | 6.550 GiB | - |\n"
        "| sequential | outcome | - | timeout |\n"
        "\n"
        "All: gpt2-xl float32 cpu cold docker ram=8GiB\n"
        "\n"
        "1 figures compared with A: 1 larger and 0 smaller beyond noise\n"
    )


def test_what_is_one_thing_in_each_run_is_said_of_the_run(tmp_path: Path) -> None:
    other = replace(STREAMING, isolation="process")
    folders = [
        run_of(tmp_path / "a", make_result(STREAMING)),
        run_of(tmp_path / "b", make_result(other)),
    ]
    comparison = compare(folders)
    assert comparison.headings == (
        f"A = {folders[0]}: docker, torch 2.13.0",
        f"B = {folders[1]}: process, torch 2.13.0",
    )
    assert all(row.lines[0] for row in comparison.rows if row.what != "peak_cgroup")
    assert "process" not in write_markdown(comparison).partition("| series")[2]


def test_one_run_is_not_compared(runs: list[Path]) -> None:
    with pytest.raises(ConfigError) as caught:
        compare(runs[:1])
    assert str(caught.value) == (
        "cannot compare 1 run\nname two or more: weighin compare results/RUN_A results/RUN_B"
    )


def on(result: Result, cpu: str, node: str) -> Result:
    facts = {"cpu": cpu, "node": {"name": node, "id": node}}
    return replace(result, environment=result.environment | facts)


def test_a_run_of_two_kinds_of_machine_says_so_and_is_compared_by_machine(runs: list[Path]) -> None:
    baseline = make_cell("baseline")
    mixed = run_of(
        Path("fleet"),
        on(make_result(STREAMING), "EPYC", "a"),
        on(make_result(baseline, SCRIPTS["streaming"]), "EPYC", "b"),
        on(grown(), "Grace", "c"),
    )
    by_run = compare([mixed, runs[0]])
    assert by_run.warnings == (
        "the figures of fleet are from 2 kinds of machine:"
        " weighin compare fleet --by machine compares these",
    )
    code, text = typed("compare", "fleet", "--by", "machine", "--metrics", "above_import")
    assert code == 0
    lines = [line.rstrip() for line in text.splitlines()]
    first, second = lines[:2]
    assert first.startswith("A = machine ")
    assert " (a, b): " in first
    assert second.startswith("B = machine ")
    assert " (c): " in second
    assert second.endswith(", cpu: EPYC -> Grace")
    words = [line.split() for line in lines]
    assert ["streaming", "above_import", "6.450", "GiB", "6.770", "GiB"] in words


def test_machines_of_one_kind_cannot_be_compared(runs: list[Path]) -> None:
    with pytest.raises(ConfigError) as caught:
        compare_machines([runs[0]])
    assert str(caught.value) == (
        "cannot compare machines: the records come from 1 kind of machine\n"
        "name runs that were measured on two kinds of machine or more, or leave out --by machine"
    )


def test_a_comparison_as_json_has_every_figure(runs: list[Path]) -> None:
    found = as_json(compare(runs, ["above_import", "ready"]))
    assert found["runs"][0] == "A = main: commit aaaaaaaaaa, torch 2.13.0"
    assert found["common"] == "gpt2-xl float32 cpu cold docker ram=8GiB"
    assert (found["warnings"], len(found["rows"])) == ([], 6)
    first, _, outcome, lacking = found["rows"][:4]
    (compared,) = first.pop("compared")
    assert first == {
        "series": "streaming", "metric": "above_import", "texts": ["6.450 GiB", "6.770 GiB"],
    }  # fmt: skip
    assert (compared["unit"], compared["changed_beyond_noise"]) == ("bytes", True)
    assert compared["now"] - compared["before"] == pytest.approx(0.32 * GIB, rel=0.01)
    assert (outcome["texts"], outcome["compared"]) == (["ok", "oom_killed"], [None])
    assert (lacking["texts"][1], lacking["compared"]) == (None, [None])
    assert found["rows"][1]["compared"][0]["changed_beyond_noise"] is False


@pytest.mark.parametrize("count", [0, 1, 27])
def test_two_to_26_runs_can_be_compared(runs: list[Path], count: int) -> None:
    with pytest.raises(ConfigError, match=rf"cannot compare {count} run{'s' * (count != 1)}\n"):
        compare([runs[0]] * count)
    assert len(compare([runs[0]] * 26).headings) == 26
    assert len(compare([runs[0]] * 2).headings) == 2


def test_each_later_run_is_compared_with_the_first(runs: list[Path], tmp_path: Path) -> None:
    third = run_of(tmp_path / "third", make_result(make_cell("baseline"), SCRIPTS["streaming"]))
    comparison = compare([*runs, third], ["above_import"])
    texts = {(row.series, row.what): row.texts for row in comparison.rows}
    assert texts["streaming", "above_import"] == ("6.450 GiB", "6.770 GiB", None)
    assert texts["streaming", "outcome"] == ("ok", "ok", None)
    assert texts["baseline", "above_import"] == ("6.450 GiB", None, "6.450 GiB")
    (row,) = [
        one for one in comparison.rows if (one.series, one.what) == ("baseline", "above_import")
    ]
    assert row.lines[0] is None and row.lines[1] and row.lines[1].now == row.lines[1].was


def test_warnings_about_records_are_told_once(runs: list[Path]) -> None:
    with (runs[0] / "records.jsonl").open("a") as file:
        file.write('{"schema": 1, "ce')
    warnings = compare([runs[0], runs[0]]).warnings
    assert len(warnings) == 1
    assert "line 3 is incomplete" in warnings[0]
