"""``weighin compare``: runs beside each other, and what is said of each."""

from dataclasses import replace
from pathlib import Path

import pytest
from factories import SCRIPTS, make_cell, make_result, run_of
from test_check import typed
from test_evaluate import STREAMING, grown, search

from weighin.errors import ConfigError
from weighin.gate.compare import compare, history
from weighin.records import run_folder
from weighin.result import Outcome, Result
from weighin.show.table import markdown
from weighin.units import MIB


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
    code, text = typed("compare", *runs, "--metrics", "above_import,ready", COLUMNS="80")
    assert code == 0
    assert [line.rstrip() for line in text.splitlines()] == [
        "A = main: commit aaaaaaaaaa, torch 2.13.0",
        "B = branch: commit bbbbbbbbbb, torch 2.14.0",
        "",
        " series      metric                A           B",
        " ───────────────────────────────────────────────",
        " streaming   above_import  6.450 GiB   6.770 GiB",
        "                                          +5.0 %",
        " streaming   ready            7.30 s      7.30 s",
        "                                          +0.0 %",
        " baseline    outcome              ok  oom_killed",
        " baseline    above_import  6.450 GiB           -",
        " baseline    ready            7.30 s           -",
        " sequential  outcome               -     timeout",
        "",
        "all: gpt2-xl float32 cpu cold docker ram=8GiB",
        "2 figures compared with A: 1 larger and 0 smaller beyond noise; 1 measurement no",
        "longer ok",
    ]


def test_what_is_one_thing_in_each_run_is_said_of_the_run(tmp_path: Path) -> None:
    other = replace(STREAMING, isolation="process")
    folders = [
        run_of(tmp_path / "a", make_result(STREAMING)),
        run_of(tmp_path / "b", make_result(other)),
    ]
    comparison = compare(folders)
    assert comparison.json["runs"] == [
        f"A = {folders[0]}: docker, torch 2.13.0",
        f"B = {folders[1]}: process, torch 2.13.0",
    ]
    assert all(
        row["compared"][0] for row in comparison.json["rows"] if row["metric"] != "peak_cgroup"
    )
    assert "process" not in markdown(comparison.document).partition("| series")[2]


def on(result: Result, cpu: str, node: str) -> Result:
    facts = {"cpu": cpu, "node": {"name": node, "id": node}}
    return replace(result, environment=result.environment | facts)


