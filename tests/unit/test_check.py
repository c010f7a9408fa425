"""``weighin check`` as it is typed: exit codes, what is written, and errors in two lines."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from factories import make_cell, make_result
from test_evaluate import STREAMING, grown

from weighin.cli import app
from weighin.errors import HarnessError
from weighin.gate import check
from weighin.records import run_folder
from weighin.result import Outcome, Result


def run_of(folder: Path, *results: Result) -> Path:
    for result in results:
        run_folder.append(folder, result)
    return folder


def typed(*arguments: object, **variables: str) -> tuple[int, str]:
    """The exit code and what is shown; of an error that is ours, its exit code and its text."""
    environment = {"COLUMNS": "80", "NO_COLOR": "1"} | variables
    result = CliRunner().invoke(app.app, [str(one) for one in arguments], env=environment)
    if isinstance(result.exception, HarnessError):
        return result.exception.exit_code, str(result.exception)
    return result.exit_code, re.sub(r"\x1b\[[0-9;]*m", "", result.output)


@pytest.fixture(name="good")
def _good(tmp_path: Path) -> Path:
    return run_of(tmp_path / "good", make_result(STREAMING))


@pytest.fixture(name="bad")
def _bad(tmp_path: Path) -> Path:
    return run_of(tmp_path / "bad", grown())


@pytest.fixture(name="baseline")
def _baseline(tmp_path: Path, good: Path) -> Path:
    path = tmp_path / "baseline.yaml"
    code, text = typed("check", good, "--baseline", path, "--update")
    assert code == 0
    assert f"+++ {path}" in text.splitlines()[1]
    assert text.splitlines()[-1] == "gate passed: 8 same"
    return path


def test_a_run_as_it_was_exits_with_0(good: Path, baseline: Path) -> None:
    code, text = typed("check", good, "--baseline", baseline)
    assert code == 0
    assert text.splitlines()[-1] == "gate passed: 8 same"


def test_a_regression_exits_with_1_and_says_how_to_accept_it(bad: Path, baseline: Path) -> None:
    code, text = typed("check", bad, "--baseline", baseline)
    assert code == 1
    assert text.splitlines()[-2:] == [
        "gate failed: 5 regressed, 3 same",
        "note: if the change is intended, accept it with --update, and commit the baseline file",
    ]


def test_an_update_shows_the_difference_and_the_next_check_passes(
    bad: Path, baseline: Path
) -> None:
    code, text = typed("check", bad, "--baseline", baseline, "--update")
    assert code == 0
    assert re.search(r"^-        peak_rss: 7248\d+  # 6.750 GiB$", text, re.MULTILINE)
    assert re.search(r"^\+        peak_rss: 7591\d+  # 7.070 GiB$", text, re.MULTILINE)
    assert typed("check", bad, "--baseline", baseline)[0] == 0
    assert f"{baseline} is up to date" in typed("check", bad, "--baseline", baseline, "--update")[1]


def test_only_the_metrics_that_were_asked_for(bad: Path, baseline: Path) -> None:
    code, text = typed("check", bad, "--baseline", baseline, "--metrics", "load, ready")
    assert code == 0
    assert text.splitlines()[-1] == "gate passed: 3 same"


def test_a_budget_needs_no_baseline(bad: Path) -> None:
    assert typed("check", bad, "--budget", "peak_rss <= 1.2 x model")[0] == 0
    code, text = typed("check", bad, "--budget", "peak_rss <= 1.1 x model")
    assert code == 1
    assert text.splitlines()[-1] == "gate failed: 1 over budget"


def test_several_runs_count_as_one_with_more_repeats(good: Path, bad: Path, tmp_path: Path) -> None:
    measured = check.read_runs([good, bad, good])
    [series] = measured.series.values()
    assert series.repeats == 3
    figure = series.figures["peak_rss"]
    assert figure.low == figure.median < figure.high


def test_every_output_at_once(bad: Path, baseline: Path, tmp_path: Path) -> None:
    files = [tmp_path / "out" / name for name in ("check.md", "check.xml", "check.json")]
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    code, text = typed(
        "check", bad, "--baseline", baseline, "--github",
        "--markdown", files[0], "--junit", files[1], "--json", files[2],
        GITHUB_STEP_SUMMARY=str(summary),
    )  # fmt: skip
    assert code == 1
    assert text.count(f"::error file={baseline},title=regressed%3A gpt2-xl streaming") == 5
    assert [path.read_text()[:15] for path in files] == [
        "## ❌ weighin ch",
        "<?xml version='",
        '{\n "schema": 1,',
    ]
    assert summary.read_text() == "before\n" + files[0].read_text()


def test_a_record_that_was_torn_is_said(good: Path, baseline: Path) -> None:
    with (good / "records.jsonl").open("a") as file:
        file.write('{"torn')
    code, text = typed("check", good, "--baseline", baseline)
    assert code == 0
    assert f"note: {good}/records.jsonl, line 2 is incomplete" in text


def test_what_cannot_be_checked(good: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    run_folder.write_plan(empty, [STREAMING])
    assert typed("check", good) == (
        2,
        'check has neither a baseline file nor a budget to compare the run with\ngive one of them: --baseline FILE, or --budget "peak_rss <= 8GiB"',
    )
    assert typed("check", good, "--update") == (
        2,
        "--update has no file to write\nname it: --baseline baseline.yaml",
    )
    assert typed("check", empty, "--budget", "peak_rss < 1g") == (
        2,
        f"{empty} contains no record: nothing was measured\nmeasure first: weighin bench --resume"
        f" {empty}",
    )
    assert typed("check", tmp_path, "--budget", "peak_rss < 1g") == (
        2,
        f"{tmp_path} contains no records.jsonl: it is not the folder of a run\n"
        "name the folder that weighin bench printed at its end, such as results/RUN",
    )


def test_what_could_not_be_measured_becomes_no_baseline(tmp_path: Path) -> None:
    result = make_result(STREAMING, outcome=Outcome.MEASUREMENT_FAILED, message="no disk")
    run = run_of(tmp_path / "run", result)
    path = tmp_path / "baseline.yaml"
    assert typed("check", run, "--baseline", path, "--update") == (
        2,
        "gpt2-xl streaming safetensors float32 cpu cold docker ram=8GiB could not be measured: no"
        " disk\n"
        "measure again: a baseline without these figures would accept any figure",
    )
    assert not path.exists()


def test_cells_of_two_machines_become_no_baseline(tmp_path: Path) -> None:
    other = make_result(make_cell("baseline"), environment={"kernel": "5.4"})
    run = run_of(tmp_path / "run", make_result(STREAMING), other)
    code, text = typed("check", run, "--baseline", tmp_path / "b.yaml", "--update")
    assert code == 2
    assert text == (
        "the cells were measured under different settings (kernel: 5.4 | 6.18.0)\n"
        "measure all cells again on one machine, with the same packages and variables"
    )
