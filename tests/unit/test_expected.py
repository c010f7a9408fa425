"""No gate passes what is not ok, unless that is expected of it; what is broken passes never."""

from collections.abc import Callable
from pathlib import Path

import pytest
from factories import SCRIPTS, make_cell, make_result
from test_check import run_of, typed

from weighin.cell import ModelSpec
from weighin.errors import ConfigError
from weighin.gate import check, freeze
from weighin.gate.expected import Expectation, parse
from weighin.records.series import name_of
from weighin.result import Outcome, Result
from weighin.units import GIB

PUBLISHED = Path(__file__).parents[2] / "results" / "published"
BUDGET = ("--budget", "peak_rss <= 1.1 x model")


def killed(strategy: str = "baseline", **changes: object) -> Result:
    return make_result(make_cell(strategy, **changes))


def ok(strategy: str = "streaming", **changes: object) -> Result:
    return make_result(make_cell(strategy, **changes), SCRIPTS["streaming"])


WRONG = make_result(make_cell("lossy"), outcome=Outcome.WRONG_WEIGHTS, message="1 tensor differs")
FAILED = make_result(make_cell("broken"), outcome=Outcome.STRATEGY_FAILED, message="KeyError: 1")


@pytest.fixture(name="run")
def _run(tmp_path: Path) -> Path:
    """A run in which one series is ok, one was killed, one is wrong and one failed."""
    return run_of(tmp_path / "run", ok(), killed(), WRONG, FAILED)


def frozen(folder: Path, *results: Result, expect: str = "") -> Path:
    """A baseline file of these results, broken ones too, as it could be written before."""
    measured = check.read_runs([run_of(folder / "before", *results)])
    path = folder / "baseline.yaml"
    wanted = parse(expect) if expect else []
    freeze.update(path, measured.environment, measured.series, wanted)
    return path


def of_budget(_: Path) -> tuple[object, ...]:
    return BUDGET


def of_old_baseline(folder: Path) -> tuple[object, ...]:
    return "--baseline", frozen(folder, ok(), killed(), WRONG, FAILED)


def of_baseline_without_them(folder: Path) -> tuple[object, ...]:
    return "--baseline", frozen(folder, ok())


def of_both(folder: Path) -> tuple[object, ...]:
    return *BUDGET, "--baseline", frozen(folder, ok(), killed(), WRONG, FAILED)


GATES = [of_budget, of_old_baseline, of_baseline_without_them, of_both]


@pytest.mark.parametrize("gate", GATES)
def test_a_killed_a_wrong_and_a_failed_series_pass_no_gate_that_covers_them(
    tmp_path: Path, run: Path, gate: Callable[[Path], tuple[object, ...]]
) -> None:
    code, text = typed("check", run, *gate(tmp_path), COLUMNS="200")
    assert code == 1
    for named in ("baseline: oom_killed", "lossy: wrong_weights", "broken: strategy_failed"):
        assert f"not ok {named}" in text
    assert "gate failed: 3 not ok, " in text
    assert text.splitlines()[-1] == (
        "note: no check accepts wrong weights or failed strategies: repair them first"
    )


@pytest.mark.parametrize("gate", GATES)
def test_what_is_expected_passes_and_what_is_broken_still_does_not(
    tmp_path: Path, run: Path, gate: Callable[[Path], tuple[object, ...]]
) -> None:
    expected = ("--expect", "baseline=oom_killed")
    code, text = typed("check", run, *gate(tmp_path), *expected, COLUMNS="200")
    assert code == 1
    assert "expected baseline: oom_killed" in text
    assert "gate failed: 2 not ok, " in text
    sound = run_of(tmp_path / "sound", ok(), killed())
    code, text = typed("check", sound, *BUDGET, *expected)
    assert code == 0, text
    assert text.splitlines()[-1] == "gate passed: 1 expected, 1 within budget"


def test_a_series_that_is_broken_fails_where_nothing_covers_it(run: Path, tmp_path: Path) -> None:
    budget = ("--budget", "streaming: peak_rss <= 1.2 x model")
    code, text = typed("check", run, *budget, COLUMNS="200")
    assert code == 1
    assert "gate failed: 2 not ok, 1 within budget" in text
    left = "note: these failures are not judged, because no budget covers them: gpt2-xl baseline pt float32 cpu cold docker ram=8GiB (oom_killed)"  # fmt: skip
    assert left in text.splitlines()
    code, text = typed("check", run_of(tmp_path / "sound", ok(), killed()), *budget, COLUMNS="200")
    assert code == 0
    assert left in text.splitlines()


def test_the_published_run_under_8_gib_fails_by_its_killed_strategies_unless_they_are_expected() -> (
    None
):
    run = PUBLISHED / "gpt2-xl-8GiB"
    code, text = typed("check", run, *BUDGET, COLUMNS="200")
    assert code == 1
    lines = text.splitlines()
    assert [line.partition(": killed")[0] for line in lines[:3]] == [
        "not ok baseline: oom_killed",
        "not ok sequential: oom_killed",
        "not ok meta_copy: oom_killed",
    ]
    repair = "baseline=oom_killed,sequential=oom_killed,meta_copy=oom_killed"
    assert lines[-1] == f"note: if these outcomes are intended, add --expect {repair}"
    code, text = typed("check", run, *BUDGET, "--expect", repair)
    assert (code, text.splitlines()[-1]) == (0, "gate passed: 3 expected, 3 within budget")


