"""The judgement: what is a regression, what is noise, and where it is said to have grown."""

from dataclasses import replace
from typing import Any

import pytest
from factories import SCRIPTS, make_cell, make_result
from hypothesis import given
from hypothesis import strategies as st

from weighin.gate.baseline import Baseline
from weighin.gate.check import GateResult, Growth, Line, LineVerdict, evaluate
from weighin.gate.rules import Rules, parse_budget, parse_expected
from weighin.records.machine import CONCURRENT, settings_of
from weighin.records.metrics import METRICS, Tolerance
from weighin.records.run_folder import Coverage, Records
from weighin.records.series import Figure, Series, summarise
from weighin.result import Outcome, Result
from weighin.units import GIB, MIB

STREAMING = make_cell("streaming", format="safetensors")
KEPT_GIB = 0.32  # 5 % of the model
SEARCH = Coverage(0, (), "", is_search=True)


def judged(was: list[Result], now: list[Result], rules: Rules | None = None) -> GateResult:
    rules = rules or Rules()
    known = Baseline(rules, settings_of(one.environment for one in was), summarise([Records(was)]))
    return evaluate(
        known, rules, settings_of(one.environment for one in now), summarise([Records(now)])
    )


def verdicts(judgement: GateResult) -> dict[str, LineVerdict]:
    return {line.what: line.verdict for line in judgement.lines}


def grown(cell: Any = STREAMING, gib: float = KEPT_GIB, since: int = 1) -> Result:
    """The streaming script with so much more from its phase number ``since`` on."""
    script = SCRIPTS["streaming"]
    kept = tuple(
        (name, seconds, anon + gib if index >= since else anon, file)
        for index, (name, seconds, anon, file) in enumerate(script)
    )
    return make_result(cell, kept)


def test_a_run_that_is_as_it_was_passes() -> None:
    judgement = judged([make_result(STREAMING)], [make_result(STREAMING)])
    assert {line.verdict for line in judgement.lines} == {LineVerdict.SAME}
    assert judgement.failed == ()


def test_a_tensor_that_is_kept_is_a_regression_of_every_memory_metric() -> None:
    judgement = judged([make_result(STREAMING)], [grown()])
    assert verdicts(judgement) == {
        "outcome": LineVerdict.SAME,
        "peak_rss": LineVerdict.REGRESSED,
        "above_import": LineVerdict.REGRESSED,
        "anon (sampled)": LineVerdict.REGRESSED,
        "ready_anon": LineVerdict.REGRESSED,
        "peak_cgroup": LineVerdict.REGRESSED,
        "load": LineVerdict.SAME,
        "ready": LineVerdict.SAME,
    }
    worst = judgement.lines[0]
    assert (worst.what, worst.verdict) == ("above_import", LineVerdict.REGRESSED)
    assert worst.now is not None
    assert worst.was is not None
    assert worst.now - worst.was == pytest.approx(KEPT_GIB * GIB, rel=0.01)


@pytest.mark.parametrize(("since", "phase"), [(1, "build"), (2, "stream"), (3, "touch")])
def test_the_phase_that_is_named_is_the_first_that_grew(since: int, phase: str) -> None:
    judgement = judged([make_result(STREAMING)], [grown(since=since)])
    [line] = [one for one in judgement.lines if one.what == "ready_anon"]
    assert line.grown is not None
    assert line.grown.phase == phase
    assert line.grown.step == pytest.approx(KEPT_GIB * GIB, rel=0.01)


def test_the_phase_of_a_peak_is_not_one_that_grew_below_it() -> None:
    was = one_series(peak_rss=1000 * MIB, phases={"build": 10, "read": 900, "apply": 1000})
    now = one_series(peak_rss=1033 * MIB, phases={"build": 510, "read": 900, "apply": 1033})
    line = figure_line(was, now)
    assert line.grown is not None
    assert line.grown.phase == "apply"


