"""The judgement: what is a regression, what is noise, and where it is said to have grown."""

from dataclasses import replace
from typing import Any

import pytest
from factories import SCRIPTS, make_cell, make_result
from hypothesis import given
from hypothesis import strategies as st
from snapshots import Compare

from weighin.gate.baseline import Baseline
from weighin.gate.check import GateResult, Growth, Line, LineVerdict, evaluate
from weighin.gate.rules import Rules, parse_budget, parse_expected
from weighin.records.machine import CONCURRENT, settings_of
from weighin.records.metrics import METRICS, Tolerance
from weighin.records.run_folder import Coverage, Records
from weighin.records.series import Figure, Series, summarise
from weighin.result import Outcome, Result
from weighin.units import MIB

STREAMING = make_cell("streaming", format="safetensors")
KEPT_GIB = 0.32  # 5 % of the model
SEARCH = Coverage(0, (), "", is_search=True)
Measured = list[Result] | Records | dict[str, Series]


def judged(was: Measured | None, now: Measured, rules: Rules | None = None) -> GateResult:
    """Judge one run by another, or by the rules alone."""
    rules = rules or Rules()
    known = None if was is None else Baseline(rules, *_summary(was))
    return evaluate(known, rules, *_summary(now))


def _summary(measured: Measured) -> tuple[dict[str, Any], dict[str, Series]]:
    if isinstance(measured, dict):
        return {}, measured
    records = measured if isinstance(measured, Records) else Records(measured)
    return settings_of(one.environment for one in records.results), summarise([records])


def grown(cell: Any = STREAMING, gib: float = KEPT_GIB, since: int = 1) -> Result:
    """The streaming script with so much more from its phase number ``since`` on."""
    script = SCRIPTS["streaming"]
    kept = tuple(
        (name, seconds, anon + gib if index >= since else anon, file)
        for index, (name, seconds, anon, file) in enumerate(script)
    )
    return make_result(cell, kept)


def search(floor_mib: int, step_mib: int = 8, strategy: str = "streaming") -> Records:
    """A search for the floor of one strategy, with the cells that it takes."""
    cell = replace(STREAMING, strategy=strategy, ram_limit_bytes=None)
    fails = replace(cell, ram_limit_bytes=(floor_mib - step_mib) * MIB)
    works = [replace(cell, ram_limit_bytes=floor_mib * MIB, repeat=n) for n in range(3)]
    script = SCRIPTS["streaming"]
    results = [make_result(cell, script), make_result(fails, script, Outcome.OOM_KILLED)]
    found = [*results, *(make_result(one, script, Outcome.OK) for one in works)]
    return Records(found, coverage=SEARCH)


def one_series(phases: dict[str, int] | None = None, **figures: int) -> dict[str, Series]:
    """One ok series called "s"; ``phases`` hold their peak RSS in MiB."""
    values = {name: Figure(value, value, value) for name, value in figures.items()}
    peaks = {name: {"peak_rss": mib * MIB} for name, mib in (phases or {}).items()}
    return {"s": Series("ok", 1, figures=values, phases=peaks)}


def budgets(*texts: str) -> Rules:
    return Rules({}, tuple(map(parse_budget, texts)))


def with_phases(**phases: dict[str, int]) -> dict[str, Series]:
    values = {"peak_rss": Figure(10, 10, 10), "ready": Figure(1, 1, 1)}
    return {"s": Series("ok", 1, figures=values, phases=phases)}


def limited(**limits: int | None) -> dict[str, Series]:
    (series,) = one_series(peak_rss=5).values()
    return {name: replace(series, limit_bytes=limit) for name, limit in limits.items()}


PLAIN, KEPT = make_result(STREAMING), grown()
REPEATED = [make_result(replace(STREAMING, repeat=number)) for number in range(3)]
DEAD = replace(PLAIN, outcome=Outcome.OOM_KILLED)
AT_ONCE = replace(PLAIN, environment=PLAIN.environment | {CONCURRENT: 2})
ELSEWHERE = replace(
    PLAIN,
    environment=PLAIN.environment | {"kernel": "6.19.0", "torch": "2.14.0", "git_commit": "abc"},
    load_ns=10**12,
    ready_ns=10**12,
)
OK, LATE = one_series(peak_rss=5)["s"], Series("timeout", 1, message="after 60 s")
EXPECTING = Rules({}, expected=tuple(parse_expected("s=timeout")))
KERNEL_ALONE = replace(Rules(), policies={"kernel": "fail", "tor*": "ignore"})
OF_THE_MODEL = {"s": Series("ok", 2, model_bytes=100, figures={"peak_rss": Figure(100, 105, 110)})}
ABOVE_IT = {"s": Series("ok", 2, model_bytes=100, figures={"peak_rss": Figure(100, 105, 111)})}
STRATEGIES = [replace(PLAIN, cell=replace(STREAMING, strategy=name)) for name in ("baseline", "streaming", "./mine.py")]  # fmt: skip
FOUND, LOST = search(6800), search(6800, step_mib=2000, strategy="lost")
LOST_BESIDE = Records([*FOUND.results, *LOST.results], coverage=SEARCH)
LOST_ONCE = summarise([FOUND, search(6800, step_mib=2000)])
PEAK = {"build": 10, "read": 900, "apply": 1000}

