"""Draw memory over time, in a panel for each measurement; the panels of a figure have equal axes.

A panel of a load or save begins at the load: of the imports before it, only a thin band is shown.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, Final, TypeVar

from weighin.records.run_folder import read_samples
from weighin.records.series import Measured, Row, cells_of, labels_among, values
from weighin.result import Outcome, Phase, Sample, phases_of
from weighin.show import style as look
from weighin.show import words
from weighin.show.report import SCENE
from weighin.text import one_line
from weighin.units import GIB, format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A measurement with one of these outcomes ended early, and a timeline marks the time of its end.
_CUT_OFF: Final = frozenset(Outcome) - {
    Outcome.OK, Outcome.CHILD_KILLED, Outcome.WRONG_WEIGHTS, Outcome.SKIPPED,
}  # fmt: skip
# weighin itself ended these measurements, so their length says nothing about the strategy.
_STOPPED: Final = (Outcome.TIMEOUT, Outcome.THRASHING)
_PARTS: Final = {"anonymous": "anon_bytes", "file": "file_bytes", "shared": "shmem_bytes", "kernel": "kernel_bytes"}  # fmt: skip
# "..", because an SVG contains each dot: 45 KiB, and "...." would take 180 KiB.
_HATCHES: Final = {"shared": "..", "kernel": "//"}
_KEYS: Final[dict[str, dict[str, Any]]] = {
    "anonymous": {"facecolor": look.GREY},
    "file": {"facecolor": "#CCCCCC"},
    "shared": {"facecolor": "white", "hatch": _HATCHES["shared"]},
    "kernel": {"facecolor": look.GREY, "hatch": _HATCHES["kernel"]},
    "exact peak of a phase": {"color": "black", "linewidth": 1.4},
    "on the GPU": {"color": "black", "linewidth": 1},
    "line of output": {"linestyle": ":", "linewidth": 0.8},
    "RAM limit": {"color": "black", "linestyle": "--"},
    "cut off": {"color": "black", "linestyle": "", "marker": "X"},
}
"""What a panel may show, and how the legend shows it."""
_MEANT: Final = {
    "prepare": "prepare: weighin's own, before the load",
    "touch": "touch: weighin reads every byte of the loaded model once",
    "sync": "sync: weighin waits until every byte is on the disk",
    "other": "other: time outside all named phases",
}
_BEFORE: Final = 0.06  # of the panel's width for what happened before the load
_LEAST_NAMED: Final = 0.05  # of the panel's width: a phase of this length has its name in the panel
_CHARACTER: Final = 0.0145  # width of a letter, as a share of the panel's width
_Point = TypeVar("_Point")


class Track:
    """The memory of a measurement's first repeat over time, from the start of the load or command (``zero_ns``).

    Of a command in a cgroup, the samples' file-backed memory is all page cache that the kernel charged to
    the cgroup. ``gpu`` has pairs of a time in nanoseconds and the GPU memory in bytes.
    """

    def __init__(self, run: Measured, row: Row, label: str) -> None:
        self.label, self.result = one_line(label, look.LABEL_LENGTH), run.by_series[row["group"]][0]
        samples, phases = read_samples(run.folder, self.result.samples_path), self.result.phases
        self.samples = list(map(_of_group, samples)) if self.result.ran else samples
        read = ((sample.t_ns, sample.cuda_allocated_bytes) for sample in samples)
        self.gpu = [(t_ns, used) for t_ns, used in read if used is not None]
        times = [sample.t_ns for sample in (*samples[:1], *samples[-1:])]
        if self.result.ran:
            begun = [*times[:1], *(one.start_ns for one in phases)]
        else:
            begun = [one.start_ns for one in phases_of(phases) or phases] or times[:1]
        self.zero_ns = min(begun, default=0)
        self.end_s = self.seconds(max([*times, *(one.end_ns for one in phases)], default=0))
        self.is_cut = self.result.outcome in _CUT_OFF

    def seconds(self, t_ns: int) -> float:
        return (t_ns - self.zero_ns) / 1e9

    def phase_peak(self, phase: Phase) -> int | None:
        """Return the exact memory peak of a phase; of a command, the cgroup's."""
        return phase.peak_cgroup_bytes if self.result.ran else phase.peak_rss_bytes