def test_what_shrank_is_an_improvement() -> None:
    judgement = judged([grown()], [make_result(STREAMING)])
    assert judgement.failed == ()
    assert verdicts(judgement)["peak_rss"] is LineVerdict.IMPROVED


@pytest.mark.parametrize(
    ("was", "now", "verdict", "text"),
    [
        (Outcome.OK, Outcome.OOM_KILLED, LineVerdict.REGRESSED, "ok -> oom_killed"),
        (Outcome.OK, Outcome.WRONG_WEIGHTS, LineVerdict.REGRESSED, "ok -> wrong_weights"),
        (Outcome.OK, Outcome.SKIPPED, LineVerdict.REGRESSED, "ok -> skipped"),
        (Outcome.OOM_KILLED, Outcome.MEASUREMENT_FAILED, LineVerdict.NOT_OK, "oom_killed -> measurement_failed"),
        (Outcome.OOM_KILLED, Outcome.TIMEOUT, LineVerdict.NOT_OK, "oom_killed -> timeout"),
        (Outcome.OOM_KILLED, Outcome.OOM_KILLED, LineVerdict.EXPECTED, "oom_killed"),
        (Outcome.WRONG_WEIGHTS, Outcome.WRONG_WEIGHTS, LineVerdict.NOT_OK, "wrong_weights"),
        (Outcome.SKIPPED, Outcome.SKIPPED, LineVerdict.EXPECTED, "skipped"),
        (Outcome.MEASUREMENT_FAILED, Outcome.MEASUREMENT_FAILED, LineVerdict.NOT_OK, "measurement_failed"),
        (Outcome.OOM_KILLED, Outcome.OK, LineVerdict.IMPROVED, "oom_killed -> ok"),
    ],
)  # fmt: skip
def test_outcomes(was: Outcome, now: Outcome, verdict: LineVerdict, text: str) -> None:
    before = make_result(STREAMING, outcome=was)
    after = make_result(STREAMING, outcome=now)
    line = judged([before], [after]).lines[0]
    assert (line.what, line.verdict, line.text) == ("outcome", verdict, text)


def test_the_peaks_of_an_outcome_that_stays_bad_and_is_expected_are_not_compared() -> None:
    was, now = (make_result(STREAMING, outcome=Outcome.OOM_KILLED, peaks=peaks) for peaks in
                (make_result(STREAMING).peaks, grown().peaks))  # fmt: skip
    expecting = replace(Rules(), expected=tuple(parse_expected("streaming=oom_killed")))
    assert verdicts(judged([was], [now], expecting)) == {"outcome": LineVerdict.EXPECTED}


def test_a_repeat_that_fails_is_a_regression() -> None:
    was = [make_result(replace(STREAMING, repeat=number)) for number in range(3)]
    now = [*was[:2], make_result(was[2].cell, outcome=Outcome.TIMEOUT, message="still running")]
    assert judged(was, now).lines[0].text == "ok -> ok 2, timeout 1: still running"
    assert judged(was, now).lines[0].verdict is LineVerdict.REGRESSED


def test_a_series_that_was_not_measured_fails_and_a_new_one_does_not() -> None:
    other = make_result(make_cell("mmap_assign"))
    judgement = judged([make_result(STREAMING)], [other])
    assert [(line.verdict, line.text) for line in judgement.lines] == [
        (LineVerdict.MISSING, "was not measured; ok in the baseline"),
        (LineVerdict.NEW, "not in the baseline; ok"),
    ]
    assert len(judgement.failed) == 1
    assert judgement.notes[0].startswith("the baseline and the run have no series in common: ")


def test_a_metric_that_is_no_longer_measured_fails() -> None:
    was, now = one_series(peak_rss=5, peak_cgroup=5), one_series(peak_rss=5)
    lines = judge_series(was, now).lines
    assert (lines[0].verdict, lines[0].text) == (
        LineVerdict.MISSING,
        "peak_cgroup was not measured",
    )


