"""``make self-bench``: what it computes from its readings, and what its page says of them."""

from dataclasses import replace

import pytest
from factories import ENVIRONMENT, make_result
from known_commands import KNOWN
from own_figures import amounts, page
from own_figures.amounts import Amounts
from own_figures.cells import CellCost, Costs
from own_figures.sampling import Sampled
from own_figures.spread import Gaps, Spread, errors

from weighin.result import Cost
from weighin.units import MIB

MS = 1_000_000
SPEND = next(one for one in KNOWN if one.id == "spend 256 5")
ABOUT = ENVIRONMENT | {"cpus": 2, "ram_bytes": 2**34, "python": "3.11.2", "weighin": "1.0", "git_commit": "c0ffee" * 6}  # fmt: skip


def test_gaps_are_the_times_between_samples_and_not_the_samples_themselves() -> None:
    gaps = Gaps.between([7 * MS, 12 * MS, 17 * MS, 22 * MS, 52 * MS])
    assert gaps == Gaps(median_ns=5 * MS, most_ns=30 * MS, largest_ns=30 * MS)


def test_one_gap_of_a_hundred_may_be_longer_than_the_99_percent() -> None:
    steps = [*range(1, 100), 5000]
    times = [sum(steps[:count]) for count in range(len(steps) + 1)]
    assert Gaps.between(times) == Gaps(median_ns=50, most_ns=99, largest_ns=5000)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([3.0, 1.0, 2.0], "2.00 (1.00-3.00)"),
        ([4.0, 1.0], "1.00 (1.00-4.00)"),  # the lower one of two, which was measured
        ([2.001, 2.002], "2.00"),
    ],
)
def test_the_range_stands_beside_the_median_if_it_differs(values: list[float], text: str) -> None:
    assert Spread.of(values).text(1, 2) == text


def test_errors_are_shares_of_the_truth_on_both_sides() -> None:
    assert errors([(110, 100), (60, 100), (50, 25)]) == pytest.approx((-0.4, 1.0))


def cost_of_a_cell() -> CellCost:
    """The cost of a cell of 20 s: its worker's phases last from 0.5 s to 19 s."""
    result = make_result()
    phases = [result.phases[0], result.phases[-1]]
    begun_ns = 1000 * MS
    phases[0] = replace(phases[0], start_ns=begun_ns + 500 * MS)
    phases[1] = replace(phases[1], end_ns=begun_ns + 19_000 * MS)
    cost = Cost(wall_ns=0, import_ns=2000 * MS, load_ns=10_000 * MS, touch_ns=700 * MS, first_use_ns=3000 * MS)  # fmt: skip
    result = replace(result, phases=tuple(phases), cost=cost)
    return CellCost.of(result, begun_ns, begun_ns + 20_000 * MS, cpu_ns=250 * MS)


def test_the_parts_of_a_cell_add_up_to_its_wall_time() -> None:
    found = cost_of_a_cell()
    assert (found.before_ns, found.after_ns) == (500 * MS, 1000 * MS)
    assert (found.load_ns, found.checks_ns) == (15_000 * MS, 3500 * MS)
    assert found.added_ns + found.load_ns == 20_000 * MS


def test_a_load_without_a_forward_pass_has_no_time_of_it() -> None:
    result = make_result()
    result = replace(result, cost=Cost(wall_ns=0, import_ns=2, load_ns=3))
    assert CellCost.of(result, 0, 0, 0).load_ns == 5


def test_the_page_has_a_row_for_each_figure_and_a_reason_for_each_that_is_missing() -> None:
    costs = Costs(
        {"process": [cost_of_a_cell()], "docker": []},
        {"docker": "no engine answers"},
        [20 * MS],
        ABOUT,
        512 * MIB,
    )
    gaps = Gaps(5 * MS, 6 * MS, 17 * MS)
    sampled = [
        Sampled("load", "process", 5, is_busy=busy, share=share, gaps=gaps)
        for busy, share in ((False, 0.012), (True, 0.004))
    ]
    figures = {amounts.MAX_RSS: [320 * MIB, 330 * MIB], amounts.NOTEBOOK: [64 * MIB, 320 * MIB]}
    known = Amounts([SPEND], {SPEND.id: figures}, {amounts.OPTIMUM: "it is not installed"}, "")
    text = page.text(costs, sampled, known, seconds=5, load_average=0.125)
    lines = text.splitlines()
    assert "| process | 0.50 | 3.50 | 1.00 | 5.00 | 15.00 | 0.25 |" in lines
    assert "The table lacks docker: no engine answers." in lines
    assert (
        "| a load | process | 5 ms | 1.2% / 0.4% | 5.0 / 5.0 | 6.0 / 6.0 | 17.0 / 17.0 |" in lines
    )
    assert "| spend 256 5 | 320 | 320.0 (320.0-330.0) | 64.0 (64.0-320.0) |" in lines
    assert "| errors |  | +0.0% to +3.1% | -80.0% to +0.0% |" in lines
    assert "The table lacks optimum-benchmark: it is not installed." in lines
    assert "Example CPU" in text
    assert f" with weighin commit {ABOUT['git_commit'][:10]}" in text
