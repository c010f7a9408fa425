"""``weighin compare``: runs beside each other, and what is said of each."""

from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from factories import SCRIPTS, make_cell, make_result
from rich.console import Console
from test_check import run_of, typed
from test_evaluate import STREAMING, grown

from weighin.errors import ConfigError
from weighin.gate.compare import (
    ComparedMetric,
    Comparison,
    as_json,
    compare,
    compare_machines,
    terminal,
    write_markdown,
)
from weighin.gate.lines import Line, LineVerdict
from weighin.records import run_folder
from weighin.records.metrics import METRICS
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
        "2 figures compared with A: 1 larger and 0 smaller beyond noise; 1 measurement no",
        "longer ok",
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
        "1 figures compared with A: 1 larger and 0 smaller beyond noise; 1 measurement no longer ok\n"
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
        "cannot compare 1 run\nname two or more folders of runs: weighin compare results/RUN_A results/RUN_B"
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


def shown(comparison: Comparison, width: int) -> list[str]:
    file = StringIO()
    Console(file=file, width=width).print(terminal(comparison))
    return file.getvalue().splitlines()


def test_a_narrow_terminal_folds_the_series_and_no_figure(tmp_path: Path) -> None:
    cells = [make_cell("a_strategy_with_a_long_name"), make_cell("b")]
    results = [make_result(cell, SCRIPTS["streaming"]) for cell in cells]
    folders = [run_of(tmp_path / name, *results) for name in ("a", "b")]
    lines = shown(compare(folders, ["above_import"]), 50)
    text = "\n".join(lines)
    assert text.count("above_import") == 2
    assert text.count("6.450 GiB") == 4
    names = [line.split()[0] for line in lines if line[:1] == " " != line[1:2]]
    assert "a_strategy_with_a_long_name" in "".join(names)  # folded, and no letter of it is lost


def test_a_figure_that_was_nothing_has_no_share() -> None:
    metric = METRICS["peak_rss"]
    rows = [
        ComparedMetric(
            "s", "peak_rss", ("0 B", "5 B"),
            (Line(LineVerdict.REGRESSED, "s", "peak_rss", metric=metric, was=was, now=5),),
        )
        for was in (0, 4)
    ]  # fmt: skip
    found = shown(Comparison(("A = a", "B = b"), tuple(rows), ""), 80)
    assert [line.strip() for line in found if "%" in line] == ["+25.0 %"]
    assert found[-1].startswith("2 figures compared with A: 2 larger and 0 smaller")
    assert not any(line.startswith("all:") for line in found)


def test_figures_that_shrank_beyond_noise_are_counted_and_bold(tmp_path: Path) -> None:
    folders = [
        run_of(tmp_path / "a", grown()),
        run_of(tmp_path / "b", make_result(STREAMING)),
    ]
    comparison = compare(folders, ["above_import", "ready"])
    text = write_markdown(comparison)
    assert "0 larger and 1 smaller" in text.splitlines()[-1]
    [line] = [line for line in text.splitlines() if "above_import" in line]
    assert line.endswith("(-4.7 %)** |")
    [line] = [line for line in text.splitlines() if "| ready |" in line]
    assert "**" not in line


def test_a_run_that_is_not_complete_says_so_in_its_heading(tmp_path: Path) -> None:
    run_folder.write_plan(tmp_path / "part", [STREAMING, make_cell("baseline")])
    part = run_of(tmp_path / "part", make_result(STREAMING))
    whole = run_of(tmp_path / "whole", make_result(STREAMING))
    headings = compare([part, whole]).headings
    assert "1 of 2 cells measured" in headings[0]
    assert "cells measured" not in headings[1]


def test_words_that_differ_in_one_run_are_no_words_of_the_run(tmp_path: Path) -> None:
    process = replace(STREAMING, isolation="process")
    other = replace(make_cell("baseline"), isolation="docker")
    first = run_of(tmp_path / "a", make_result(STREAMING), make_result(other, SCRIPTS["streaming"]))
    second = run_of(tmp_path / "b", make_result(process), make_result(other, SCRIPTS["streaming"]))
    comparison = compare([first, second], ["above_import"])
    assert not any("docker" in heading or "process" in heading for heading in comparison.headings)
    texts = {row.series: row.texts for row in comparison.rows if row.what == "above_import"}
    assert sorted(one.count(None) for one in texts.values()) == [0, 1, 1]


def test_settings_that_changed_are_in_the_heading_of_the_later_run(tmp_path: Path) -> None:
    was = make_result(STREAMING)
    now = replace(was, environment=was.environment | {"kernel": "6.19.0", "torch": "3"})
    comparison = compare([run_of(tmp_path / "a", was), run_of(tmp_path / "b", now)])
    first, second = comparison.headings
    assert "kernel" not in first
    assert f"kernel: {was.environment['kernel']} -> 6.19.0" in second
    assert second.count("torch") == 1