def test_another_model_of_the_same_name_is_not_compared() -> None:
    was = make_result(STREAMING)
    now = replace(grown(), model_bytes=was.model_bytes and was.model_bytes + 8)
    line, outcome = judged([was], [now]).lines
    assert (line.what, line.verdict) == ("model", LineVerdict.DIFFERS)
    assert outcome.verdict is LineVerdict.SAME
    assert line.text == "the model's size differs: 6,753,416,192 bytes -> 6,753,416,200 bytes"


def test_the_band_of_the_baselines_repeats_is_no_regression() -> None:
    was = {"s": Series("ok", 3, figures={"peak_rss": Figure(990 * MIB, 1000 * MIB, 1050 * MIB)})}
    tolerance = Tolerance(0.0, MIB)
    assert figure_line(was, one_series(peak_rss=1051 * MIB), tolerance).verdict is LineVerdict.SAME
    assert (
        figure_line(was, one_series(peak_rss=1051 * MIB + 1), tolerance).verdict
        is LineVerdict.REGRESSED
    )
    assert figure_line(was, one_series(peak_rss=989 * MIB), tolerance).verdict is LineVerdict.SAME
    assert (
        figure_line(was, one_series(peak_rss=989 * MIB - 1), tolerance).verdict
        is LineVerdict.IMPROVED
    )


@given(
    was=st.integers(1, 10**13),
    step=st.integers(-(10**12), 10**12),
    relative=st.floats(0, 1),
    absolute=st.integers(0, 10**12),
)
def test_a_figure_regresses_exactly_beyond_the_larger_of_share_and_amount(
    was: int, step: int, relative: float, absolute: int
) -> None:
    tolerance = Tolerance(relative, absolute)
    line = figure_line(one_series(peak_rss=was), one_series(peak_rss=was + step), tolerance)
    allowed = max(round(relative * was), absolute)
    expected = (
        LineVerdict.REGRESSED
        if step > allowed
        else LineVerdict.IMPROVED
        if -step > allowed
        else LineVerdict.SAME
    )
    assert line.verdict is expected
    assert line.allowed == was + allowed
    assert (line.excess > 0) is (expected is LineVerdict.REGRESSED)


def test_another_torch_fails_and_another_kernel_is_said_and_times_are_not_judged() -> None:
    was = make_result(STREAMING)
    changed = was.environment | {"kernel": "6.19.0", "torch": "2.14.0+cpu", "git_commit": "abc"}
    now = replace(was, environment=changed, load_ns=10**12, ready_ns=10**12)
    judgement = judged([was], [now])
    settings = [line for line in judgement.lines if line.series == "environment"]
    assert [(line.verdict, line.text) for line in settings] == [
        (LineVerdict.DIFFERS, "torch: 2.13.0 -> 2.14.0+cpu"),
        (LineVerdict.CHANGED, f"kernel: {was.environment['kernel']} -> 6.19.0"),
    ]
    assert "ready" not in verdicts(judgement)
    assert judgement.notes == (
        "times are not judged: the baseline was measured on another machine or with other settings",
    )


def test_what_a_setting_means_can_be_chosen() -> None:
    was = make_result(STREAMING)
    now = replace(was, environment=was.environment | {"kernel": "6.19.0", "torch": "3"})
    rules = replace(Rules(), policies={"kernel": "fail", "tor*": "ignore"})
    settings = [one for one in judged([was], [now], rules).lines if one.series == "environment"]
    assert [(line.verdict, line.text.partition(":")[0]) for line in settings] == [
        (LineVerdict.DIFFERS, "kernel")
    ]


def test_budgets_are_judged_by_the_highest_repeat() -> None:
    rules = Rules({}, (parse_budget("peak_rss <= 1.1 x model"),))
    series = {"s": Series("ok", 2, model_bytes=100, figures={"peak_rss": Figure(100, 105, 111)})}
    [line] = evaluate(None, rules, {}, series).lines
    assert (line.verdict, line.was, line.now) == (LineVerdict.OVER_BUDGET, 110, 111)
    kept = {"s": Series("ok", 2, model_bytes=100, figures={"peak_rss": Figure(100, 105, 110)})}
    assert evaluate(None, rules, {}, kept).failed == ()


