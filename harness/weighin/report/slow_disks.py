"""Tabulate the times of loads from slow disks, and draw these times over disk rate and latency."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

from weighin.cell import Cell
from weighin.records.metrics import latest, middle, outcome_of, through_first_pass_ns
from weighin.records.series import label_among
from weighin.report import captions
from weighin.report import style as look
from weighin.report.findings import Found, of_texts
from weighin.report.rows import series
from weighin.result import Outcome, Result
from weighin.units import format_latency, format_rate, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HEADING: Final = "Slow disks"
NOTE: Final = (
    "Ready + first pass: the time until every byte of the model was read once, plus the first forward"
    " pass. The time of the load alone flatters a mapped model, which waits for the disk afterwards."
)
_BY: Final = ("rate", "latency")
_LINE: Final = "Dotted: the model's size divided by the rate."
_Disk = tuple[int | None, int | None]
"""A rate in bytes per second and a latency in nanoseconds; None means that the disk was not slowed."""


@dataclass(frozen=True, slots=True)
class _Row:
    """The repeats of a strategy in one ``scene`` (model, dtype, RAM limit, ...), grouped by disk."""

    name: str
    scene: str
    strategy: str
    by_disk: dict[_Disk, list[Result]]

    def seconds(self, disk: _Disk) -> float | None:
        """Return the median time until the first forward pass ended; None if no ok repeat ran a pass."""
        repeats = self.by_disk.get(disk, ())
        good = (each for each in repeats if each.outcome is Outcome.OK)
        time_ns = middle(map(through_first_pass_ns, good))
        return None if time_ns is None else time_ns / 1e9

    @property
    def model_bytes(self) -> int | None:
        repeats = chain.from_iterable(self.by_disk.values())
        return next((each.model_bytes for each in repeats if each.model_bytes), None)


def found(results: Sequence[Result]) -> list[Found]:
    """Return a table of the time of each strategy on each disk; an empty list if no disk was slowed."""
    if not any(result.cell.disk for result in results):
        return []
    disks, rows = _disks(results), _rows(results)
    several = len({row.scene for row in rows}) > 1
    fields = [
        [
            f"{row.name} ({row.scene})" if several else row.name,
            *(_field(row, disk) for disk in disks),
        ]
        for row in rows
    ]
    heads = ["strategy", *map(_words, disks)]
    return [Found(HEADING, heads, of_texts(fields), 1, _caption(results), [NOTE])]


def pictures(results: Sequence[Result]) -> "list[tuple[str, Callable[[], Figure]]]":
    """Return a picture of the times over disk rates, and one over disk latencies.

    A picture is left out if fewer than two rates or latencies were measured.
    """
    disks = _disks(results)
    rates, latencies = ({disk[part] for disk in disks} - {None} for part in (0, 1))
    return [
        *([("time-over-disk-rate", partial(_draw, results, 0))] if len(rates) > 1 else []),
        *([("time-over-disk-latency", partial(_draw, results, 1))] if len(latencies) > 1 else []),
    ]


def _field(row: _Row, disk: _Disk) -> str:
    seconds = row.seconds(disk)
    if seconds is not None:
        return format_seconds(round(seconds * 1e9))
    repeats = row.by_disk.get(disk, ())
    return outcome_of(each.outcome for each in repeats) if repeats else "-"


def _draw(results: Sequence[Result], over: int) -> "Figure":
    """Draw the times over the rates (``over`` = 0) or the latencies (``over`` = 1) of the disks.

    Each scene has a panel for each latency (``over`` = 0) or for each rate (``over`` = 1).
    """
    rows = _rows(results)
    others = sorted({disk[1 - over] for disk in _disks(results)}, key=lambda value: value or 0)
    scenes = list(dict.fromkeys(row.scene for row in rows))
    panels = [(scene, other) for scene in scenes for other in others][: look.MAX_PANELS]
    figure, grid = look.new_figure(3.0 * len(panels), len(panels), 1)
    handles: dict[str, Any] = {}
    for axes, (scene, other) in zip(grid[:, 0], panels, strict=True):
        ours = [row for row in rows if row.scene == scene]
        handles |= _draw_panel(axes, ours, over, other)
        words = f"{_BY[1 - over]} {_words((None, other) if over == 0 else (other, None))}"
        panel = f"{scene} · {words}" if len(scenes) > 1 else words
        axes.set_title(look.verbatim(panel), fontsize=9, loc="left")
    title = look.headline(series(results), f"Ready + first pass over the disk's {_BY[over]}:")
    lines = [f"{NOTE} {_LINE}" if over == 0 else NOTE, _caption(results)]
    look.dress(figure, title, list(handles.values()), lines)
    return figure


def _draw_panel(axes: "Axes", rows: Sequence[_Row], over: int, other: int | None) -> dict[str, Any]:
    handles: dict[str, Any] = {}
    disks = {disk for row in rows for disk in row.by_disk if disk[1 - over] == other}
    values = sorted(value for disk in disks if (value := disk[over]) is not None)
    for row in rows:
        points = [
            (value, seconds)
            for value in values
            if (seconds := row.seconds((value, other) if over == 0 else (other, value))) is not None
        ]
        (handles[row.name],) = axes.plot(
            [x for x, _ in points], [y for _, y in points], "o-",
            color=look.colour(row.strategy), linewidth=1.6, markersize=4,
            label=look.verbatim(row.name),
        )  # fmt: skip
    size = next((row.model_bytes for row in rows if row.model_bytes), None)
    if over == 0 and size:
        axes.plot(values, [size / value for value in values], ":", color=look.GREY, linewidth=1)
    axes.set_xscale("log")
    axes.set_xticks(values, [(format_rate, format_latency)[over](value) for value in values])
    look.frame_curves(axes, f"disk's {_BY[over]}", "ready + first pass, s", log_seconds=True)
    return handles


def _rows(results: Sequence[Result]) -> list[_Row]:
    groups: dict[tuple[str, str], _Row] = {}
    cells = [result.cell for result in results]
    for result in latest(results):
        cell = result.cell
        name, scene = label_among(cell, cells), _scene(cell)
        row = groups.setdefault((name, scene), _Row(name, scene, cell.strategy, {}))
        row.by_disk.setdefault((cell.disk_bytes_per_s, cell.disk_latency_ns), []).append(result)
    return list(groups.values())


def _scene(cell: Cell) -> str:
    """Return a title with the properties of a measurement other than its strategy and its disk."""
    limit = captions.dimension("ram_limit_bytes", cell.ram_limit_bytes)
    ranks = [f"{cell.ranks} ranks"] if cell.ranks > 1 else []
    return ", ".join([cell.model.title, cell.dtype, limit, cell.isolation, *ranks])


def _disks(results: Sequence[Result]) -> list[_Disk]:
    cells = [result.cell for result in results]
    return list(dict.fromkeys((cell.disk_bytes_per_s, cell.disk_latency_ns) for cell in cells))


def _words(disk: _Disk) -> str:
    rate, latency_ns = disk
    words = (
        format_rate(rate) if rate else "",
        format_latency(latency_ns) if latency_ns else "",
    )
    return ", ".join(filter(None, words)) or "as fast as it is"


def _caption(results: Sequence[Result]) -> str:
    return captions.shared(series(results), results)
