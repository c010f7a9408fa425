"""Draw memory over time, in a panel for each measurement; the panels of a figure have equal axes.

A panel of a load or save begins at the load: of the imports before it, only a thin band is shown.
"""

import textwrap
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

from weighin.records.run import Measured, Row, cells_of, values
from weighin.records.run_folder import read_samples
from weighin.records.series import labels_among
from weighin.result import Outcome, Phase, Result, Sample, phases_of
from weighin.show import style as look
from weighin.show import words
from weighin.show.findings import stacks_at_peak
from weighin.show.report import SCENE
from weighin.text import few, one_line
from weighin.units import GIB, format_bytes, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A measurement with one of these outcomes ended early, and a timeline marks the time of its end.
CUT_OFF: Final = frozenset(Outcome) - {
    Outcome.OK, Outcome.CHILD_KILLED, Outcome.WRONG_WEIGHTS, Outcome.SKIPPED,
}  # fmt: skip
# weighin itself ended these measurements, so their length says nothing about the strategy.
_STOPPED: Final = (Outcome.TIMEOUT, Outcome.THRASHING)
_PARTS: Final = ("anon_bytes", "file_bytes", "shmem_bytes", "kernel_bytes")
_MEANT: Final = {
    "prepare": "prepare: weighin's own, before the load",
    "touch": "touch: weighin reads every byte of the loaded model once",
    "sync": "sync: weighin waits until every byte is on the disk",
    "other": "other: time outside all named phases",
}
_HEADROOM: Final = 1.4  # height of the axis / highest memory, so that the names of phases fit above
_POINTS: Final = 300  # about the width of a panel in pixels; more points only enlarge the SVG
_BEFORE: Final = 0.06  # of the panel's width for what happened before the load
_DOTS: Final = ".."  # 45 KiB in an SVG, which contains each dot; "...." would take 180 KiB
_LEAST_APART: Final = 0.03  # between the texts of two marked lines, as a share of the panel's width
_LEAST_NAMED: Final = 0.05  # of the panel's width: a phase of this length has its name in the panel
_MARK_LENGTH: Final = 28
_CHARACTER: Final = 0.0145  # width of a letter, as a share of the panel's width
_Point = TypeVar("_Point")