def test_a_budget_whose_pattern_matches_nothing_names_the_strategies_of_the_run() -> None:
    rules = Rules({}, (parse_budget("mine_loader: peak_rss <= 8GiB"),))
    cells = [replace(STREAMING, strategy=name) for name in ("baseline", "streaming", "./mine.py")]
    series = summarise([Records([make_result(cell) for cell in cells])])
    [line] = evaluate(None, rules, {}, series).failed
    assert (line.verdict, line.text) == (
        LineVerdict.MISSING,
        "mine_loader: peak_rss <= 8GiB: no series matches 'mine_loader'; the run's strategies are"
        " baseline, streaming, ./mine.py",
    )


def test_a_budget_on_a_figure_that_the_matching_series_lack() -> None:
    rules = Rules({}, (parse_budget("s*: floor <= 8GiB"),))
    [line] = evaluate(None, rules, {}, summarise([Records([make_result(STREAMING)])])).failed
    assert line.text == "s*: floor <= 8GiB: no measured series has this figure"


def search(floor_mib: int, step_mib: int = 8) -> Records:
    """A search for the floor of one strategy, with the cells that it takes."""
    free = replace(STREAMING, ram_limit_bytes=None)
    fails = replace(STREAMING, ram_limit_bytes=(floor_mib - step_mib) * MIB)
    works = [replace(STREAMING, ram_limit_bytes=floor_mib * MIB, repeat=n) for n in range(3)]
    results = [make_result(free), make_result(fails, outcome=Outcome.OOM_KILLED)]
    return Records(
        [*results, *(make_result(one, outcome=Outcome.OK) for one in works)], coverage=SEARCH
    )


def test_a_search_is_one_series_with_its_floor_whatever_limits_it_tried() -> None:
    was, now = summarise([search(6800)]), summarise([search(7100)])
    assert list(was) == ["gpt2-xl streaming safetensors float32 cpu cold docker ram=none"]
    [line] = [one for one in judge_series(was, now).lines if one.what == "floor"]
    assert (line.verdict, line.was, line.now) == (LineVerdict.REGRESSED, 6800 * MIB, 7100 * MIB)
    [line] = [one for one in judge_series(was, was).lines if one.what == "floor"]
    assert line.verdict is LineVerdict.SAME


def test_a_floor_that_was_not_found_is_missing() -> None:
    was, now = summarise([search(6800)]), summarise([search(6800, step_mib=2000)])
    [line] = judge_series(was, now).failed
    assert (line.verdict, line.text) == (LineVerdict.MISSING, "floor was not measured")


def test_a_budget_of_a_floor_that_was_not_found_is_not_kept() -> None:
    rules = Rules({}, (parse_budget("floor <= 7GiB"),))
    found, other = search(6800), search(6800, step_mib=2000)
    lost = [
        replace(one, cell=replace(one.cell, strategy="lost"))
        for one in other.results
    ]  # fmt: skip
    judgement = evaluate(
        None, rules, {}, summarise([Records([*found.results, *lost], coverage=SEARCH)])
    )
    [line] = judgement.failed
    assert (line.verdict, line.series.split(" ")[1]) == (LineVerdict.MISSING, "lost")
    assert line.text.startswith("no floor was found: above 4.688 GiB, at most 6.641 GiB")


def test_a_floor_that_one_of_two_runs_did_not_find_is_not_kept() -> None:
    rules = Rules({}, (parse_budget("floor <= 7GiB"),))
    runs = [search(6800), search(6800, step_mib=2000)]
    series = summarise([Records(one.results, coverage=SEARCH) for one in runs])
    [line] = evaluate(None, rules, {}, series).failed
    assert line.text.startswith("no floor was found")


