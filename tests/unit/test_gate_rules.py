"""Rules as text: what budgets, tolerances, expected outcomes and policies mean, and what cannot be."""

from collections.abc import Callable
from pathlib import Path

from factories import make_cell
from snapshots import Compare, answered

from weighin.cell import ModelSpec
from weighin.errors import HarnessError
from weighin.gate.rules import Rules, parse_budget, parse_expected, parse_tolerance
from weighin.records.metrics import Tolerance
from weighin.records.series import Series, name_of, selects

RULES = Path(__file__).with_name("snapshots") / "gate_rules.txt"
"""Rules, and how they are read, or what is wrong. Add a line ``$ KIND TEXT``; ``pytest --rewrite``."""
SERIES = Series("ok", 1, model_bytes=1000, limit_bytes=4000)


def budget(text: str) -> str:
    read = parse_budget(text)
    assert str(read) == text
    return f"{read.metric.name} of {read.selector!r}: {read.bound(SERIES)}"


KINDS: dict[str, Callable[[str], object]] = {
    "budget": budget,
    "tolerance": parse_tolerance,
    "expect": lambda text: "\n".join(map(repr, parse_expected(text))),
    "setting": lambda text: Rules().typed(settings=[text]).policies,
}


def test_how_a_rule_is_read(same: Compare) -> None:
    def answer(question: str) -> str:
        kind, _, text = question.partition(" ")
        try:
            return str(KINDS[kind](text.replace("\\n", "\n")))
        except HarnessError as error:
            return str(error)

    same(RULES.name, answered(RULES, answer))


def test_a_budget_has_the_bound_of_a_series_or_none() -> None:
    assert parse_budget("anon <= model").bound(Series("ok", 1)) is None
    assert parse_budget("anon <= limit").bound(Series("ok", 1, model_bytes=5)) is None
    assert parse_budget("anon <= 8").is_kept(8, 8)
    assert not parse_budget("anon < 8").is_kept(8, 8)
    assert not parse_budget("anon <= 8").is_kept(9, 8)


def test_which_series_a_selector_covers() -> None:
    name = "gpt2-small mmap_assign pt float32 cpu cold docker ram=2GiB"
    covered = ["mmap_assign", "mmap*", "gpt2-small", "ram=2GiB", "*"]
    assert all(selects(parse_budget(f"{one}: anon < 1").selector, name) for one in covered)
    assert not selects(parse_budget("mmap: anon < 1").selector, name)
    spec = ModelSpec("build", "mynets:build", {"width": 64, "deep": [1, 2]})
    [one] = parse_expected("mynets:build(deep=[1,2],width=64)=skipped")
    assert selects(one.selector, name_of(make_cell(model=spec)))
    assert not selects(one.selector, name_of(make_cell()))


def test_what_is_typed_comes_before_what_was_written() -> None:
    written = Rules().typed(
        ["anon <= 1g"], ["a=timeout"], ["load=off", "anon=5%"], ["cpu=fail", "kernel=warn"]
    )
    rules = written.typed(["rss <= 1g"], ["b=timeout"], ["anon=off", "load=1s"], ["k*=ignore"])
    assert [str(one) for one in rules.budgets] == ["anon <= 1g", "rss <= 1g"]
    assert [str(one) for one in rules.expected] == ["a=timeout", "b=timeout"]
    assert "anon" not in rules.tolerances and rules.tolerances["load"] == Tolerance(0.0, 10**9)
    assert [*rules.policies.items()] == [("k*", "ignore"), ("cpu", "fail"), ("kernel", "warn")]
    again = written.typed(settings=["cpu=ignore"]).policies  # the same setting again
    assert [*again.items()] == [("cpu", "ignore"), ("kernel", "warn")]
    assert {*rules.only(["anon", "rss"]).tolerances} == {"anon", "peak_rss"}
    assert rules.only([]) == rules