@dataclass(frozen=True, slots=True)
class Track:
    """The memory of one measurement over time.

    Attributes:
        samples: readings of memory. For a command in a cgroup, their file-backed memory is all page
            cache that the kernel charged to the cgroup.
        ranks: the samples of each rank, if several ranks loaded the model.
        zero_ns: the start of the load, or of the command.
        end_s: the time from ``zero_ns`` to the end of the measurement.
    """

    label: str
    result: Result
    samples: Sequence[Sample]
    ranks: Sequence[Sequence[Sample]]
    zero_ns: int
    end_s: float

    @classmethod
    def of(cls, run: Measured, row: Row, label: str) -> "Track":
        """Return the first repeat of a measurement; without samples, they are empty."""
        result = run.by_series[row["group"]][0]
        samples = read_samples(run.folder, result.samples_path)
        times = [sample.t_ns for sample in (*samples[:1], *samples[-1:])]
        phases = result.phases if result.ran else phases_of(result.phases) or result.phases
        if result.ran:
            samples = list(map(_of_group, samples))
        begun = [
            *(one.start_ns for one in phases),
            *(times[:1] if result.ran or not phases else ()),
        ]
        zero_ns = min(begun, default=0)
        end_ns = max([*(one.end_ns for one in result.phases), *times], default=0)
        ranks = [read_samples(run.folder, rank.samples_path) for rank in result.ranks]
        shown = one_line(label, look.LABEL_LENGTH)
        return cls(shown, result, samples, ranks if all(ranks) else (), zero_ns, (end_ns - zero_ns) / 1e9)  # fmt: skip

    def gpu(self) -> list[tuple[int, int]]:
        """Return pairs of a time in nanoseconds and the GPU memory in bytes."""
        known = ((sample.t_ns, sample.cuda_allocated_bytes) for sample in self.samples)
        return [(t_ns, used) for t_ns, used in known if used is not None]

    def seconds(self, t_ns: int) -> float:
        return (t_ns - self.zero_ns) / 1e9

    def has(self, part: str) -> bool:
        return any(getattr(sample, part) for sample in self.samples)

    def marks(self) -> Iterator[tuple[float, str]]:
        """Yield the output lines that --mark selected, each with its time in s."""
        for mark in self.result.ran.marks if self.result.ran else ():
            yield self.seconds(mark.t_ns), mark.text

    def spans(self) -> list[tuple[str, float, float, Phase | None]]:
        """Return name, start and end (s) of each phase, and of an unfinished phase at an early end."""
        ended: list[tuple[str, float, float, Phase | None]] = [
            (one.name, self.seconds(one.start_ns), self.seconds(one.end_ns), one)
            for one in self.result.phases
        ]
        last = self.result.last_phase
        if self.result.outcome in CUT_OFF and last and last not in {one[0] for one in ended}:
            ended.append((last, ended[-1][2] if ended else 0.0, self.end_s, None))
        return ended

    def cut_at(self) -> tuple[float, float]:
        """Return the time in seconds and the memory in GiB at which the measurement was cut off.

        For a command that the kernel killed, return those of the highest sample instead, because the
        last samples of the command's cgroup come after the kill.
        """
        if not self.samples:
            return self.end_s, 0.0
        peak_ns = self.result.ran.peak_ns if self.result.ran else None
        if peak_ns is not None and self.result.outcome is Outcome.OOM_KILLED:
            nearest = min(self.samples, key=lambda sample: abs(sample.t_ns - peak_ns))
            return self.seconds(nearest.t_ns), nearest.rss_bytes / GIB
        return self.end_s, self.samples[-1].rss_bytes / GIB

    def phase_peak(self, phase: Phase) -> int | None:
        """Return the exact memory peak of a phase; of a command, the cgroup's."""
        return phase.peak_rss_bytes if self.result.ran is None else phase.peak_cgroup_bytes


