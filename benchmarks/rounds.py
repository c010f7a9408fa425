"""Take measurements in turn, and summarise what was repeated: medians with their range."""

import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median_low
from typing import TypeVar

_Name = TypeVar("_Name")
_Taken = TypeVar("_Taken")


def interleaved(
    ways: Mapping[_Name, Callable[[], _Taken]], rounds: int
) -> dict[_Name, list[_Taken]]:
    """Call each way once per round, in an order drawn anew for each; return what each gave, by round.

    A machine's speed drifts, so that only figures of one round are compared.
    """
    found: dict[_Name, list[_Taken]] = {name: [] for name in ways}
    shuffle = random.Random(0)  # noqa: S311 (varies which way comes before which)
    for _ in range(rounds):
        for name in shuffle.sample(list(ways), len(ways)):
            found[name].append(ways[name]())
    return found


def ratios(values: Sequence[float], others: Sequence[float]) -> Iterator[float]:
    """Yield the ratio within each round."""
    return map(operator.truediv, values, others)


def spread(values: Sequence[float], unit: float = 1, digits: int = 2) -> str:
    """Return the median with the range, in a unit: "2.00 (1.00-3.00)"; without one, if all print alike.

    Of an even number of values, the lower middle one counts, which was measured.
    """
    lowest, middle, highest = (
        f"{one / unit:.{digits}f}" for one in (min(values), median_low(values), max(values))
    )
    return middle if lowest == highest else f"{middle} ({lowest}-{highest})"
