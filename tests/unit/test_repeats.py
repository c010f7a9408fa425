from dataclasses import replace

from factories import make_cell, make_result

from weighin.records.metrics import grouped, largest, latest, middle, outcome_of
from weighin.result import Outcome, Result
from weighin.units import GIB

SECONDS = (20, 5, 10, 25)


def four_repeats() -> list[Result]:
    results = [make_result(make_cell(repeat=number)) for number in range(4)]
    return [
        replace(each, ready_ns=s * 10**9, peaks=replace(each.peaks, rss_bytes=s * GIB))
        for each, s in zip(results, SECONDS, strict=True)
    ]


def test_the_median_of_an_even_number_of_repeats_is_the_lower_of_the_middle_two() -> None:
    assert middle([20, None, 5, 10, 25]) == 10
    assert middle([None]) is None


def test_the_median_of_an_odd_number_is_the_middle_one() -> None:
    assert middle([3]) == 3
    assert middle([9, 1, 4]) == 4
    assert middle(iter([2, 1])) == 1
    assert middle([]) is None


def test_the_largest_of_the_known_values() -> None:
    assert largest([None, 3, 7, None, 5]) == 7
    assert largest([0, None]) == 0
    assert largest([None]) is largest([]) is None


def test_groups_keep_the_order_of_their_items() -> None:
    assert grouped([3, 1, 4, 1, 5, 9], lambda one: one % 2) == {1: [3, 1, 1, 5, 9], 0: [4]}
    assert list(grouped("ba", str)) == ["b", "a"]


def test_the_last_record_of_a_cell_counts_at_the_place_of_the_first() -> None:
    first, other = make_result(make_cell()), make_result(make_cell(repeat=1))
    again = replace(first, message="again")
    assert latest([first, other, again]) == [again, other]


def test_the_outcome_of_repeats_is_one_or_is_counted() -> None:
    assert outcome_of([Outcome.OK, Outcome.OK]) == "ok"
    assert outcome_of([Outcome.TIMEOUT]) == "timeout"
    assert outcome_of([Outcome.OK, Outcome.TIMEOUT, Outcome.OK]) == "ok 2, timeout 1"