def test_the_expectations_of_a_baseline_file_count(tmp_path: Path) -> None:
    path = frozen(tmp_path, ok(), killed(), expect="baseline=oom_killed")
    run = run_of(tmp_path / "run", ok(), killed())
    assert typed("check", run, "--baseline", path)[0] == 0
    late = make_result(make_cell("baseline"), outcome=Outcome.TIMEOUT, message="still running")
    code, text = typed("check", run_of(tmp_path / "late", ok(), late), "--baseline", path)
    assert code == 1
    assert "not ok baseline: oom_killed -> timeout: still running" in text


def test_an_expected_outcome_that_does_not_occur_is_better_and_says_how_to_update(
    tmp_path: Path,
) -> None:
    path = frozen(tmp_path, ok(), killed(), expect="baseline=oom_killed")
    run = run_of(tmp_path / "run", ok(), ok("baseline"))
    code, text = typed("check", run, "--baseline", path, COLUMNS="200")
    assert code == 0
    assert "improved baseline: oom_killed -> ok; remove 'baseline=oom_killed' from expect" in text
    code, text = typed("check", run, "--budget", "peak_rss <= 8GiB", "--expect", "baseline=oom_killed", COLUMNS="200")  # fmt: skip
    assert code == 0
    assert (
        "improved baseline: oom_killed expected -> ok; remove 'baseline=oom_killed' from --expect"
        in text
    )


def test_an_expectation_that_is_met_under_one_limit_is_no_news_under_another(
    tmp_path: Path,
) -> None:
    run = run_of(tmp_path / "run", killed(), ok("baseline", ram_limit_bytes=None))
    code, text = typed("check", run, "--budget", "peak_rss <= 8GiB", "--expect", "baseline=oom_killed")  # fmt: skip
    assert code == 0
    assert text.splitlines()[-1] == "gate passed: 1 expected, 1 within budget"


def test_an_expectation_may_name_a_limit(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", killed(), killed(ram_limit_bytes=4 * GIB), ok())
    budget = ("--budget", "peak_rss <= 8GiB", "--expect", "baseline ram=8GiB=oom_killed")
    code, text = typed("check", run, *budget, COLUMNS="200")
    assert code == 1
    assert "not ok baseline ram=4GiB: oom_killed" in text
    assert "expected baseline ram=8GiB: oom_killed" in text


def test_an_expectation_of_nothing_that_was_measured_is_said(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", ok())
    code, text = typed("check", run, *BUDGET, "--expect", "baselin=oom_killed", COLUMNS="200")
    assert code == 0
    assert "note: --expect baselin=oom_killed matches no measured series" in text


def test_a_repeat_that_is_killed_is_not_ok_however_many_others_are(tmp_path: Path) -> None:
    twice = [make_result(make_cell("mmap_assign", repeat=number)) for number in range(2)]
    dead = make_result(make_cell("mmap_assign", repeat=2), outcome=Outcome.OOM_KILLED)
    run = run_of(tmp_path / "run", *twice, dead)
    assert typed("check", run, *BUDGET)[0] == 1
    assert typed("check", run, *BUDGET, "--expect", "mmap_assign=oom_killed")[0] == 0


def test_a_wrong_load_under_a_limit_of_a_search_for_floors_passes_no_gate(tmp_path: Path) -> None:
    from weighin.records import run_folder

    free = make_cell("lossy", ram_limit_bytes=None)
    folder = tmp_path / "found"
    run_folder.write_plan(folder, [free], {"within": 0.01})
    run_of(folder, make_result(free, SCRIPTS["streaming"]), WRONG)
    code, text = typed("check", folder, "--budget", "peak_rss <= 8GiB", COLUMNS="200")
    assert code == 1
    assert "not ok lossy: ok 1, wrong_weights 1: 1 tensor differs" in text


def test_what_expect_says() -> None:
    assert parse("baseline=oom_killed, mmap_* ram=1GiB = timeout") == [
        Expectation("baseline", Outcome.OOM_KILLED, "--expect"),
        Expectation("mmap_* ram=1GiB", Outcome.TIMEOUT, "--expect"),
    ]
    spec = ModelSpec("build", "mynets:build", {"width": 64, "deep": [1, 2]})
    [one] = parse("mynets:build(deep=[1,2],width=64)=skipped")
    assert one.covers(name_of(make_cell(model=spec)))
    assert not one.covers(name_of(make_cell()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("baseline", "cannot read --expect 'baseline'"),
        ("baseline=dead", "cannot read --expect 'baseline=dead'"),
        ("baseline=oom_killed,lossy", "cannot read --expect 'lossy'"),
        ("", "cannot read --expect ''"),
        (
            "lossy=wrong_weights",
            "--expect lossy=wrong_weights: wrong_weights cannot be an expected outcome: a failed strategy always fails a check",
        ),
        (
            "x=measurement_failed",
            "--expect x=measurement_failed: measurement_failed cannot be an expected outcome: this"
            " outcome says nothing about the strategy",
        ),
    ],
)
def test_what_cannot_be_expected(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert str(caught.value) == (
        f"{message}\nwrite an expected outcome as in baseline=oom_killed; outcomes that can be"
        " expected: oom_killed, child_killed, cuda_oom, timeout, thrashing, skipped"
    )


@pytest.mark.parametrize("outcome", ["wrong_weights", "ok", "dead"])
def test_a_baseline_file_cannot_expect_it_either(tmp_path: Path, outcome: str) -> None:
    path = tmp_path / "baseline.yaml"
    path.write_text(f"schema: 1\nexpect: {{lossy: {outcome}}}\n")
    code, text = typed("check", run_of(tmp_path / "run", ok()), "--baseline", path)
    assert code == 2
    assert text.startswith(f"{path}: expect: ")