OUTCOMES = (
    (Outcome.OK, Outcome.OOM_KILLED), (Outcome.OK, Outcome.WRONG_WEIGHTS), (Outcome.OK, Outcome.SKIPPED),
    (Outcome.OOM_KILLED, Outcome.MEASUREMENT_FAILED), (Outcome.OOM_KILLED, Outcome.TIMEOUT),
    (Outcome.OOM_KILLED, Outcome.OOM_KILLED), (Outcome.WRONG_WEIGHTS, Outcome.WRONG_WEIGHTS),
    (Outcome.SKIPPED, Outcome.SKIPPED), (Outcome.MEASUREMENT_FAILED, Outcome.MEASUREMENT_FAILED),
    (Outcome.OOM_KILLED, Outcome.OK),
)  # fmt: skip
BAND = {"s": Series("ok", 3, figures={"peak_rss": Figure(990 * MIB, 1000 * MIB, 1050 * MIB)})}
A_MIB = Rules(dict.fromkeys(METRICS, Tolerance(0.0, MIB)))

CASES: dict[str, tuple[Measured | None, Measured, Rules]] = {
    "a run that is as it was passes": ([PLAIN], [PLAIN], Rules()),
    "a tensor that is kept is a regression of every memory metric": ([PLAIN], [KEPT], Rules()),
    "what shrank is an improvement": ([KEPT], [PLAIN], Rules()),
    "what grew from stream on": ([PLAIN], [grown(since=2)], Rules()),
    "what grew from touch on": ([PLAIN], [grown(since=3)], Rules()),
    "the phase of a peak is not one that grew below it": (
        one_series(PEAK, peak_rss=1000 * MIB), one_series(PEAK | {"build": 510, "apply": 1033}, peak_rss=1033 * MIB), Rules()),
    "the peaks of a kill that stays and is expected are not compared": (
        [DEAD], [replace(KEPT, outcome=Outcome.OOM_KILLED)], replace(Rules(), expected=tuple(parse_expected("streaming=oom_killed")))),
    "a repeat that fails is a regression": (
        REPEATED, [*REPEATED[:2], replace(REPEATED[2], outcome=Outcome.TIMEOUT, message="still running")], Rules()),
    "a series that was not measured fails, and a new one does not": ([PLAIN], [make_result(make_cell("mmap_assign"))], Rules()),
    "a metric that is no longer measured fails": (one_series(peak_rss=5, peak_cgroup=5), one_series(peak_rss=5), Rules()),
    "another model of the same name is not compared": ([PLAIN], [replace(KEPT, model_bytes=6753416200)], Rules()),
    "another torch fails, another kernel is said, and times are not judged": ([PLAIN], [ELSEWHERE], Rules()),
    "what a setting means can be chosen": ([PLAIN], [ELSEWHERE], KERNEL_ALONE),
    "times of cells that ran at once are not judged": ([PLAIN], [AT_ONCE], Rules()),
    "times are not judged if they ran at once before": ([AT_ONCE], [PLAIN], Rules()),
    "a budget is judged by the highest repeat": (None, ABOVE_IT, budgets("peak_rss <= 1.1 x model")),
    "a budget is kept by the highest repeat": (None, OF_THE_MODEL, budgets("peak_rss <= 1.1 x model")),
    "a budget whose pattern matches nothing names the strategies": (None, STRATEGIES, budgets("mine_loader: peak_rss <= 8GiB")),
    "a budget on a figure that the matching series lack": (None, [PLAIN], budgets("s*: floor <= 8GiB")),
    "a limit in a budget that some series do not have": (None, limited(a=10, b=None, c=None), budgets("peak_rss <= limit")),
    "a limit in a budget that no series has": (None, limited(b=None, c=None), budgets("peak_rss <= limit")),
    "lines in the order of their verdicts and of their excess": (
        None, one_series(peak_rss=100), budgets("peak_rss <= 90", "peak_rss <= 50", "peak_rss <= 200", "peak_rss <= 100")),
    "a failed series is judged if one of the budgets covers it": (
        None, {"s": Series("timeout", 1), "u": Series("timeout", 1)}, budgets("s: peak_rss <= 9", "t: peak_rss <= 9")),
    "a search is one series with its floor, whatever limits it tried": (FOUND, search(7100), Rules()),
    "a floor as it was": (FOUND, FOUND, Rules()),
    "a floor that was not found is missing": (FOUND, search(6800, step_mib=2000), Rules()),
    "a budget of a floor that was not found is not kept": (None, LOST_BESIDE, budgets("floor <= 7GiB")),
    "a budget of a floor that one of two runs did not find is not kept": (None, LOST_ONCE, budgets("floor <= 7GiB")),
    "figures are not compared with a series that was not ok": ({"s": replace(OK, outcome="timeout")}, {"s": OK}, Rules()),
    "figures of a series that is not ok are not compared": ({"s": OK}, {"s": replace(OK, outcome="timeout")}, Rules()),
    "a model of unknown size before": ({"s": OK}, {"s": replace(OK, model_bytes=5)}, Rules()),
    "a model of unknown size now": ({"s": replace(OK, model_bytes=5)}, {"s": OK}, Rules()),
    "an outcome that need not be expected any more": ({"s": LATE}, {"s": OK}, EXPECTING),
    "an outcome that is expected and was ok": ({"s": OK}, {"s": OK}, EXPECTING),
    "an outcome that is new": ({"s": OK}, {"s": OK, "t": LATE}, Rules({})),
    "a new phase counts from the highest of before, and a time from nothing": (
        with_phases(read={"peak_rss": 50, "time": 5}, apply={"peak_rss": 70}, odd={}),
        with_phases(read={"peak_rss": 60, "time": 7}, new={"peak_rss": 90, "time": 4}, odd={"x": 1}), Rules()),
    **{f"{was}, then {now}": ([replace(PLAIN, outcome=was)], [replace(PLAIN, outcome=now)], Rules()) for was, now in OUTCOMES},
    **{f"{now} B beside repeats of 990 to 1050 MiB, of which each may be 1 MiB more": (BAND, one_series(peak_rss=now), A_MIB)
       for now in (1051 * MIB, 1051 * MIB + 1, 989 * MIB, 989 * MIB - 1)},
}  # fmt: skip


