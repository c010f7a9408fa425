"""Summarise the repeats of a measurement: medians, outcomes, and the last record of each cell."""

from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from weighin.result import Outcome, Result

_Number = TypeVar("_Number", int, float)
_Item = TypeVar("_Item")
_Key = TypeVar("_Key", bound=Hashable)


def middle(values: Iterable[_Number | None]) -> _Number | None:
    """Return the median of the values that are not None; None if there are no such values.

    For an even number of values, the result is the lower one of the two middle values, so that the
    result itself was measured.
    """
    known = sorted(value for value in values if value is not None)
    return known[(len(known) - 1) // 2] if known else None


def largest(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Return the items in groups of equal keys; groups and items keep the order of ``items``."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def latest(results: Iterable[Result]) -> list[Result]:
    """Return the last record of each cell, in the order of the cells' first records."""
    return list({result.cell.id: result for result in results}.values())


def outcome_of(outcomes: Iterable[Outcome]) -> str:
    """Return the outcome that all repeats share, else all with their counts: "ok 2, timeout 1"."""
    counts = Counter(outcomes)
    if len(counts) == 1:
        return next(iter(counts)).value
    return ", ".join(f"{outcome.value} {count}" for outcome, count in counts.items())
