"""``weighin check`` as it is typed: exit codes, what passes, what is written, and errors in two lines."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner
from factories import SCRIPTS, make_cell, make_result, run_of
from test_evaluate import STREAMING, grown

from weighin.cli import app
from weighin.errors import HarnessError
from weighin.gate import baseline, check
from weighin.records import run_folder
from weighin.result import Outcome, Result
from weighin.units import GIB

PUBLISHED = Path(__file__).parents[2] / "results" / "published"
BUDGET = ("--budget", "peak_rss <= 1.1 x model")
WRONG = make_result(make_cell("lossy"), outcome=Outcome.WRONG_WEIGHTS, message="1 tensor differs")
FAILED = make_result(make_cell("broken"), outcome=Outcome.STRATEGY_FAILED, message="KeyError: 1")


def killed(strategy: str = "baseline", **changes: object) -> Result:
    return make_result(make_cell(strategy, **changes))


def ok(strategy: str = "streaming", **changes: object) -> Result:
    return make_result(make_cell(strategy, **changes), SCRIPTS["streaming"])


def typed(*arguments: object, **variables: str) -> tuple[int, str]:
    """The exit code and what is shown; of an error that is ours, its exit code and its text."""
    environment = {"COLUMNS": "200", "NO_COLOR": "1"} | variables
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


@pytest.fixture(name="file")
def _file(tmp_path: Path, good: Path) -> Path:
    path = tmp_path / "baseline.json"
    code, text = typed("check", good, "--baseline", path, "--update")
    assert code == 0
    assert f"+++ {path}" in text.splitlines()[1]
    assert text.splitlines()[-1] == "gate passed: 8 same"
    return path


def test_a_run_as_it_was_exits_with_0(good: Path, file: Path) -> None:
    code, text = typed("check", good, "--baseline", file)
    assert code == 0
    assert text.splitlines()[-1] == "gate passed: 8 same"


def test_a_regression_exits_with_1_and_says_how_to_accept_it(bad: Path, file: Path) -> None:
    code, text = typed("check", bad, "--baseline", file)
    assert code == 1
    assert text.splitlines()[-2:] == [
        "gate failed: 5 regressed, 3 same",
        "note: if the change is intended, accept it with --update, and commit the baseline file",
    ]
    code, text = typed("check", bad, "--baseline", file, "--update")
    assert code == 0
    assert re.search(r'^- +"peak_rss": 7248\d+,$', text, re.MULTILINE)
    assert re.search(r'^\+ +"peak_rss": 7591\d+,$', text, re.MULTILINE)
    assert typed("check", bad, "--baseline", file)[0] == 0
    assert f"{file} is up to date" in typed("check", bad, "--baseline", file, "--update")[1]


def test_a_metric_that_only_a_later_version_knows_is_passed_over(good: Path, file: Path) -> None:
    file.write_text(file.read_text().replace('"peak_rss": 7', '"of_tomorrow": 5, "peak_rss": 7', 1))
    assert '"of_tomorrow"' in file.read_text()
    assert typed("check", good, "--baseline", file)[0] == 0


def test_an_update_is_shown_even_if_a_budget_cannot_be_read(bad: Path, file: Path) -> None:
    words = ["check", bad, "--baseline", file, "--update", "--budget", "nonsense"]
    result = CliRunner().invoke(app.app, [*map(str, words)], env={"NO_COLOR": "1"})
    assert "cannot read the budget" in str(result.exception)
    assert re.search(r'^\+ +"peak_rss": 7591\d+,$', result.output, re.MULTILINE)
    assert f"{file} was updated" in result.output


def test_tolerances_and_settings_are_options_and_keys_of_pyproject(
    bad: Path, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, text = typed("check", bad, "--baseline", file, "--metrics", "load, ready")
    assert (code, text.splitlines()[-1]) == (0, "gate passed: 3 same")
    loose = [word for name in ("rss", "above_import", "anon", "ready_anon", "cgroup")
             for word in ("--tolerance", f"{name}=9%")]  # fmt: skip
    assert typed("check", bad, "--baseline", file, *loose)[0] == 0
    monkeypatch.chdir(tmp_path)
    text = file.read_text().replace('"torch": "2.13.0"', '"torch": "2.12.0"')
    file.write_text(text)
    assert typed("check", "good", "--baseline", file)[0] == 1
    Path("pyproject.toml").write_text(
        '[tool.weighin.check]\nbaseline = "baseline.json"\nsetting = ["torch=ignore"]\n'
        'tolerance = ["load=off", "ready=off"]\nbudget = "anon <= 9 x model"\n'
    )
    code, text = typed("check", "good")
    assert (code, text.splitlines()[-1]) == (0, "gate passed: 1 within budget, 6 same")


def test_several_runs_count_as_one_with_more_repeats(good: Path, bad: Path) -> None:
    [series] = check.read_runs([good, bad, good]).series.values()
    assert series.repeats == 3
    figure = series.figures["peak_rss"]
    assert figure.low == figure.median < figure.high


def test_every_output_at_once(bad: Path, file: Path, tmp_path: Path) -> None:
    files = [tmp_path / "out" / name for name in ("check.md", "check.xml", "check.json")]
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    code, text = typed(
        "check", bad, "--baseline", file, "--github",
        "--markdown", files[0], "--junit", files[1], "--json", files[2],
        GITHUB_STEP_SUMMARY=str(summary),
    )  # fmt: skip
    assert code == 1
    assert text.count(f"::error file={file},title=regressed%3A gpt2-xl streaming") == 5
    assert [path.read_text()[:15] for path in files] == [
        "## ❌ weighin ch",
        "<?xml version='",
        '{\n "schema": 1,',
    ]
    assert summary.read_text() == "before\n" + files[0].read_text()


def test_what_is_killed_wrong_or_failed_passes_no_gate_that_covers_it(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", ok(), killed(), WRONG, FAILED)
    before, path = run_of(tmp_path / "before", ok()), tmp_path / "baseline.json"
    assert typed("check", before, "--baseline", path, "--update")[0] == 0
    for gate in (BUDGET, ("--baseline", path), (*BUDGET, "--baseline", path)):
        code, text = typed("check", run, *gate)
        assert code == 1
        for named in ("baseline: oom_killed", "lossy: wrong_weights", "broken: strategy_failed"):
            assert f"not ok {named}" in text
        assert "gate failed: 3 not ok, " in text
        assert text.splitlines()[-1] == (
            "note: no check accepts wrong weights or failed strategies: repair them first"
        )
        code, text = typed("check", run, *gate, "--expect", "baseline=oom_killed")
        assert code == 1
        assert "expected baseline: oom_killed" in text
        assert "gate failed: 2 not ok, " in text
    code, text = typed("check", run, "--budget", "streaming: peak_rss <= 1.2 x model")
    assert code == 1
    assert "gate failed: 2 not ok, 1 within budget" in text
    left = "note: these failures are not judged, because no budget covers them: gpt2-xl baseline pt float32 cpu cold docker ram=8GiB (oom_killed)"  # fmt: skip
    assert left in text.splitlines()


def test_the_published_run_under_8_gib_fails_by_its_killed_strategies_unless_they_are_expected() -> (
    None
):
    run = PUBLISHED / "gpt2-xl-8GiB"
    code, text = typed("check", run, *BUDGET)
    assert code == 1
    repair = "baseline=oom_killed,sequential=oom_killed,meta_copy=oom_killed"
    assert text.splitlines()[-1] == (
        "note: if these outcomes are intended: --expect STRATEGY=OUTCOME"
    )
    code, text = typed("check", run, *BUDGET, "--expect", repair)
    assert (code, text.splitlines()[-1]) == (0, "gate passed: 3 expected, 3 within budget")


def test_an_update_accepts_outcomes_as_they_are_and_what_is_better_is_said(tmp_path: Path) -> None:
    run, path = run_of(tmp_path / "run", ok(), killed()), tmp_path / "baseline.json"
    code, text = typed("check", run, "--baseline", path, "--update")
    assert code == 0
    assert '"outcome": "oom_killed",' in text
    code, text = typed("check", run, "--baseline", path)
    assert (code, text.splitlines()[-1]) == (0, "gate passed: 1 expected, 8 same")
    late = make_result(make_cell("baseline"), outcome=Outcome.TIMEOUT, message="still running")
    code, text = typed("check", run_of(tmp_path / "late", ok(), late), "--baseline", path)
    assert code == 1
    assert "not ok baseline: oom_killed -> timeout: still running" in text
    better = run_of(tmp_path / "better", ok(), ok("baseline"))
    code, text = typed("check", better, "--baseline", path)
    assert code == 0
    assert "improved baseline: oom_killed -> ok" in text
    other = run_of(tmp_path / "other", ok(), killed(), killed(ram_limit_bytes=4 * GIB))
    assert (
        typed("check", other, "--baseline", path)[0] == 1
    )  # of another limit, nothing is accepted


def test_an_expectation_may_name_a_limit_and_is_told_where_nothing_meets_it(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", killed(), killed(ram_limit_bytes=4 * GIB), ok())
    code, text = typed("check", run, *BUDGET, "--expect", "baseline ram=8GiB=oom_killed")
    assert code == 1
    assert "not ok baseline ram=4GiB: oom_killed" in text
    assert "expected baseline ram=8GiB: oom_killed" in text
    run = run_of(tmp_path / "sound", ok())
    code, text = typed("check", run, *BUDGET, "--expect", "baselin=oom_killed")
    assert code == 0
    assert "note: the expected outcome baselin=oom_killed matches no measured series" in text


def test_a_repeat_that_is_killed_is_not_ok_however_many_others_are(tmp_path: Path) -> None:
    twice = [make_result(make_cell("mmap_assign", repeat=number)) for number in range(2)]
    dead = make_result(make_cell("mmap_assign", repeat=2), outcome=Outcome.OOM_KILLED)
    run = run_of(tmp_path / "run", *twice, dead)
    assert typed("check", run, *BUDGET)[0] == 1
    assert typed("check", run, *BUDGET, "--expect", "mmap_assign=oom_killed")[0] == 0
    path = tmp_path / "baseline.json"
    assert typed("check", run, "--baseline", path, "--update")[0] == 0
    assert baseline.read(path).series[next(iter(check.read_runs([run]).series))].repeats == 3


def test_a_wrong_load_under_a_limit_of_a_search_for_floors_passes_no_gate(tmp_path: Path) -> None:
    free = make_cell("lossy", ram_limit_bytes=None)
    folder = tmp_path / "found"
    run_folder.write_plan(folder, [free], {"within": 0.01})
    run_of(folder, make_result(free, SCRIPTS["streaming"]), WRONG)
    code, text = typed("check", folder, "--budget", "peak_rss <= 8GiB")
    assert code == 1
    assert "not ok lossy: ok 1, wrong_weights 1: 1 tensor differs" in text


@pytest.mark.parametrize(
    ("results", "code", "message"),
    [
        (
            (ok(), killed(), WRONG, FAILED),
            1,
            "cannot make a baseline: gpt2-xl lossy pt float32 cpu cold docker ram=8GiB:"
            " wrong_weights, gpt2-xl broken pt float32 cpu cold docker ram=8GiB: strategy_failed\n"
            "repair these strategies and measure again, or leave them out of --strategies",
        ),
        (
            (make_result(STREAMING, outcome=Outcome.MEASUREMENT_FAILED, message="no disk"),),
            2,
            "cannot make a baseline: gpt2-xl streaming safetensors float32 cpu cold docker ram=8GiB:"
            " measurement_failed\nmeasure the run again: a baseline without a figure accepts any value of it",
        ),
        (
            (ok(), make_result(make_cell("baseline"), environment={"kernel": "5.4"})),
            2,
            "cannot make a baseline: the cells differ in kernel: 5.4 | 6.18.0\n"
            "measure all cells again on one machine, with the same packages and variables",
        ),
    ],
)
def test_what_becomes_no_baseline(
    results: tuple[Result, ...], code: int, message: str, tmp_path: Path
) -> None:
    run, path = run_of(tmp_path / "run", *results), tmp_path / "baseline.json"
    assert typed("check", run, "--baseline", path, "--update") == (code, message)
    assert not path.exists()


def test_a_record_that_was_torn_is_said(good: Path, file: Path) -> None:
    with (good / "records.jsonl").open("a") as records:
        records.write('{"torn')
    code, text = typed("check", good, "--baseline", file)
    assert code == 0
    assert f"note: {good}/records.jsonl, line 2 is incomplete" in text


def test_what_cannot_be_checked(good: Path, tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    run_folder.write_plan(empty, [STREAMING])
    assert typed("check", good) == (
        2,
        'check has neither a baseline file nor a budget to compare the run with\ngive a baseline file, a budget or both: --baseline FILE, --budget "peak_rss <= 8GiB"',
    )
    assert typed("check", empty, *BUDGET) == (
        2,
        f"{empty} contains no record: nothing was measured\nmeasure first: weighin bench --resume"
        f" {empty}",
    )


@pytest.fixture(name="part")
def _part(tmp_path: Path) -> Path:
    run_folder.write_plan(tmp_path / "part", [make_cell("streaming"), make_cell("baseline")])
    return run_of(tmp_path / "part", make_result(make_cell("streaming")))


def test_a_run_that_is_not_complete_fails_unless_its_part_is_asked_for(
    part: Path, tmp_path: Path
) -> None:
    budgets = ["streaming: peak_rss <= 10 x model", "baseline: peak_rss <= model"]
    measured = check.read_runs([part])
    whole = check.check(measured, None, budgets=[*budgets, "gone: peak_rss <= 1B"])
    assert [(line.verdict, line.what) for line in whole.lines] == [
        (check.LineVerdict.MISSING, "cells"),
        (check.LineVerdict.MISSING, budgets[1]),
        (check.LineVerdict.MISSING, "gone: peak_rss <= 1B"),
        (check.LineVerdict.SAME, budgets[0]),
    ]
    assert whole.lines[0].text == (
        f"{part}: 1 of 2 cells measured; weighin bench --resume {part} measures the rest,"
        " --partial judges only this part"
    )
    judged = check.check(measured, None, budgets=budgets, partial=True)
    assert judged.failed == ()
    assert judged.notes == (f"{part}: 1 of 2 cells measured",)
    assert [line.what for line in judged.lines] == budgets[:1]  # of the other, no cell is measured
    path = tmp_path / "baseline.json"
    with pytest.raises(HarnessError, match="cannot make a baseline from an incomplete run"):
        check.update(measured, path)
    assert check.update(measured, path, partial=True)


def test_what_a_baseline_has_of_cells_that_are_pending_is_left_out(
    part: Path, tmp_path: Path
) -> None:
    path, measured = tmp_path / "baseline.json", check.read_runs([part])
    both = run_of(
        tmp_path / "both", make_result(make_cell("streaming")), ok("baseline"), ok("gone")
    )
    check.update(check.read_runs([both]), path)
    missing = check.check(measured, path, partial=True).failed
    assert [line.series.split(" ")[1] for line in missing] == ["gone"]