def one_series(phases: dict[str, int] | None = None, **figures: int) -> dict[str, Series]:
    """One ok series called "s"; ``phases`` hold their peak RSS in MiB."""
    return {
        "s": Series(
            "ok",
            1,
            figures={name: Figure(value, value, value) for name, value in figures.items()},
            phases={name: {"peak_rss": mib * MIB} for name, mib in (phases or {}).items()},
        )
    }


def judge_series(
    was: dict[str, Series], now: dict[str, Series], tolerance: Tolerance | None = None
) -> GateResult:
    rules = Rules()
    if tolerance:
        rules = Rules(dict.fromkeys(METRICS, tolerance))
    return evaluate(Baseline(rules, {}, was), rules, {}, now)


def figure_line(
    was: dict[str, Series], now: dict[str, Series], tolerance: Tolerance | None = None
) -> Line:
    [line] = [one for one in judge_series(was, now, tolerance).lines if one.metric]
    return line


def grew(*steps: int, was: int = 100, now: int = 200, metric: str = "peak_rss") -> str:
    """The phase that explains a growth, of phases a, b, ... that grew by these steps."""
    phases = tuple(
        Growth(name, 10, 10 + step, step) for name, step in zip("abcd", steps, strict=False)
    )
    line = Line(
        LineVerdict.SAME, "s", metric, metric=METRICS[metric], was=was, now=now, phases=phases
    )
    return line.grown.phase if line.grown else ""


@pytest.mark.parametrize(
    ("steps", "phase"),
    [
        ((49, 50), "b"),  # from half of the growth on
        ((150, 50), "a"),  # up to one and a half of it
        ((151, 50), "b"),
        ((151, 400), "b"),  # none is about as much: the largest
        ((10, 49, 20), "b"),
        ((0, -5), ""),
        ((0, 1), "b"),
        ((), ""),
    ],
)
def test_the_first_phase_that_grew_by_about_as_much_explains_a_growth(
    steps: tuple[int, ...], phase: str
) -> None:
    assert grew(*steps) == phase


def test_the_worst_figure_that_passes_is_said() -> None:
    was = {"s": Series("ok", 3, figures={"peak_rss": Figure(90, 100, 110)})}
    found = {}
    for direction in ("lower", "higher", "both"):
        tolerance = Tolerance(0.0, 5, direction)
        lines = [figure_line(was, one_series(peak_rss=now), tolerance) for now in (130, 60)]
        found[direction] = [(line.allowed, line.excess) for line in lines]
    assert found == {
        "lower": [(115, 0.15), (115, -0.55)],
        "higher": [(85, -0.45), (85, 0.25)],
        "both": [(115, 0.15), (85, 0.25)],
    }


def test_a_new_phase_counts_from_the_highest_of_before_and_a_time_from_nothing() -> None:
    def phases(**figures: dict[str, int]) -> dict[str, Series]:
        values = {"peak_rss": Figure(10, 10, 10), "ready": Figure(1, 1, 1)}
        return {"s": Series("ok", 1, figures=values, phases=figures)}

    was = phases(read={"peak_rss": 50, "time": 5}, apply={"peak_rss": 70}, odd={})
    now = phases(read={"peak_rss": 60, "time": 7}, new={"peak_rss": 90, "time": 4}, odd={"x": 1})
    lines = {line.what: line.phases for line in judge_series(was, now).lines if line.metric}
    assert lines["peak_rss"] == (Growth("read", 50, 60, 10), Growth("new", None, 90, 20))
    assert lines["ready"] == (Growth("read", 5, 7, 2), Growth("new", None, 4, 4))


def test_lines_come_in_the_order_of_their_verdicts_and_of_their_excess() -> None:
    budgets_of = tuple(parse_budget(f"peak_rss <= {bound}") for bound in (90, 50, 200, 100))
    series = one_series(peak_rss=100)
    lines = evaluate(None, Rules({}, budgets_of), {}, series).lines
    assert [(line.allowed, line.verdict) for line in lines] == [
        (50, LineVerdict.OVER_BUDGET),
        (90, LineVerdict.OVER_BUDGET),
        (100, LineVerdict.SAME),
        (200, LineVerdict.SAME),
    ]
    assert [line.excess for line in lines] == [1.0, 10 / 90, 0.0, -0.5]
    assert {line.was for line in lines} == {50, 90, 100, 200}


