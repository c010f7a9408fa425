"""Compute the drawings of resident memory over time in report.html, and the text of each phase."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from weighin.report import captions, style, timeline_data
from weighin.report.html.geometry import Axis, path
from weighin.report.rows import Row, values
from weighin.result import Outcome, Phase, Result
from weighin.units import GIB, format_seconds

WIDTH: Final = 460
HEIGHT: Final = 196
TOP: Final = 22.0
BOTTOM: Final = 166.0
_LEFT, _RIGHT = 40.0, 452.0
_POINTS: Final = 200  # of a drawing, so that 60 drawings take less than 2 MB
_HEADROOM: Final = 1.18  # height of the axis / highest memory, to leave room for names of phases
_TARGET: Final = 4.0  # pixels, the smallest width that is easy to hit with a mouse
_LETTER: Final = 6.2  # width of a letter in pixels
_SECTIONS: Final = ("model", "device")


@dataclass(frozen=True, slots=True)
class Span:
    """One phase in a drawing: a band, a line at its peak, and a text shown under the mouse (``tip``)."""

    name: str
    start: float
    width: float
    target: float  # start of the area that reacts to the mouse, which is at least 4 pixels wide
    target_width: float
    peak_y: float | None
    is_named: bool
    tip: str


@dataclass(frozen=True, slots=True)
class Timeline:
    """The drawing of one measurement. ``areas`` are SVG paths, the topmost stacked area first."""

    id: str
    label: str
    colour: str
    ending: str
    note: str
    areas: list[tuple[str, str]]
    outline: str
    spans: list[Span]
    marks: list[tuple[float, str]]
    limit_y: float | None
    limit_text: str
    cut: tuple[float, float] | None
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    span_s: float
    top_gib: float


def build(
    run: Path, results: Sequence[Result], rows: Sequence[Row], ids: Mapping[str, str]
) -> list[tuple[str, list[Timeline]]]:
    """Return titled groups of drawings, a group for each model and device with equal axes inside it."""
    tracks = timeline_data.choose(run, results, rows)
    track_of = {row["group"]: track for row, track in zip(rows, tracks, strict=True)}
    changing = [name for name in _SECTIONS if len(values(rows, name)) > 1]
    groups = []
    for title, members in captions.apart(rows, changing):
        mine = [track_of[row["group"]] for row in members]
        time = Axis(timeline_data.longest(mine), _LEFT, _RIGHT)
        memory = Axis(timeline_data.highest(mine) * _HEADROOM, BOTTOM, TOP)
        drawn = [
            _timeline(track, ids[row["group"]], time, memory)
            for track, row in zip(mine, members, strict=True)
        ]
        groups.append((title, drawn))
    return groups


def _timeline(track: timeline_data.Track, name: str, time: Axis, memory: Axis) -> Timeline:
    result, limit = track.result, track.result.cell.ram_limit_bytes
    is_near = limit is not None and limit / GIB <= memory.top
    areas, outline = _areas(track, time, memory)
    note = f"continues until {track.end_s:.0f} s →" if track.end_s > time.top else ""
    if not track.samples:
        note = "not run" if result.outcome is Outcome.SKIPPED else "no samples"
    return Timeline(
        id=name,
        label=track.label,
        colour=style.colour(result.cell.strategy),
        ending=captions.ending({"outcome": result.outcome.value, "last_phase": result.last_phase}),
        note=note,
        areas=areas,
        outline=outline,
        spans=_spans(track, time, memory),
        marks=[
            (time.at(at_s), f"{text}\nat {at_s:.2f} s, a line of output")
            for at_s, text in timeline_data.marks(track)
            if at_s <= time.top
        ],
        limit_y=memory.at(limit / GIB) if limit and is_near else None,
        limit_text=f"RAM limit {captions.size(limit)}" if limit else "no RAM limit",
        cut=_cut(track, time, memory),
        x_ticks=time.ticks(6),
        y_ticks=memory.ticks(4),
        span_s=time.top,
        top_gib=memory.top,
    )


def _areas(
    track: timeline_data.Track, time: Axis, memory: Axis
) -> tuple[list[tuple[str, str]], str]:
    """Return each part of the memory as a closed SVG path, and the outline of the whole memory."""
    drawn = [one for one in track.samples if (one.t_ns - track.zero_ns) / 1e9 <= time.top]
    points = timeline_data.thin(drawn, _POINTS)
    if not points:
        return [], ""
    xs = [time.at((point.t_ns - track.zero_ns) / 1e9) for point in points]
    lines = {}
    heights = [0] * len(points)
    for part in timeline_data.PARTS:
        heights = [
            h + (getattr(point, part) or 0) for h, point in zip(heights, points, strict=True)
        ]
        lines[part] = list(zip(xs, (memory.at(h / GIB) for h in heights), strict=True))
    parts = [
        part
        for part in timeline_data.PARTS
        if part == "anon_bytes" or timeline_data.has_part(points, part)
    ]
    base = [(xs[-1], BOTTOM), (xs[0], BOTTOM)]
    areas = [
        (part.removesuffix("_bytes"), path([*lines[part], *base]) + "Z") for part in parts[::-1]
    ]
    return areas, path(lines[timeline_data.PARTS[-1]])


def _spans(track: timeline_data.Track, time: Axis, memory: Axis) -> list[Span]:
    spans: list[Span] = []
    for index, (name, start, end) in enumerate(timeline_data.spans(track)):
        if start > time.top:
            break
        ended = track.result.phases[index] if index < len(track.result.phases) else None
        left, right = time.at(start), time.at(end)
        width = round(right - left, 1)
        # Of several ranks, the drawing shows the sum, of which the peak of rank 0 is no peak.
        peak = (
            timeline_data.phase_peak(track.result, ended)
            if ended and not track.result.ranks
            else None
        )
        target = max(left, spans[-1].target + spans[-1].target_width) if spans else left
        spans.append(
            Span(
                name=name,
                start=left,
                width=width,
                target=round(target, 1),
                target_width=round(max(right - target, _TARGET), 1),
                peak_y=memory.at(peak / GIB) if peak is not None else None,
                is_named=width > _LETTER * len(name) + 4,
                tip=_tip(name, start, end, ended, track.result),
            )
        )
    return spans


def _tip(name: str, start: float, end: float, ended: Phase | None, result: Result) -> str:
    when = f"from {start:.2f} s to {end:.2f} s ({format_seconds(round((end - start) * 1e9))})"
    if ended is None:
        return f"{name}: {when}\ncut off: {result.outcome}"
    lines = [f"{name}: {when}"]
    for value, words in (
        (None if result.ran else ended.peak_rss_bytes, "peak RSS"),
        (ended.peak_cgroup_bytes, "cgroup peak"),
        (ended.peak_cuda_allocated_bytes, "CUDA peak"),
    ):
        if value is not None:
            lines.append(f"{words} {value / GIB:.3f} GiB (exact)")
    at_end = ended.end
    left = (
        f"at its end: anonymous {at_end.anon_bytes / GIB:.3f}, file {at_end.file_bytes / GIB:.3f}"
    )
    left += f", shared {at_end.shmem_bytes / GIB:.3f}" if at_end.shmem_bytes else ""
    return "\n".join([*lines, left + " GiB (exact)", f"{ended.major_faults} major page faults"])


def _cut(track: timeline_data.Track, time: Axis, memory: Axis) -> tuple[float, float] | None:
    """Return the position at which a measurement was cut off; None if it was not, or is off the axis."""
    is_off = track.end_s > time.top
    if not track.samples or is_off or track.result.outcome not in timeline_data.CUT_OFF:
        return None
    end_s, height = timeline_data.cut_at(track)
    return time.at(end_s), memory.at(height)
