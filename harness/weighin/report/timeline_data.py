"""Select the data of timelines: samples and phases of each series' first repeat, on shared axes."""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pandas as pd

from weighin.record import Outcome, Phase, Result
from weighin.records.repeats import latest
from weighin.report import captions, style
from weighin.report.dataframe import possible, rank_samples, samples
from weighin.units import GIB

# Outcomes that end a cell early; a timeline marks the time of the end.
CUT_OFF: Final = frozenset(
    {
        Outcome.OOM_KILLED,
        Outcome.CUDA_OOM,
        Outcome.TIMEOUT,
        Outcome.THRASHING,
        Outcome.STRATEGY_FAILED,
        Outcome.MEASUREMENT_FAILED,
        Outcome.COMMAND_FAILED,
        Outcome.USE_FAILED,
    }
)
# weighin chose the time of these ends.
_STOPPED: Final = (Outcome.TIMEOUT, Outcome.THRASHING)
_TRACED: Final = ("t_ns", "requested_bytes")
PARTS: Final = ("anon_bytes", "file_bytes", "shmem_bytes")


@dataclass(frozen=True, slots=True)
class Track:
    """One cell's memory over time from ``zero_ns``, the start of its first phase or first sample.

    ``gpu`` has the columns t_ns and bytes, with exact values from a trace or else samples. ``ranks``
    has the samples of each rank of a cell of several ranks. Of a command in a cgroup, the file-backed
    memory of ``table`` is all page cache that is charged to the group.
    """

    label: str
    result: Result
    table: pd.DataFrame | None
    zero_ns: int
    end_s: float
    gpu: pd.DataFrame | None = None
    ranks: Sequence[pd.DataFrame] = ()


def choose(run: Path, results: Sequence[Result], frame: pd.DataFrame) -> list[Track]:
    """Return the first repeat of each series of ``frame``, with its samples."""
    first: dict[str, Result] = {}
    for result in latest(results):
        first.setdefault(result.cell.series, result)
    labels = style.row_labels(frame)
    scene = [name for name in style.SCENE if frame[name].nunique(dropna=False) > 1]
    tracks = []
    for label, (_, row) in zip(labels, frame.iterrows(), strict=True):
        result = first[row["group"]]
        words = [captions.dimension(name, row[name]) for name in scene]
        tracks.append(_track(" · ".join([label, *words]), run, result))
    return tracks


def spans(track: Track) -> list[tuple[str, float, float]]:
    """Return the phases as (name, start, end) in seconds, including one that was cut off."""
    ended = [
        (p.name, (p.start_ns - track.zero_ns) / 1e9, (p.end_ns - track.zero_ns) / 1e9)
        for p in track.result.phases
    ]
    last = track.result.last_phase
    if track.result.outcome in CUT_OFF and last and last not in {name for name, _, _ in ended}:
        ended.append((last, ended[-1][2] if ended else 0.0, track.end_s))
    return ended


def cut_at(track: Track) -> tuple[float, float]:
    """Return the time in seconds and the memory in GiB at which a cell was cut off.

    The last samples of a killed command come after the kill: its place is the sample with the most memory.
    """
    table = track.table
    if table is None:
        return track.end_s, 0.0
    ran, at = track.result.ran, table.index[-1]
    if ran and ran.peak_ns is not None and track.result.outcome is Outcome.OOM_KILLED:
        at = int((table["t_ns"] - ran.peak_ns).abs().to_numpy().argmin())
        return (table["t_ns"].iloc[at] - track.zero_ns) / 1e9, float(
            table["rss_bytes"].iloc[at]
        ) / GIB
    return track.end_s, float(table["rss_bytes"][at]) / GIB


def marks(track: Track) -> list[tuple[float, str]]:
    """Return the marks of a command's output, in seconds from the start, with their lines."""
    marked = track.result.ran.marks if track.result.ran else ()
    return [((mark.t_ns - track.zero_ns) / 1e9, mark.text) for mark in marked]


