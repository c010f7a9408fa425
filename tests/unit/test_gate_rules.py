"""Rules as text: what budgets, tolerances, expected outcomes and policies mean, and what cannot be."""

import re

import pytest
from factories import make_cell

from weighin.cell import ModelSpec
from weighin.errors import ConfigError
from weighin.gate.rules import Expectation, Rules, parse_budget, parse_expected, parse_tolerance
from weighin.records.metrics import METRICS, Tolerance
from weighin.records.series import Series, name_of, selects
from weighin.result import Outcome
from weighin.units import GIB, MIB

SERIES = Series("ok", 1, model_bytes=1000, limit_bytes=4000)
EXAMPLES = (
    'write a budget such as "peak_rss <= 1.1 x model + 64MiB above import", "floor <= 8GiB" or'
    ' "streaming: anon <= model + 300MiB"'
)


@pytest.mark.parametrize(
    ("text", "metric", "bound"),
    [
        ("peak_rss <= 1.1 x model", "peak_rss", 1100),
        ("peak_rss<=1.1*model", "peak_rss", 1100),
        ("rss < 8g", "peak_rss", 8 * GIB),
        ("anon <= model + 300 MiB", "anon", 1000 + 300 * MIB),
        ("peak_cgroup <= .5x limit", "peak_cgroup", 2000),
        ("*_assign:ready <= 2.5 s", "ready", 2_500_000_000),
        ("load < 150ms", "load", 150_000_000),
        ("peak_rss <= 1.1 x model + 64 MiB above import", "above_import", 1100 + 64 * MIB),
        ("streaming: above_import < 1GiB above import", "above_import", GIB),
        ("mynets:build*: anon <= 8", "anon", 8),
    ],
)
def test_what_a_budget_says(text: str, metric: str, bound: int) -> None:
    budget = parse_budget(text)
    assert (str(budget), budget.metric.name, budget.bound(SERIES)) == (text, metric, bound)


def test_a_bound_that_a_series_does_not_have() -> None:
    assert parse_budget("anon <= model").bound(Series("ok", 1)) is None
    assert parse_budget("anon <= limit").bound(Series("ok", 1, model_bytes=5)) is None


def test_less_and_at_most() -> None:
    assert parse_budget("anon <= 8").is_kept(8, 8)
    assert not parse_budget("anon < 8").is_kept(8, 8)
    assert not parse_budget("anon <= 8").is_kept(9, 8)


def test_which_series_a_selector_covers() -> None:
    name = "gpt2-small mmap_assign pt float32 cpu cold docker ram=2GiB"
    covered = ["mmap_assign", "mmap*", "gpt2-small", "ram=2GiB", "*"]
    assert all(selects(parse_budget(f"{one}: anon < 1").selector, name) for one in covered)
    assert not selects(parse_budget("mmap: anon < 1").selector, name)