def test_a_run_of_two_kinds_of_machine_is_compared_by_machine(runs: list[Path]) -> None:
    baseline = make_cell("baseline")
    run_of(
        Path("fleet"),
        on(make_result(STREAMING), "EPYC", "a"),
        on(make_result(baseline, SCRIPTS["streaming"]), "EPYC", "b"),
        on(grown(), "Grace", "c"),
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


@pytest.mark.parametrize("count", [0, 1, 27])
def test_two_to_26_runs_can_be_compared(runs: list[Path], count: int) -> None:
    with pytest.raises(ConfigError, match=rf"cannot compare {count} run{'s' * (count != 1)}\n"):
        compare([runs[0]] * count)
    assert len(compare([runs[0]] * 26).json["runs"]) == 26
    assert len(compare([runs[0]] * 2).json["runs"]) == 2


def test_each_later_run_is_compared_with_the_first(runs: list[Path], tmp_path: Path) -> None:
    third = run_of(tmp_path / "third", make_result(make_cell("baseline"), SCRIPTS["streaming"]))
    comparison = compare([*runs, third], ["above_import"])
    texts = {(row["series"], row["metric"]): row["texts"] for row in comparison.json["rows"]}
    assert texts["streaming", "above_import"] == ["6.450 GiB", "6.770 GiB", None]
    assert texts["streaming", "outcome"] == ["ok", "ok", None]
    assert texts["baseline", "above_import"] == ["6.450 GiB", None, "6.450 GiB"]
    (row,) = [
        one
        for one in comparison.json["rows"]
        if (one["series"], one["metric"]) == ("baseline", "above_import")
    ]
    first, second = row["compared"]
    assert first is None and second["now"] == second["before"]


def test_figures_that_shrank_beyond_noise_are_counted_and_marked(tmp_path: Path) -> None:
    folders = [
        run_of(tmp_path / "a", grown()),
        run_of(tmp_path / "b", make_result(STREAMING)),
    ]
    comparison = compare(folders, ["above_import", "ready"])
    text = markdown(comparison.document)
    assert "0 larger and 1 smaller" in text.splitlines()[-1]
    [line] = [line for line in text.splitlines() if "above_import" in line]
    assert line.endswith("| ✅ 6.450 GiB (-4.7 %) |")
    [line] = [line for line in text.splitlines() if "| ready |" in line]
    assert "✅" not in line


def test_a_run_that_is_not_complete_says_so_in_its_heading(tmp_path: Path) -> None:
    run_folder.write_plan(tmp_path / "part", [STREAMING, make_cell("baseline")])
    part = run_of(tmp_path / "part", make_result(STREAMING))
    whole = run_of(tmp_path / "whole", make_result(STREAMING))
    headings = compare([part, whole]).json["runs"]
    assert "1 of 2 cells measured" in headings[0]
    assert "cells measured" not in headings[1]


def test_settings_that_changed_are_in_the_heading_of_the_later_run(tmp_path: Path) -> None:
    was = make_result(STREAMING)
    now = replace(was, environment=was.environment | {"kernel": "6.19.0", "torch": "3"})
    comparison = compare([run_of(tmp_path / "a", was), run_of(tmp_path / "b", now)])
    first, second = comparison.json["runs"]
    assert "kernel" not in first
    assert f"kernel: {was.environment['kernel']} -> 6.19.0" in second
    assert second.count("torch") == 1


def test_records_are_compared_by_any_setting_whatever_run_they_are_of(runs: list[Path]) -> None:
    more = run_of(Path("more"), at(grown(), "c" * 40, "2.14.0"))
    comparison = compare([*runs, more], ["above_import"], by="torch")
    assert [one.partition(":")[0] for one in comparison.json["runs"]] == [
        "A = torch 2.13.0",
        "B = torch 2.14.0",
    ]
    headings = compare([*runs, more], by="commit").json["runs"]
    assert [one.partition(":")[0] for one in headings] == [
        f"{letter} = commit {name * 10}" for letter, name in zip("ABC", "abc", strict=True)
    ]


@pytest.mark.parametrize(
    ("by", "found"),
    [("machine", "1 of it: machine "), ("kernel", "1 of it: kernel 6.18.0\n")],
)
def test_what_does_not_differ_cannot_be_compared(runs: list[Path], by: str, found: str) -> None:
    code, text = typed("compare", *runs, "--by", by)
    assert code == 2
    assert text.startswith(f"cannot compare by {by}: the records have {found}")
    assert text.endswith(f"name runs of which it differs, or leave out --by {by}")


def test_a_setting_that_no_record_has_is_suggested_by_its_name(runs: list[Path]) -> None:
    code, text = typed("compare", *runs, "--by", "torhc")
    assert (code, text.splitlines()[0]) == (2, "no setting is called 'torhc'")
    assert "did you mean 'torch'?" in text


def test_the_floor_of_a_search_over_time(tmp_path: Path) -> None:
    for name, floor_mib in (("a", 6800), ("b", 7100)):
        found = search(floor_mib).results
        run_folder.write_plan(tmp_path / name, [found[0].cell], {"within": 0.01})
        run_of(tmp_path / name, *found)
    (series,) = history(tmp_path, "floor").json["series"]
    assert [one["median"] for one in series["points"]] == [6800 * MIB, 7100 * MIB]
    assert [one["before"] for one in series["steps"]] == [6800 * MIB]