def phase_peak(result: Result, phase: Phase) -> int | None:
    """Return the exact peak of a phase in the memory that is drawn: of the worker, or of the group."""
    return phase.peak_rss_bytes if result.ran is None else phase.peak_cgroup_bytes


def longest(tracks: Sequence[Track]) -> float:
    """Return the shared time axis's length in seconds; a timed-out cell can at most double it."""
    ended = [t.end_s for t in tracks if t.result.outcome not in _STOPPED and t.end_s]
    most = max((track.end_s for track in tracks), default=0.0)
    return min(most, 2 * max(ended)) * 1.02 if ended else most or 1.0


def highest(tracks: Sequence[Track]) -> float:
    """Return the top of the shared memory axis in GiB, which includes a limit near the data."""
    tables = [track.table for track in tracks if track.table is not None]
    peaks = [
        phase_peak(track.result, phase) or 0 for track in tracks for phase in track.result.phases
    ]
    gpu = [float(track.gpu["bytes"].max()) for track in tracks if track.gpu is not None]
    data = max([*(float(table["rss_bytes"].max()) for table in tables), *peaks, *gpu], default=0.0)
    limits = [track.result.cell.ram_limit_bytes or 0 for track in tracks]
    near = [limit for limit in limits if not data or limit <= 2 * data]
    return max([data, *near]) / GIB or 1.0


def thin(table: pd.DataFrame, points: int) -> pd.DataFrame:
    """Return at most ``points`` samples: from each time bin, the sample with the most memory."""
    step = -(-len(table) // points)
    return table.loc[table.groupby(table.index // step)["rss_bytes"].idxmax()]


def anonymous_by_rank(track: Track, points: pd.DataFrame) -> "list[pd.Series[float]]":
    """Return the anonymous memory of each rank, in bytes, at the times of ``points``."""
    return [
        pd.merge_asof(points[["t_ns"]], table[["t_ns", "anon_bytes"]], on="t_ns")[
            "anon_bytes"
        ].fillna(0)
        for table in track.ranks
    ]


def _track(label: str, run: Path, result: Result) -> Track:
    table = samples(run, result)
    if table is not None and result.ran:
        table = _of_group(table)
    starts = [phase.start_ns for phase in result.phases]
    ends = [phase.end_ns for phase in result.phases]
    if table is not None:
        starts.append(int(table["t_ns"].iloc[0]))
        ends.append(int(table["t_ns"].iloc[-1]))
    zero = min(starts, default=0)
    end_s = (max(ends, default=0) - zero) / 1e9
    gpu, ranks = _gpu(run, result, table), rank_samples(run, result)
    return Track(label, result, table, zero, end_s, gpu, ranks)


def _of_group(table: pd.DataFrame) -> pd.DataFrame:
    """Return the samples of a command with the page cache of its group as file-backed memory."""
    if not {"cgroup_file_bytes", "cgroup_shmem_bytes"} <= set(table.columns):
        return table
    cached = (table["cgroup_file_bytes"] - table["cgroup_shmem_bytes"]).clip(lower=0)
    file = cached.fillna(table["file_bytes"])
    return table.assign(
        file_bytes=file, rss_bytes=table["anon_bytes"] + table["shmem_bytes"] + file
    )


def _gpu(run: Path, result: Result, table: pd.DataFrame | None) -> pd.DataFrame | None:
    """Return the GPU's memory over time from the trace or the samples; None if neither has it."""
    if result.trace_path is not None:
        with contextlib.suppress(OSError, ValueError):  # ValueError: no table, or other columns
            traced = possible(pd.read_csv(run / result.trace_path, usecols=_TRACED)).dropna()
            if not traced.empty:
                return traced.rename(columns={"requested_bytes": "bytes"})
    if table is None or "cuda_allocated_bytes" not in table:
        return None
    sampled = table[["t_ns", "cuda_allocated_bytes"]].dropna()
    return None if sampled.empty else sampled.rename(columns={"cuda_allocated_bytes": "bytes"})