def draw_timelines(run: Measured, most: int = 1) -> "Iterator[Figure]":
    """Yield at most ``most`` pictures of memory over time, of up to 12 panels each.

    A panel shows the first repeat of a measurement. Without its samples, it says "no samples".
    """
    label = labels_among(cells_of(run.rows))
    scene = [name for name in SCENE if len(values(run.rows, name)) > 1]
    starts = range(0, len(run.rows), look.MAX_PANELS)[:most]
    for start in starts:
        rows = run.rows[start : start + look.MAX_PANELS]
        tracks = []
        for row in rows:
            about = [words.dimension(name, row[name]) for name in scene]
            tracks.append(Track.of(run, row, " · ".join([label(row["cell"]), *about])))
        columns = min(2, len(tracks))
        lines = -(-len(tracks) // columns)
        figure, grid = look.new_figure(lines * 2.2 + 0.2, lines, columns, sharex=True, sharey=True)
        span, top = longest(tracks), highest(tracks) * _HEADROOM
        kind = words.kind_of(rows)
        for axes, track in zip(grid.flat, tracks, strict=False):
            axes.set_xlim(0 if track.result.ran else -_BEFORE * span, span)
            axes.set_ylim(0, top)
            _panel(axes, track, span)
        for axes in grid.flat[len(tracks) :]:
            axes.axis("off")
        for axes in grid[:, 0]:
            axes.set_ylabel(kind.axis, fontsize=9)
        for axes in grid.flat[max(0, len(tracks) - columns) : len(tracks)]:
            axes.tick_params(labelbottom=True)  # also above an empty panel
        for axes in grid.flat[(lines - 1) * columns : len(tracks)]:
            axes.set_xlabel(f"time since {kind.zero}, s", fontsize=9)
        title = look.headline(rows, f"Memory over time while {words.doing(rows)}")
        left_out = len(run.rows) - most * look.MAX_PANELS if start == starts[-1] else 0
        caption = _caption(run, rows, tracks, left_out)
        look.dress(figure, title, _legend(tracks, top, kind.cached), caption)
        yield figure


def _of_group(sample: Sample) -> Sample:
    """Replace file-backed memory by the cgroup's page cache, and count TCP sockets as the kernel's."""
    if sample.cgroup_file_bytes is None or sample.cgroup_shmem_bytes is None:
        return sample
    file = max(0, sample.cgroup_file_bytes - sample.cgroup_shmem_bytes)
    kernel = (sample.kernel_bytes or 0) + (sample.socket_bytes or 0)
    total = sample.anon_bytes + sample.shmem_bytes + file + kernel
    return replace(sample, file_bytes=file, rss_bytes=total, kernel_bytes=kernel)


def longest(tracks: Sequence[Track]) -> float:
    """Return the length in seconds of the time axis that several panels share.

    Measurements that weighin stopped make the axis at most twice as long as the longest other one.
    """
    ended = [t.end_s for t in tracks if t.result.outcome not in _STOPPED and t.end_s > 0]
    most = max((track.end_s for track in tracks), default=0.0)
    return min(most, 2 * max(ended)) * 1.02 if ended else most or 1.0


def highest(tracks: Sequence[Track]) -> float:
    """Return the top in GiB of the memory axis that several panels share.

    The top is the highest memory, or a higher RAM limit that is at most twice as high.
    """
    data = 0
    for track in tracks:
        peaks = [track.phase_peak(phase) or 0 for phase in track.result.phases]
        used = [sample.rss_bytes for sample in track.samples] + [size for _, size in track.gpu()]
        data = max([data, *used, *peaks])
    limits = [track.result.cell.ram_limit_bytes or 0 for track in tracks]
    near = [limit for limit in limits if not data or limit <= 2 * data]
    return max([data, *near]) / GIB or 1.0


def thin(points: Sequence[_Point], memory: Callable[[_Point], int]) -> list[_Point]:
    """Return of each group of neighbouring points the one with most memory: at most 300 points."""
    step = max(1, -(-len(points) // _POINTS))
    return [max(points[at : at + step], key=memory) for at in range(0, len(points), step)]


def _panel(axes: "Axes", track: Track, span: float) -> None:
    look.tidy(axes)
    title = f"{track.label}: {track.result.outcome}"
    axes.set_title(look.verbatim(title), fontsize=9, loc="left", pad=13)
    limit = track.result.cell.ram_limit_bytes
    if limit and limit / GIB <= axes.get_ylim()[1]:
        axes.axhline(limit / GIB, color="black", linestyle="--", linewidth=1.2, zorder=3)
    elif limit:
        note = f"RAM limit {words.size(limit)} ↑"
        axes.annotate(note, (0.99, 0.86), xycoords="axes fraction", ha="right", fontsize=7)
    if not track.samples:
        why = "not run" if track.result.outcome is Outcome.SKIPPED else "no samples"
        axes.text(0.5, 0.4, why, transform=axes.transAxes, ha="center", fontsize=9, color=look.INK)
        if track.end_s <= 0:
            return
    else:
        _areas(axes, track)
    if gpu := track.gpu():
        points = thin(gpu, itemgetter(1))
        axes.step(
            [track.seconds(t_ns) for t_ns, _ in points], [used / GIB for _, used in points],
            where="post", color="black", linewidth=1, zorder=3, label="GPU",
        )  # fmt: skip
    _phases(axes, track, span)
    _marks(axes, track, span)
    if track.result.outcome in CUT_OFF:
        _cut(axes, track, span)


def _areas(axes: "Axes", track: Track) -> None:
    """Draw anonymous, file-backed, shared and kernel memory as stacked areas."""
    points = thin(track.samples, attrgetter("rss_bytes"))
    seconds = [track.seconds(point.t_ns) for point in points]
    shade = look.colour(track.result.cell.strategy)
    shades = dict(zip(_PARTS, (shade, look.tint(shade), "white", look.GREY), strict=True))
    # An area that is always zero is left out, because an SVG would contain each of its points.
    parts = [name for name in _PARTS if name == _PARTS[0] or track.has(name)]
    layers = [[(getattr(point, name) or 0) / GIB for point in points] for name in parts]
    colours: list[Any] = [shades[name] for name in parts]
    total = [sum(heights) for heights in zip(*layers, strict=True)]
    if track.ranks:  # an area of anonymous memory for each rank, alternately in two shades
        by_rank: list[list[float]] = []
        for samples in track.ranks:
            times = [sample.t_ns for sample in samples]
            places = [bisect_right(times, point.t_ns) for point in points]
            by_rank.append([samples[at - 1].anon_bytes / GIB if at else 0 for at in places])
        layers = [*by_rank, *layers[1:]]
        two = (shade, look.tint(shade))
        colours = [two[at % 2] for at in range(len(by_rank))] + ["#DDDDDD"] * (len(parts) - 1)
        parts = [_PARTS[0]] * len(by_rank) + parts[1:]
    drawn = axes.stackplot(seconds, *layers, colors=colours, labels=parts)
    for part, hatch in (("shmem_bytes", _DOTS), ("kernel_bytes", "//")):
        if part in parts:
            drawn[parts.index(part)].set_hatch(hatch)
    axes.plot(seconds, total, color=look.INK, linewidth=0.8)


def _phases(axes: "Axes", track: Track, span: float) -> None:
    """Shade every second phase; name long phases inside the panel, and short phases above it."""
    short = []
    style: dict[str, Any] = {
        "transform": axes.get_xaxis_transform(),
        "va": "top",
        "fontsize": 7,
        "color": look.INK,
    }
    for index, (name, start, end, phase) in enumerate(track.spans()):
        band = axes.axvspan(
            start, end, color="#EEEEEE" if index % 2 == 0 else "white", linewidth=0, zorder=0
        )
        look.tip(band, _tip(name, start, end, phase, track))
        if phase and (peak := track.phase_peak(phase)) and not track.ranks:
            axes.hlines(peak / GIB, start, end, color="black", linewidth=1.4, zorder=2.8)
        left, right = max(start, axes.get_xlim()[0]), min(end, span)
        width, middle = (right - left) / span, (left + right) / 2
        if width >= _CHARACTER * (len(name) + 1):
            axes.text(middle, 0.97, look.verbatim(name), ha="center", **style)
        elif width >= _LEAST_NAMED:
            axes.text(middle, 0.97, look.verbatim(name), ha="center", rotation=90, **style)
        elif end >= 0:
            short.append((end - start, name))
    if short:
        short.sort(reverse=True)
        texts = [f"{name} {format_seconds(round(took_s * 1e9))}" for took_s, name in short]
        axes.text(
            0, 1.02, look.verbatim(f"short phases: {few(texts, 4)}"), transform=axes.transAxes,
            fontsize=6.5, color=look.INK,
        )  # fmt: skip


def _tip(name: str, start: float, end: float, phase: Phase | None, track: Track) -> str:
    when = f"from {start:.2f} s to {end:.2f} s ({format_seconds(round((end - start) * 1e9))})"
    if phase is None:
        return f"{name}: {when}\ncut off: {track.result.outcome}"
    sizes = (
        (None if track.result.ran else phase.peak_rss_bytes, "peak RSS"),
        (phase.peak_cgroup_bytes, "cgroup peak"),
        (phase.peak_cuda_allocated_bytes, "CUDA peak"),
        (phase.end.anon_bytes, "at its end: anonymous"),
        (phase.end.file_bytes, "file"),
        (phase.end.shmem_bytes or None, "shared"),
    )
    lines = [f"{name} {size / GIB:.3f} GiB (exact)" for size, name in sizes if size is not None]
    return "\n".join([f"{name}: {when}", *lines, f"{phase.major_faults} major page faults"])


def _marks(axes: "Axes", track: Track, span: float) -> None:
    """Draw a vertical line at the time of each output line that --mark selected; add text if it fits."""
    written_s = -span
    for at_s, text in track.marks():
        if at_s > span:
            break
        line = axes.axvline(at_s, color=look.INK, linestyle=":", linewidth=0.8, zorder=2.5)
        look.tip(line, f"{text}\nat {at_s:.2f} s, a line of output")
        if at_s - written_s >= _LEAST_APART * span:
            shown = look.verbatim(textwrap.shorten(text, _MARK_LENGTH, placeholder="…"))
            axes.annotate(
                shown, (at_s, 0.86), xycoords=("data", "axes fraction"), xytext=(1, 0),
                textcoords="offset points", rotation=90, va="top", fontsize=6, color=look.INK,
            )  # fmt: skip
            written_s = at_s


def _cut(axes: "Axes", track: Track, span: float) -> None:
    """Mark the time at which the measurement was cut off, with its outcome."""
    outcome = track.result.outcome
    if track.end_s > span:
        text = f"{outcome} at {track.end_s:.0f} s →"
        axes.annotate(text, (0.99, 0.72), xycoords="axes fraction", ha="right", fontsize=8)
        return
    end_s, height = track.cut_at()
    axes.plot(end_s, height, "X", color="black", markersize=9, zorder=5, label="cut off")
    place = track.result.last_phase or ("" if track.result.ran else "no phase")
    side = "right" if end_s > span / 2 else "left"
    axes.annotate(
        look.verbatim(f"{outcome} in {place}" if place else str(outcome)),
        (end_s, height), xytext=(-7 if side == "right" else 7, 4),
        textcoords="offset points", ha=side, va="bottom", fontsize=8,
    )  # fmt: skip


def _legend(tracks: Sequence[Track], top: float, cached: str) -> list[Any]:
    limits = [track.result.cell.ram_limit_bytes for track in tracks]
    has_limit = any(limit and limit / GIB <= top for limit in limits)
    is_cut = any(track.result.outcome in CUT_OFF for track in tracks)
    has_marks = any(any(track.marks()) for track in tracks)
    shared, kernel = (any(track.has(part) for track in tracks) for part in _PARTS[2:])
    return look.legend(
        (True, "anonymous", {"facecolor": look.GREY}),
        (True, cached, {"facecolor": look.tint(look.GREY)}),
        (shared, "shared", {"facecolor": "white", "hatch": _DOTS}),
        (kernel, "kernel", {"facecolor": look.GREY, "hatch": "//"}),
        (True, "exact peak of a phase", {"color": "black", "linewidth": 1.4}),
        (any(track.gpu() for track in tracks), "on the GPU", {"color": "black", "linewidth": 1}),
        (has_marks, "line of output", {"linestyle": ":", "linewidth": 0.8}),
        (has_limit, "RAM limit", {"color": "black", "linestyle": "--"}),
        (is_cut, "cut off", {"color": "black", "linestyle": "", "marker": "X"}),
    )


def _caption(
    run: Measured, rows: Sequence[Row], tracks: Sequence[Track], left_out: int
) -> list[str]:
    phases = {phase.name for track in tracks for phase in track.result.phases}
    meant = [text for name, text in _MEANT.items() if name in phases]
    outside = "the command" if tracks[0].result.ran else "the worker"
    about = f"Memory is sampled from outside {outside}; short spikes may be missed. Bands: phases."
    if any(row["repeats"] > 1 for row in rows):
        about += " The first repeat of each."
    lines = [words.shared(run, without=("model", "ram_limit_bytes")), about]
    if meant:
        lines.append(f"{'; '.join(meant)}.")
    for track in tracks:
        if stacks := stacks_at_peak(track.result):
            usage, frame = format_bytes(stacks[0].usage_bytes, digits=1), stacks[0].frames[0]
            lines.append(f"Stack of {track.label}, at {usage}: {frame}.")
    if any(track.ranks for track in tracks):
        lines.append(
            "Of several ranks: the anonymous memory of each rank, in two shades in turn; above it in grey,"
            " file-backed and shared memory, counted once. Bands: the phases of rank 0."
        )
    if any(track.gpu() for track in tracks):
        lines.append("On the GPU: allocated bytes, sampled.")
    if left_out > 0:
        lines.append(f"{left_out} more panels are not drawn: see samples/.")
    return lines
