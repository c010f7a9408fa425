"""Select the data of timelines: the samples and phases of the first repeat of each measurement."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Final, TypeVar

from weighin.records.metrics import latest
from weighin.records.run_folder import read_samples
from weighin.report import captions, style
from weighin.report.rows import Row, values
from weighin.result import Outcome, Phase, Result, Sample
from weighin.units import GIB

# A measurement with one of these outcomes ended early, and a timeline marks the time of its end.
CUT_OFF: Final = frozenset(Outcome) - {
    Outcome.OK, Outcome.CHILD_KILLED, Outcome.WRONG_WEIGHTS, Outcome.SKIPPED,
}  # fmt: skip
# weighin itself ended these measurements, so their length says nothing about the strategy.
_STOPPED: Final = (Outcome.TIMEOUT, Outcome.THRASHING)
PARTS: Final = ("anon_bytes", "file_bytes", "shmem_bytes", "kernel_bytes")
_Point = TypeVar("_Point")


@dataclass(frozen=True, slots=True)
class Track:
    """The memory of one measurement over time.

    Attributes:
        samples: readings of memory. For a command in a cgroup, their file-backed memory is all page
            cache that the kernel charged to the cgroup.
        zero_ns: the start of the first phase, or the time of the first sample if it is earlier.
        end_s: the time from ``zero_ns`` to the end of the measurement.
        gpu: pairs of a time in nanoseconds and the GPU memory in bytes.
        ranks: the samples of each rank, if several ranks loaded the model.
    """

    label: str
    result: Result
    samples: Sequence[Sample]
    zero_ns: int
    end_s: float
    gpu: Sequence[tuple[int, int]] = ()
    ranks: Sequence[Sequence[Sample]] = ()


def choose(run: Path, results: Sequence[Result], rows: Sequence[Row]) -> list[Track]:
    """Return the first repeat of the measurement of each row, with the samples of this repeat."""
    first: dict[str, Result] = {}
    for result in latest(results):
        first.setdefault(result.cell.series, result)
    labels = style.row_labels(rows)
    scene = [name for name in style.SCENE if len(values(rows, name)) > 1]
    tracks = []
    for label, row in zip(labels, rows, strict=True):
        result = first[row["group"]]
        words = [captions.dimension(name, row[name]) for name in scene]
        tracks.append(_track(" · ".join([label, *words]), run, result))
    return tracks


def spans(track: Track) -> list[tuple[str, float, float]]:
    """Return name, start and end (s) of each phase, and of an unfinished phase at an early end."""
    ended = [
        (p.name, (p.start_ns - track.zero_ns) / 1e9, (p.end_ns - track.zero_ns) / 1e9)
        for p in track.result.phases
    ]
    last = track.result.last_phase
    if track.result.outcome in CUT_OFF and last and last not in {name for name, _, _ in ended}:
        ended.append((last, ended[-1][2] if ended else 0.0, track.end_s))
    return ended


def cut_at(track: Track) -> tuple[float, float]:
    """Return the time in seconds and the memory in GiB at which a measurement was cut off.

    For a command that the kernel killed, return the time and memory of the highest sample instead,
    because the last samples of the command's cgroup come after the kill.
    """
    if not track.samples:
        return track.end_s, 0.0
    peak_ns = track.result.ran.peak_ns if track.result.ran else None
    if peak_ns is not None and track.result.outcome is Outcome.OOM_KILLED:
        nearest = min(track.samples, key=lambda sample: abs(sample.t_ns - peak_ns))
        return (nearest.t_ns - track.zero_ns) / 1e9, nearest.rss_bytes / GIB
    return track.end_s, track.samples[-1].rss_bytes / GIB


def marks(track: Track) -> list[tuple[float, str]]:
    """Return the output lines that --mark selected, each with its time in s after ``zero_ns``."""
    marked = track.result.ran.marks if track.result.ran else ()
    return [((mark.t_ns - track.zero_ns) / 1e9, mark.text) for mark in marked]


def phase_peak(result: Result, phase: Phase) -> int | None:
    """Return the exact memory peak of a phase: of a load or save, peak RSS; of a command, the cgroup's."""
    return phase.peak_rss_bytes if result.ran is None else phase.peak_cgroup_bytes