@pytest.mark.parametrize("where", ["was", "now"])
def test_times_of_cells_that_ran_at_once_are_not_judged(where: str) -> None:
    was, now = make_result(STREAMING), make_result(STREAMING)
    at_once = replace(was, environment=was.environment | {CONCURRENT: 2})
    before, after = ([at_once], [now]) if where == "was" else ([was], [at_once])
    judgement = judged(before, after)
    assert judgement.notes == ("times are not judged: several cells ran at once (jobs)",)
    assert "ready" not in verdicts(judgement)


def test_figures_of_cells_that_are_not_ok_and_models_of_unknown_size() -> None:
    ok = one_series(peak_rss=5)["s"]
    for was, now in ((replace(ok, outcome="timeout"), ok), (ok, replace(ok, outcome="timeout"))):
        assert [line.what for line in judge_series({"s": was}, {"s": now}).lines] == ["outcome"]
    for sizes in ((None, 5), (5, None), (5, 5)):
        before, after = (replace(ok, model_bytes=size) for size in sizes)
        found = verdicts(judge_series({"s": before}, {"s": after}))
        assert found["peak_rss"] is LineVerdict.SAME


def test_a_limit_in_a_budget_that_some_series_do_not_have() -> None:
    series = {name: replace(one_series(peak_rss=5)["s"], limit_bytes=limit) for name, limit in
              (("a", 10), ("b", None), ("c", None))}  # fmt: skip
    rules = Rules({}, (parse_budget("peak_rss <= limit"),))
    judgement = evaluate(None, rules, {}, series)
    assert [(line.series, line.verdict) for line in judgement.lines] == [("a", LineVerdict.SAME)]
    assert judgement.notes == (
        "peak_rss <= limit: not judged, because there is no such figure, for b, c",
    )
    none = {name: one for name, one in series.items() if name != "a"}
    [line] = evaluate(None, rules, {}, none).failed
    assert line.text == "peak_rss <= limit: no measured series has this figure"
    assert evaluate(None, rules, {}, none).notes == ()


def test_an_outcome_that_is_new_or_expected_elsewhere() -> None:
    failed = Series("timeout", 1, message="after 60 s")
    expecting = Rules({}, expected=tuple(parse_expected("s=timeout")))
    known = Baseline(expecting, {}, {"s": failed})
    ok = one_series(peak_rss=5)
    [better] = evaluate(known, expecting, {}, ok).lines
    assert better.text == "timeout -> ok; 's=timeout' no longer needs to be expected"
    before = Baseline(expecting, {}, ok)
    [better] = evaluate(before, expecting, {}, ok).lines
    assert better.text == "timeout expected -> ok; 's=timeout' no longer needs to be expected"
    nothing = Baseline(Rules({}), {}, one_series(peak_rss=5))
    [_, new] = evaluate(nothing, Rules({}), {}, ok | {"t": failed}).lines[::-1]
    assert (new.verdict, new.text) == (
        LineVerdict.NOT_OK,
        "timeout, and not in the baseline: after 60 s",
    )


def test_a_failed_series_is_judged_if_one_of_the_budgets_covers_it() -> None:
    failed = {"s": Series("timeout", 1), "u": Series("timeout", 1)}
    texts = ("s: peak_rss <= 9", "t: peak_rss <= 9")
    judgement = evaluate(None, Rules({}, tuple(map(parse_budget, texts))), {}, failed)
    assert [line.series for line in judgement.lines if line.what == "outcome"] == ["s"]
    [note] = judgement.notes
    assert "u (timeout)" in note and "s (timeout)" not in note