def draw_timelines(run: Measured, most: int = 1) -> "Iterator[Figure]":
    """Yield at most ``most`` pictures of memory over time, of up to 12 panels each."""
    label = labels_among(cells_of(run.rows))
    scene = [name for name in SCENE if len(values(run.rows, name)) > 1]
    starts = range(0, len(run.rows), look.MAX_PANELS)[:most]
    for start in starts:
        rows = run.rows[start : start + look.MAX_PANELS]
        tracks = []
        for row in rows:
            about = [words.dimension(name, row[name]) for name in scene]
            tracks.append(Track(run, row, " · ".join([label(row["cell"]), *about])))
        columns = min(2, len(tracks))
        lines = -(-len(tracks) // columns)
        figure, panels = look.new_figure([2.2] * lines, columns, sharex=True, sharey=True)
        # What weighin stopped at most doubles the time axis.
        longest = max(track.end_s for track in tracks)
        ended = [t.end_s for t in tracks if t.result.outcome not in _STOPPED and t.end_s > 0]
        span = min(longest, 2 * max(ended)) * 1.02 if ended else longest or 1.0
        top = _highest(tracks) * 1.4  # so that the names of phases fit above
        kind, drawn = words.kind_of(rows), {"anonymous", "file", "exact peak of a phase"}
        for at, (axes, track) in enumerate(zip(panels, tracks, strict=False)):
            axes.set_xlim(0 if track.result.ran else -_BEFORE * span, span)
            axes.set_ylim(0, top)
            drawn |= _panel(axes, track, span)
            if at % columns == 0:
                axes.set_ylabel(kind.axis, fontsize=9)
            if at + columns >= len(tracks):  # the last one of its column
                axes.tick_params(labelbottom=True)
                axes.set_xlabel(f"time since {kind.zero}, s", fontsize=9)
        for axes in panels[len(tracks) :]:
            axes.axis("off")
        names = {"file": kind.cached}
        handles = look.legend(*((key in drawn, names.get(key, key), _KEYS[key]) for key in _KEYS))
        caption = _caption(run, tracks)
        left_out = len(run.rows) - most * look.MAX_PANELS
        if left_out > 0 and start == starts[-1]:
            caption.append(f"{left_out} more panels are not drawn: see samples/.")
        title = look.headline(rows, f"Memory over time while {words.doing(rows)}")
        look.dress(figure, title, handles, caption)
        yield figure


def _of_group(sample: Sample) -> Sample:
    """Replace file-backed memory by the cgroup's page cache, and count TCP sockets as the kernel's."""
    if sample.cgroup_file_bytes is None or sample.cgroup_shmem_bytes is None:
        return sample
    file = max(0, sample.cgroup_file_bytes - sample.cgroup_shmem_bytes)
    kernel = (sample.kernel_bytes or 0) + (sample.socket_bytes or 0)
    total = sample.anon_bytes + sample.shmem_bytes + file + kernel
    return replace(sample, file_bytes=file, rss_bytes=total, kernel_bytes=kernel)


def _highest(tracks: Sequence[Track]) -> float:
    """Return the highest memory in GiB, or a higher RAM limit that is at most twice as high."""
    data = 0
    for track in tracks:
        peaks = [track.phase_peak(phase) or 0 for phase in track.result.phases]
        used = [sample.rss_bytes for sample in track.samples] + [size for _, size in track.gpu]
        data = max([data, *used, *peaks])
    limits = [track.result.cell.ram_limit_bytes or 0 for track in tracks]
    return max([data, *(limit for limit in limits if not data or limit <= 2 * data)]) / GIB or 1.0


def _thin(points: Sequence[_Point], memory: Callable[[_Point], int]) -> list[_Point]:
    """Return at most 300 points: of each group of neighbours, the one with the most memory."""
    step = max(1, -(-len(points) // 300))  # more only enlarge the SVG
    return [max(points[at : at + step], key=memory) for at in range(0, len(points), step)]


def _panel(axes: "Axes", track: Track, span: float) -> set[str]:
    """Draw a panel, and return the keys of ``_KEYS`` that are in it."""
    result, drawn = track.result, set[str]()
    look.tidy(axes)
    axes.set_title(look.verbatim(f"{track.label}: {result.outcome}"), fontsize=9, loc="left")
    limit = result.cell.ram_limit_bytes
    if limit and limit / GIB <= axes.get_ylim()[1]:
        axes.axhline(limit / GIB, color="black", linestyle="--", linewidth=1.2, zorder=3)
        drawn.add("RAM limit")
    elif limit:
        note = f"RAM limit {words.size(limit)} ↑"
        axes.annotate(note, (0.99, 0.86), xycoords="axes fraction", ha="right", fontsize=7)
    if track.samples:
        drawn |= _areas(axes, track)
    else:
        why = "not run" if result.outcome is Outcome.SKIPPED else "no samples"
        axes.text(0.5, 0.4, why, transform=axes.transAxes, ha="center", fontsize=9, color=look.INK)
        if track.end_s <= 0:
            return drawn
    if points := _thin(track.gpu, itemgetter(1)):
        times = [track.seconds(t_ns) for t_ns, _ in points]
        sizes = [used / GIB for _, used in points]
        axes.step(times, sizes, where="post", color="black", linewidth=1, zorder=3)
        drawn.add("on the GPU")
    _phases(axes, track, span)
    if marks := result.ran.marks if result.ran else ():
        drawn.add("line of output")
    for mark in marks:
        if (at_s := track.seconds(mark.t_ns)) > span:
            break
        line = axes.axvline(at_s, color=look.INK, linestyle=":", linewidth=0.8, zorder=2.5)
        look.tip(line, f"{mark.text}\nat {at_s:.2f} s, a line of output")
    if track.is_cut:
        drawn.add("cut off")
        _cut(axes, track, span)
    return drawn


def _areas(axes: "Axes", track: Track) -> set[str]:
    points = _thin(track.samples, attrgetter("rss_bytes"))
    seconds = [track.seconds(point.t_ns) for point in points]
    shade = look.colour(track.result.cell.strategy)
    colours: tuple[Any, ...] = (shade, look.tint(shade), "white", look.GREY)
    shades = dict(zip(_PARTS, colours, strict=True))
    sizes = {
        name: [(getattr(point, key) or 0) / GIB for point in points] for name, key in _PARTS.items()
    }
    # An area that is always zero is left out, because an SVG would contain each of its points.
    shown = [name for name in _PARTS if name == "anonymous" or any(sizes[name])]
    layers = [sizes[name] for name in shown]
    areas = axes.stackplot(seconds, *layers, colors=[shades[name] for name in shown])
    for name, area in zip(shown, areas, strict=True):
        area.set_hatch(_HATCHES.get(name, ""))
    total = list(map(sum, zip(*layers, strict=True)))
    axes.plot(seconds, total, color=look.INK, linewidth=0.8)
    return {*shown}


def _phases(axes: "Axes", track: Track, span: float) -> None:
    """Shade every second phase, and name each phase that is long enough; all have tips."""
    result = track.result
    spans: list[tuple[str, float, float, Phase | None]] = [
        (one.name, track.seconds(one.start_ns), track.seconds(one.end_ns), one)
        for one in result.phases
    ]
    last = result.last_phase
    if track.is_cut and last and last not in {name for name, *_ in spans}:
        spans.append((last, spans[-1][2] if spans else 0.0, track.end_s, None))
    for index, (name, start, end, phase) in enumerate(spans):
        shade = "#EEEEEE" if index % 2 == 0 else "white"
        band = axes.axvspan(start, end, color=shade, linewidth=0, zorder=0)
        took = format_seconds(round((end - start) * 1e9))
        lines = [f"{name}: from {start:.2f} s to {end:.2f} s ({took})"]
        if phase is None:
            lines.append(f"cut off: {result.outcome}")
        else:
            sizes = {
                "peak RSS": None if result.ran else phase.peak_rss_bytes,
                "cgroup peak": phase.peak_cgroup_bytes,
                "CUDA peak": phase.peak_cuda_allocated_bytes,
                "at its end: anonymous": phase.end.anon_bytes,
                "file": phase.end.file_bytes,
                "shared": phase.end.shmem_bytes or None,
            }
            known = ((what, size) for what, size in sizes.items() if size is not None)
            lines += [f"{what} {size / GIB:.3f} GiB (exact)" for what, size in known]
            lines.append(f"{phase.major_faults} major page faults")
            if (peak := track.phase_peak(phase)) and not result.ranks:
                axes.hlines(peak / GIB, start, end, color="black", linewidth=1.4, zorder=2.8)
        look.tip(band, "\n".join(lines))
        left, right = max(start, axes.get_xlim()[0]), min(end, span)
        width = (right - left) / span
        if width >= _LEAST_NAMED:
            style: dict[str, Any] = {"ha": "center", "va": "top", "fontsize": 7, "color": look.INK}
            style["rotation"] = 0 if width >= _CHARACTER * (len(name) + 1) else 90
            style["transform"] = axes.get_xaxis_transform()
            axes.text((left + right) / 2, 0.97, look.verbatim(name), **style)


def _cut(axes: "Axes", track: Track, span: float) -> None:
    """Mark where the measurement was cut off; a killed command's last samples come after the kill."""
    result, at_s, height = track.result, track.end_s, 0.0
    if at_s > span:
        text = f"{result.outcome} at {at_s:.0f} s →"
        axes.annotate(text, (0.99, 0.72), xycoords="axes fraction", ha="right", fontsize=8)
        return
    if track.samples:
        height = track.samples[-1].rss_bytes / GIB
        peak_ns = result.ran.peak_ns if result.ran else None
        if peak_ns is not None and result.outcome is Outcome.OOM_KILLED:
            nearest = min(track.samples, key=lambda sample: abs(sample.t_ns - peak_ns))
            at_s, height = track.seconds(nearest.t_ns), nearest.rss_bytes / GIB
    axes.plot(at_s, height, "X", color="black", markersize=9, zorder=5, label="cut off")
    place = result.last_phase or ("" if result.ran else "no phase")
    side, offset = ("right", -7) if at_s > span / 2 else ("left", 7)
    text = look.verbatim(f"{result.outcome} in {place}" if place else str(result.outcome))
    axes.annotate(
        text, (at_s, height), (offset, 4), textcoords="offset points", ha=side, fontsize=8
    )


def _caption(run: Measured, tracks: Sequence[Track]) -> list[str]:
    results = [track.result for track in tracks]
    phases = {phase.name for result in results for phase in result.phases}
    meant = [text for name, text in _MEANT.items() if name in phases]
    outside = "the command" if results[0].ran else "the worker"
    about = f"Memory is sampled from outside {outside}; short spikes may be missed. Bands: phases."
    if any(row["repeats"] > 1 for row in run.rows):
        about += " The first repeat of each."
    lines = [words.shared(run, without=("model", "ram_limit_bytes")), about]
    lines += [f"{'; '.join(meant)}."] if meant else []
    if any(result.ranks for result in results):
        lines.append("Of several ranks: the sum of all; the bands are the phases of rank 0.")
    return lines
