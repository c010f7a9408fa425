"""The page for a person who has to choose a loader is written from a run's own records."""

from dataclasses import replace

from factories import SCRIPTS, make_cell, make_result

from pages.loaders import HEADINGS, page
from weighin.result import SCHEMA, Outcome, Result
from weighin.units import MIB


def measured(strategy: str, ready_s: float, repeat: int = 0, cache: str = "cold") -> Result:
    cell = make_cell(strategy, ram_limit_bytes=None, repeat=repeat, cache=cache)
    result = make_result(cell, SCRIPTS[strategy])
    ready_ns = round(ready_s * 1e9)
    return replace(result, load_ns=ready_ns // 2, ready_ns=ready_ns)


def skipped(strategy: str, why: str) -> Result:
    return Result(SCHEMA, make_cell(strategy), Outcome.SKIPPED, why)


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[word.strip() for word in line.strip("|").split("|")] for line in lines]


def test_the_fastest_comes_first_with_the_median_of_its_repeats() -> None:
    results = [
        measured("mmap_assign", 5.0), measured("streaming", 3.0), measured("streaming", 9.0, 1),
        measured("streaming", 4.0, 2),
    ]  # fmt: skip
    floors = {results[0].cell.series: 400 * MIB}
    heads, _, first, second = rows(page([results], floors))
    assert tuple(heads) == (*HEADINGS, "ready, cold")
    assert (first[0], first[5]) == ("streaming", "4.00 s")
    assert (second[0], second[3], first[3]) == ("mmap_assign", "400", "-")


def test_each_run_of_a_model_adds_its_times() -> None:
    cold = [measured("mmap_assign", 5.0), measured("streaming", 3.0)]
    warm = [measured("mmap_assign", 1.0, cache="warm")]
    heads, _, first, second = rows(page([cold, warm], {}))
    assert heads[5:] == ["ready, cold", "ready, warm"]
    assert (first[0], *first[5:]) == ("streaming", "3.00 s", "-")
    assert (second[0], *second[5:]) == ("mmap_assign", "5.00 s", "1.00 s")


def test_private_memory_is_what_is_left_above_the_import() -> None:
    _, _, streamed, mapped = rows(
        page([[measured("streaming", 3), measured("mmap_assign", 5)]], {})
    )
    assert (streamed[4], mapped[4]) == ("6461", "215")


def test_what_is_not_in_the_table_has_its_reason() -> None:
    text = page([[measured("streaming", 3.0), skipped("runai", "runai needs x: install y")]], {})
    assert "Not in the table:\n\n* runai: needs x: install y\n" in text


def test_strategies_that_share_a_reason_are_named_together() -> None:
    others = [
        skipped(
            "dcp_fsdp",
            "dcp_fsdp divides a load among several processes, so it needs --ranks 2 or more",
        ),
        skipped("runai", "runai needs x: install y"),
        skipped(
            "staggered",
            "staggered divides a load among several processes, so it needs --ranks 2 or more",
        ),
        skipped("eager", "needs 3 keys converted, and eager expects the model's own keys"),
    ]
    _, _, reasons = page([[measured("streaming", 3.0), *others]], {}).partition("table:\n\n")
    assert reasons.splitlines()[:3] == [
        "* dcp_fsdp, staggered: divides a load among several processes, so it needs --ranks 2 or"
        " more",
        "* runai: needs x: install y",
        "* eager: needs 3 keys converted, and expects the model's own keys",
    ]


def test_a_run_of_which_nothing_was_measured_has_no_table() -> None:
    assert rows(page([[skipped("runai", "why")], []], {})) == []


def test_the_number_of_repeats_is_said() -> None:
    one, two = (
        [measured("streaming", 3.0)],
        [measured("streaming", 3.0), measured("streaming", 4.0, 1)],
    )
    assert " · 1 repeat\n" in page([one], {})
    assert " · 2 repeats\n" in page([two], {})
    assert " · 1 to 2 repeats\n" in page([[*two, measured("mmap_assign", 5.0)]], {})
