"""The steps of a conversion that computes each part of its result by itself."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

import torch

from weighin.formats.base import TensorSlice

PIECE_ELEMENTS: Final = 64 * 1024
"""The elements of one step: few enough that the C library keeps little of the freed memory."""

Source = tuple[str, TensorSlice]
"""A tensor of the file, and the pattern of the converter that its name matched."""


@dataclass(frozen=True, slots=True)
class Step:
    """A part of a conversion: parts of its sources, and the place in the result that they give.

    ``given`` has the values of the sources that a step does not read, by their patterns.
    """

    sources: tuple[Source, ...]
    place: tuple[slice, ...]
    given: Mapping[str, torch.Tensor] = field(default_factory=dict)


Divide = Callable[[dict[str, TensorSlice], torch.Tensor], Iterable[Step] | None]
"""Returns the steps of a conversion with these sources and this result; None if it has none."""


def of_rows(
    rows: range, unit: int, columns: int, part: Callable[[int, int], tuple[Source, ...]]
) -> Iterator[Step]:
    """Yield a step for each few of the rows: a multiple of ``unit``, except the last ones."""
    many = max(1, PIECE_ELEMENTS // max(1, unit * columns)) * unit
    for first in rows[::many]:
        last = min(first + many, rows.stop)
        yield Step(part(first, last), (slice(first, last),))


def rows_in(step: Step) -> int:
    """Return the number of rows of the result that a step gives."""
    return int(step.place[0].stop - step.place[0].start)


def rows_of(where: TensorSlice, first: int, last: int) -> TensorSlice:
    """Return some rows of a contiguous tensor."""
    row_bytes = where.nbytes // where.shape[0]
    return replace(
        where, shape=(last - first, *where.shape[1:]), offset=where.offset + first * row_bytes
    )