def test_what_is_judged_of_two_runs(same: Compare) -> None:
    same(
        "judgements.txt",
        "\n".join(f"{name}\n{printed(judged(*one))}" for name, one in CASES.items()),
    )


def printed(judgement: GateResult) -> str:
    """Each line, and of a figure that is another one its phases: "*" marks the one that is said to have grown."""
    unchanged = [one for one in judgement.lines if one.verdict is LineVerdict.SAME and one.was == one.now and not one.is_budget]  # fmt: skip
    lines = [f"as before: {', '.join(one.what for one in unchanged)}"] if unchanged else []
    for one in judgement.lines:
        if one in unchanged and not any(phase.step for phase in one.phases):
            continue
        figures = f"{one.was} -> {one.now}, allowed {one.allowed}, excess {one.excess:.4f}"
        said = figures if one.metric else one.text
        lines.append(f"{one.verdict} | {one.series} | {one.what} | {said}")
        for phase in one.phases:
            mark = "*" if phase == one.grown else " "
            lines.append(f" {mark} {phase.phase} {phase.was} -> {phase.now}, step {phase.step}")
    lines += [f"note: {note}" for note in judgement.notes]
    return "".join(f"  {line}\n" for line in lines)


def figure_line(was: dict[str, Series], now: int, tolerance: Tolerance) -> Line:
    rules = Rules(dict.fromkeys(METRICS, tolerance))
    [line] = [one for one in judged(was, one_series(peak_rss=now), rules).lines if one.metric]
    return line


@given(
    was=st.integers(1, 10**13),
    step=st.integers(-(10**12), 10**12),
    relative=st.floats(0, 1),
    absolute=st.integers(0, 10**12),
)
def test_a_figure_regresses_exactly_beyond_the_larger_of_share_and_amount(
    was: int, step: int, relative: float, absolute: int
) -> None:
    line = figure_line(one_series(peak_rss=was), was + step, Tolerance(relative, absolute))
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
    phases = tuple(Growth(name, 10, 10 + step, step) for name, step in zip("abc", steps, strict=False))  # fmt: skip
    metric = METRICS["peak_rss"]
    line = Line(LineVerdict.SAME, "s", "", metric=metric, was=100, now=200, phases=phases)
    assert (line.grown.phase if line.grown else "") == phase


@pytest.mark.parametrize(
    ("direction", "found"),
    [
        ("lower", [(115, 0.15), (115, -0.55)]),
        ("higher", [(85, -0.45), (85, 0.25)]),
        ("both", [(115, 0.15), (85, 0.25)]),
    ],
)
def test_the_worst_figure_that_passes_is_said(
    direction: Any, found: list[tuple[int, float]]
) -> None:
    was = {"s": Series("ok", 3, figures={"peak_rss": Figure(90, 100, 110)})}
    lines = [figure_line(was, now, Tolerance(0.0, 5, direction)) for now in (130, 60)]
    assert [(line.allowed, line.excess) for line in lines] == found
