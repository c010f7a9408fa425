"""Budgets as text: what they mean, that what is printed can be read, and what cannot be."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighin.errors import ConfigError
from weighin.gate.budgets import Budget, Term, parse
from weighin.records.metrics import METRICS
from weighin.records.series import Series
from weighin.units import GIB, MIB

SERIES = Series("ok", 1, model_bytes=1000, limit_bytes=4000)
EXAMPLES = (
    'write a budget such as "peak_rss <= 1.1 x model + 64MiB above import", "floor <= 8GiB" or'
    ' "streaming: anon <= model + 300MiB"'
)


@pytest.mark.parametrize(
    ("text", "normal", "bound"),
    [
        ("peak_rss <= 1.1 x model", "peak_rss <= 1.1 x model", 1100),
        ("peak_rss<=1.1*model", "peak_rss <= 1.1 x model", 1100),
        ("rss < 8g", "peak_rss < 8GiB", 8 * GIB),
        ("anon <= model + 300 MiB", "anon <= model + 300MiB", 1000 + 300 * MIB),
        ("peak_cgroup <= .5x limit", "peak_cgroup <= 0.5 x limit", 2000),
        ("streaming: anon <= 2 x model", "streaming: anon <= 2 x model", 2000),
        ("*_assign:ready <= 2.5 s", "*_assign: ready <= 2.5 s", 2_500_000_000),
        ("load < 150ms", "load < 0.15 s", 150_000_000),
        (
            "peak_rss <= 1.1 x model + 64 MiB above import",
            "above_import <= 1.1 x model + 64MiB",
            1100 + 64 * MIB,
        ),
        (
            "streaming: above_import < 1GiB above import",
            "streaming: above_import < 1GiB",
            GIB,
        ),
        ("mynets:build*: anon <= 8", "mynets:build*: anon <= 8B", 8),
    ],
)
def test_what_a_budget_says(text: str, normal: str, bound: int) -> None:
    budget = parse(text)
    assert str(budget) == normal
    assert parse(normal) == budget
    assert budget.bound(SERIES) == bound


def test_a_bound_that_a_series_does_not_have() -> None:
    assert parse("anon <= model").bound(Series("ok", 1)) is None
    assert parse("anon <= limit").bound(Series("ok", 1, model_bytes=5)) is None


def test_less_and_at_most() -> None:
    assert parse("anon <= 8").is_kept(8, 8)
    assert not parse("anon < 8").is_kept(8, 8)
    assert not parse("anon <= 8").is_kept(9, 8)


def test_which_series_a_pattern_covers() -> None:
    name = "gpt2-small mmap_assign pt float32 cpu cold docker ram=2GiB"
    covered = ["mmap_assign", "mmap*", "gpt2-small", "ram=2GiB", "*"]
    assert [parse(f"{one}: anon < 1").covers(name) for one in covered] == [True] * 5
    assert not parse("mmap: anon < 1").covers(name)


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
            "ready <= 8",
            "cannot read the budget 'ready <= 8': cannot read '8' as a duration",
            "write a duration such as 2.5 s, 150 ms or 3 min",
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
        parse(text)
    assert str(caught.value) == f"{message}\n{repair}"


references = st.builds(
    Term,
    factor=st.floats(0, 1e12, exclude_min=True).filter(lambda factor: factor != 0),
    reference=st.sampled_from(["model", "limit"]),
)
amounts = st.builds(Term, amount=st.integers(1, 10**15))


@st.composite
def any_budget(draw: st.DrawFn) -> Budget:
    metric = METRICS[draw(st.sampled_from(sorted(METRICS)))]
    terms = references | amounts if metric.unit == "bytes" else amounts
    return Budget(
        metric,
        draw(st.sampled_from(["<=", "<"])),
        tuple(draw(st.lists(terms, min_size=1, max_size=3))),
        draw(st.sampled_from(["*", "streaming", "*_assign", "ram=2GiB"])),
    )


@given(any_budget())
def test_what_is_printed_of_a_budget_can_be_read(budget: Budget) -> None:
    assert parse(str(budget)) == budget