def longest(tracks: Sequence[Track]) -> float:
    """Return the length in seconds of the time axis that several drawings share.

    Measurements that weighin stopped make the axis at most twice as long as the longest other one.
    """
    ended = [t.end_s for t in tracks if t.result.outcome not in _STOPPED and t.end_s]
    most = max((track.end_s for track in tracks), default=0.0)
    return min(most, 2 * max(ended)) * 1.02 if ended else most or 1.0


def highest(tracks: Sequence[Track]) -> float:
    """Return the top in GiB of the memory axis that several drawings share.

    The top is the highest memory, or a higher RAM limit that is at most twice as high.
    """
    sampled = [sample.rss_bytes for track in tracks for sample in track.samples]
    peaks = [
        phase_peak(track.result, phase) or 0 for track in tracks for phase in track.result.phases
    ]
    gpu = [used for track in tracks for _, used in track.gpu]
    data = max([*sampled, *peaks, *gpu], default=0)
    limits = [track.result.cell.ram_limit_bytes or 0 for track in tracks]
    near = [limit for limit in limits if not data or limit <= 2 * data]
    return max([data, *near]) / GIB or 1.0


def has_part(samples: Sequence[Sample], part: str) -> bool:
    """Return whether at least one sample has memory of this part, which is one of ``PARTS``."""
    return any(getattr(sample, part) for sample in samples)


def thin(
    points: Sequence[_Point], most: int, memory: Callable[[_Point], int] = attrgetter("rss_bytes")
) -> list[_Point]:
    """Return at most ``most`` points: of each group of neighbouring points, the one with most memory."""
    step = max(1, -(-len(points) // most))
    bins = (points[start : start + step] for start in range(0, len(points), step))
    return [max(one, key=memory) for one in bins]


def anonymous_by_rank(track: Track, points: Sequence[Sample]) -> list[list[int]]:
    """Return the anonymous memory of each rank in bytes, at the times of ``points``."""
    layers = []
    for samples in track.ranks:
        times = [sample.t_ns for sample in samples]
        places = [bisect_right(times, point.t_ns) for point in points]
        layers.append([samples[at - 1].anon_bytes if at else 0 for at in places])
    return layers


def _track(label: str, run: Path, result: Result) -> Track:
    samples = read_samples(run, result.samples_path)
    if result.ran:
        samples = list(map(_of_group, samples))
    times = [sample.t_ns for sample in (*samples[:1], *samples[-1:])]
    zero = min([*(phase.start_ns for phase in result.phases), *times], default=0)
    end = max([*(phase.end_ns for phase in result.phases), *times], default=0)
    ranks = [read_samples(run, rank.samples_path) for rank in result.ranks]
    return Track(
        label,
        result,
        samples,
        zero,
        (end - zero) / 1e9,
        _gpu(samples),
        ranks if all(ranks) else (),
    )


def _of_group(sample: Sample) -> Sample:
    """Replace file-backed memory by the cgroup's page cache, and count TCP sockets as the kernel's."""
    if sample.cgroup_file_bytes is None or sample.cgroup_shmem_bytes is None:
        return sample
    file = max(0, sample.cgroup_file_bytes - sample.cgroup_shmem_bytes)
    kernel = (sample.kernel_bytes or 0) + (sample.socket_bytes or 0)
    total = sample.anon_bytes + sample.shmem_bytes + file + kernel
    return replace(sample, file_bytes=file, rss_bytes=total, kernel_bytes=kernel)


def _gpu(samples: Sequence[Sample]) -> list[tuple[int, int]]:
    return [
        (sample.t_ns, sample.cuda_allocated_bytes)
        for sample in samples
        if sample.cuda_allocated_bytes is not None
    ]
