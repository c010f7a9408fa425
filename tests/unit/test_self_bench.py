"""``make self-bench``: what it computes from its readings, and the blocks of its page."""

from dataclasses import replace
from functools import partial

import pytest
from factories import make_result
from page_blocks import filled
from rounds import interleaved, ratios, spread
from self_bench import amounts, cost_of

from weighin.result import Cost
from weighin.units import MIB

MS = 1_000_000


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([3.0, 1.0, 2.0], "2.00 (1.00-3.00)"),
        ([4.0, 1.0], "1.00 (1.00-4.00)"),  # the lower one of two, which was measured
        ([2.001, 2.002], "2.00"),
    ],
)
def test_the_range_stands_beside_the_median_if_it_differs(values: list[float], text: str) -> None:
    assert spread(values) == text


def test_each_way_is_taken_once_in_each_round() -> None:
    taken: list[str] = []

    def take(name: str) -> str:
        taken.append(name)
        return name

    found = interleaved({name: partial(take, name) for name in "abc"}, 5)
    assert found == {name: [name] * 5 for name in "abc"}
    rounds = [taken[at : at + 3] for at in range(0, 15, 3)]
    assert (
        all(sorted(one) == ["a", "b", "c"] for one in rounds) and len(set(map(tuple, rounds))) > 1
    )
    assert list(ratios([4, 9], [2, 3])) == [2, 3]


def test_the_parts_of_a_cell_add_up_to_its_wall_time() -> None:
    result, begun_ns = make_result(), 1000 * MS
    first, last = result.phases[0], result.phases[-1]
    phases = (replace(first, start_ns=begun_ns + 500 * MS), replace(last, end_ns=begun_ns + 19_000 * MS))  # fmt: skip
    cost = Cost(wall_ns=0, import_ns=2000 * MS, load_ns=10_000 * MS, touch_ns=700 * MS, first_use_ns=3000 * MS)  # fmt: skip
    result = replace(result, phases=phases, cost=cost)
    before, checks, after, added, load, cpu = cost_of(result, begun_ns, 21_000 * MS, 250 * MS)
    assert (before, checks, after, load, cpu) == (
        500 * MS,
        3500 * MS,
        1000 * MS,
        15_000 * MS,
        250 * MS,
    )
    assert added + load == 20_000 * MS
    assert cost_of(replace(result, cost=Cost(wall_ns=0, import_ns=2, load_ns=3)), 0, 0, 0)[4] == 5


def test_errors_are_shares_of_the_truth_and_a_missing_tool_has_its_reason() -> None:
    found = {("spend", "a"): [320 * MIB, 330 * MIB], ("spend", "b"): [64 * MIB, 320 * MIB]}
    lines = amounts(
        {"spend": 320 * MIB}, ["a", "b"], found, {"c": "it is not installed"}
    ).splitlines()
    assert lines[2:] == [
        "| spend | 320 | 320.0 (320.0-330.0) | 64.0 (64.0-320.0) |",
        "| errors |  | +0.0% to +3.1% | -80.0% to +0.0% |",
        "",
        "The table lacks c: it is not installed.",
    ]


def test_a_benchmark_writes_its_blocks_into_a_page_and_nothing_else() -> None:
    page = "a\n<!-- x.py one -->\nold\n<!-- end -->\nb\n<!-- x.py two -->\nkept\n<!-- end -->\n"
    assert filled(page, {"x.py one": r"new \1"}) == page.replace("old", r"new \1")
    with pytest.raises(ValueError, match="no block <!-- y -->"):
        filled(page, {"y": ""})
