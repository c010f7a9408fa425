"""Compute coordinates of axes, labels and lines for the drawings of report.html."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, log10
from typing import Final

_STEPS: Final = (1, 2, 2.5, 5, 10)  # distances of ticks, each to be multiplied by a power of ten
_NEARLY: Final = 1 - 1e-9  # the last tick may exceed the axis by a rounding error of floats
_LETTER: Final = 0.56  # mean width of a letter / font size


@dataclass(frozen=True, slots=True)
class Axis:
    """A linear axis: the value 0 is at the position ``start``, and the value ``top`` at ``end``."""

    top: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the position of a value; a value above ``top`` is at the end of the axis."""
        share = min(max(value / self.top, 0.0), 1.0)
        return round(self.start + share * (self.end - self.start), 1)

    def ticks(self, most: int = 5) -> list[tuple[float, str]]:
        """Return the position and the text of at most ``most`` + 1 round values on the axis."""
        least = self.top / most
        scale = 10.0 ** floor(log10(least))
        step = next(one * scale for one in _STEPS if one * scale >= least * _NEARLY)
        values = (number * step for number in range(most + 1))
        return [(self.at(value), f"{value:g}") for value in values if value * _NEARLY <= self.top]


@dataclass(frozen=True, slots=True)
class Label:
    """A text beside a point; ``anchor`` says whether ``x`` is the start, middle or end of the text."""

    text: str
    x: float
    y: float
    anchor: str


@dataclass(frozen=True, slots=True)
class _Box:
    left: float
    top: float
    right: float
    bottom: float

    def overlap(self, other: "_Box") -> float:
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.bottom, other.bottom) - max(self.top, other.top)
        return max(width, 0.0) * max(height, 0.0)


def place_labels(
    points: Sequence[tuple[float, float, str]], width: float, height: float, font: float
) -> list[Label]:
    """Return a label beside each point (x, y, name), at a place where it covers little else.

    Eight places around each point are tried. The best one overlaps least with other points and with
    labels placed before, and does not leave the area ``width`` x ``height``.
    """
    taken = [_Box(x - 6, y - 6, x + 6, y + 6) for x, y, _ in points]
    labels = []
    for index, (x, y, name) in enumerate(points):
        others = taken[:index] + taken[index + 1 :]
        length = len(name) * font * _LETTER
        tries = []
        for rank, (dx, dy, anchor) in enumerate(_places(font)):
            left = x + dx - {"start": 0.0, "middle": length / 2, "end": length}[anchor]
            box = _Box(left, y + dy - font * 0.8, left + length, y + dy + font * 0.25)
            outside = max(-box.left, 0) + max(box.right - width, 0)
            outside += max(-box.top, 0) + max(box.bottom - height, 0)
            covered = sum(box.overlap(other) for other in others)
            tries.append((round(covered + 100 * outside, 1), rank, box, dx, dy, anchor))
        _, _, box, dx, dy, anchor = min(tries, key=lambda one: one[:2])
        taken.append(box)
        labels.append(Label(name, round(x + dx, 1), round(y + dy, 1), anchor))
    return labels


def _places(font: float) -> list[tuple[float, float, str]]:
    side, rise = 9.0, font * 0.35
    return [
        (side, rise, "start"), (-side, rise, "end"),
        (0.0, -9.0, "middle"), (0.0, 8.0 + font * 0.8, "middle"),
        (side, -font * 0.6, "start"), (side, font * 1.3, "start"),
        (-side, -font * 0.6, "end"), (-side, font * 1.3, "end"),
    ]  # fmt: skip


def pareto_front(points: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the Pareto front sorted by x: the points to whose lower left no other point lies."""
    front: list[tuple[float, float]] = []
    for x, y in sorted(set(points)):
        if not front or y < front[-1][1]:
            front.append((x, y))
    return front


def path(points: Iterable[tuple[float, float]]) -> str:
    """Return a path of straight lines through the points, as the SVG attribute ``d``."""
    return "M" + "L".join(f"{x:g},{y:g}" for x, y in points)