@pytest.mark.parametrize(
    ("text", "message", "repair"),
    [
        ("peak_rss", "cannot read the budget 'peak_rss'", EXAMPLES),
        ("peak_rss >= 1g", "cannot read the budget 'peak_rss >= 1g'", EXAMPLES),
        (
            "peak_rss <= 8 GB",
            "cannot read the budget 'peak_rss <= 8 GB': '8 GB' is ambiguous: GB is 1000-based for some"
            " tools and 1024-based for others",
            "write 8GiB (1024-based), or the number of bytes",
        ),
        (
            "anon <= 2 x model above import",
            "cannot read the budget 'anon <= 2 x model above import': 'above import' is possible"
            " for peak_rss and above_import, but not for anon",
            'write a budget such as "peak_rss <= 1.1 x model + 64MiB above import"',
        ),
        (
            "ready <= 2 x model",
            "cannot read the budget 'ready <= 2 x model': ready is a time, but model is a size",
            'write a duration, as in "ready <= 10 s"',
        ),
        (
            "peak_rs <= 8g",
            "no metric is called 'peak_rs'",
            f"did you mean 'peak_rss'? known: {', '.join(sorted(METRICS))}",
        ),
    ],
)
def test_what_is_no_budget(text: str, message: str, repair: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        parse_budget(text)
    assert str(caught.value) == f"{message}\n{repair}"


@pytest.mark.parametrize(
    ("text", "name", "tolerance"),
    [
        ("load=off", "load", None),
        ("peak_rss=2%", "peak_rss", Tolerance(0.02, 0)),
        ("ready = 30% 1 s", "ready", Tolerance(0.3, 10**9)),
        ("anon=64MiB", "anon", Tolerance(0.0, 64 * MIB)),
        ("cuda=both", "cuda_allocated", Tolerance(0.0, 0, "both")),
        ("anon=0.5% 1MiB higher", "anon", Tolerance(0.005, MIB, "higher")),
    ],
)
def test_what_a_tolerance_says(text: str, name: str, tolerance: Tolerance | None) -> None:
    assert parse_tolerance(text) == (name, tolerance)


@pytest.mark.parametrize("text", ["anon", "anon=", "anon=much", "ready=5MiB"])
def test_what_is_no_tolerance(text: str) -> None:
    with pytest.raises(ConfigError, match=f"cannot read the tolerance '{text}'"):
        parse_tolerance(text)


def test_what_is_typed_comes_before_what_was_written() -> None:
    written = Rules().typed(
        ["anon <= 1g"], ["a=timeout"], ["load=off", "anon=5%"], ["cpu=fail", "kernel=warn"]
    )
    rules = written.typed(["rss <= 1g"], ["b=timeout"], ["anon=off", "load=1s"], ["k*=ignore"])
    assert [str(one) for one in rules.budgets] == ["anon <= 1g", "rss <= 1g"]
    assert [str(one) for one in rules.expected] == ["a=timeout", "b=timeout"]
    assert "anon" not in rules.tolerances and rules.tolerances["load"] == Tolerance(0.0, 10**9)
    assert [*rules.policies.items()] == [("k*", "ignore"), ("cpu", "fail"), ("kernel", "warn")]
    assert {*rules.only(["anon", "rss"]).tolerances} == {"anon", "peak_rss"}
    assert rules.only([]) == rules
    for text in ("kernel", "kernel=maybe", "=warn"):
        with pytest.raises(ConfigError, match="cannot read --setting"):
            Rules().typed(settings=[text])


def test_what_expect_says() -> None:
    assert parse_expected("baseline=oom_killed, mmap_* ram=1GiB = timeout") == [
        Expectation("baseline", Outcome.OOM_KILLED),
        Expectation("mmap_* ram=1GiB", Outcome.TIMEOUT),
    ]
    spec = ModelSpec("build", "mynets:build", {"width": 64, "deep": [1, 2]})
    [one] = parse_expected("mynets:build(deep=[1,2],width=64)=skipped")
    assert selects(one.selector, name_of(make_cell(model=spec)))
    assert not selects(one.selector, name_of(make_cell()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("baseline", "cannot read --expect 'baseline'"),
        ("baseline=dead", "cannot read --expect 'baseline=dead'"),
        ("baseline=oom_killed,lossy", "cannot read --expect 'lossy'"),
        ("", "cannot read --expect ''"),
        ("bad\nbaseline=timeout", "cannot read --expect 'bad\\nbaseline=timeout'"),
        (
            "lossy=wrong_weights",
            "lossy=wrong_weights: wrong_weights cannot be an expected outcome: a failed strategy always fails a check",
        ),
        (
            "x=measurement_failed",
            "x=measurement_failed: measurement_failed cannot be an expected outcome: this"
            " outcome says nothing about the strategy",
        ),
        (
            "train.py=command_failed",
            "train.py=command_failed: command_failed cannot be an expected outcome: a failed strategy always fails a check",
        ),
    ],
)
def test_what_cannot_be_expected(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_expected(text)
    assert str(caught.value) == (
        f"{message}\nwrite an expected outcome as in baseline=oom_killed; outcomes that can be"
        " expected: oom_killed, child_killed, cuda_oom, timeout, thrashing, skipped"
    )


def test_a_typed_policy_replaces_the_file_s_policy_of_the_same_setting() -> None:
    written = Rules().typed(settings=["kernel=fail", "cpu=warn"])

    rules = written.typed(settings=["kernel=ignore"])

    assert [*rules.policies.items()] == [("kernel", "ignore"), ("cpu", "warn")]
