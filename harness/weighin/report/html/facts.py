"""List the machine and software of a run, and the meaning and accuracy of each figure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pandas as pd

from weighin.record import Result
from weighin.records.machine import settings_of
from weighin.report import captions

_SOURCES: Final = (
    ("load", "s", "time until the strategy returned, without the pauses at the ends of phases in which peaks are read", "exact, clock"),
    ("ready", "s", "load plus the time until every byte of every parameter and buffer was read once; a lazy load has not read the file when it returns", "exact, clock"),
    ("peak RSS", "GiB", "highest resident set size until ready: the kernel's VmHWM, reset at the start of each phase; for a killed cell, the last reading", "exact, kernel"),
    ("above import", "x model", "peak RSS less the resident set size after import torch, divided by the size of all parameters and buffers", "exact, computed"),
    ("anonymous", "GiB", "sampled maximum of the anonymous memory, which the kernel cannot reclaim; sampled from outside, so a short spike may be missed", "sampled"),
    ("file-backed", "GiB", "sampled maximum of the resident pages of mapped files, which the kernel can reclaim; may occur at another time than the maximum of anonymous memory", "sampled"),
    ("cgroup peak", "GiB", "highest charge of the cell's cgroup, including page cache that the cell was first to read: a peak at the limit does not show that the cell needs so much", "exact, kernel"),
    ("outcome", "", "ok: every parameter and buffer was compared with the checkpoint, and the model ran once. oom_killed: reported by the kernel's own counter", "exact"),
)  # fmt: skip
# Meanings of figures for saves, including figures that only saves have.
_OF_SAVES: Final = {
    "load": ("save", "s", "time until the strategy returned, without the pauses at the ends of phases in which peaks are read", "exact, clock"),
    "ready": ("on the disk", "s", "save plus the time until every file was synced (fsync)", "exact, clock"),
    "above import": ("above the model", "x model", "peak RSS less the resident set size with the model in memory, divided by the size of all parameters and buffers", "exact, computed"),
    "outcome": ("outcome", "", "ok: the written files were read back from the disk, and every tensor was compared with the model. oom_killed: reported by the kernel's own counter", "exact"),
}  # fmt: skip
_WRITTEN: Final = (
    ("written", "GiB", "total size of the files", "exact"),
    ("files", "", "number of files", "exact"),
)
_CUDA: Final = (
    ("CUDA requested", "GiB", "peak of the bytes that tensors on the GPU requested during the load", "exact, allocator"),
    ("CUDA allocated", "GiB", "the same, with each request rounded up to the allocator's blocks", "exact, allocator"),
    ("CUDA reserved", "GiB", "peak of the bytes that the allocator reserved from the driver", "exact, allocator"),
    ("CUDA driver", "GiB", "sampled maximum of the driver's own figure, which includes the CUDA context and buffers of libraries", "sampled"),
    ("pinned", "GiB", "peak of page-locked host memory", "exact, its allocator"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fact:
    """One key of the environment with its value, or with each value and its number of cells."""

    key: str
    values: list[str]

    @property
    def differs(self) -> bool:
        return len(self.values) > 1


def environment(results: Sequence[Result]) -> list[Fact]:
    """Return the machine and software of the cells, one fact for each recorded key."""
    counts_of: dict[str, dict[str, int]] = {}
    for result in results:
        for key, value in settings_of([result.environment]).items():
            counts = counts_of.setdefault(key, {})
            counts[_text(value)] = counts.get(_text(value), 0) + 1
    return [Fact(key, _counted(counts)) for key, counts in counts_of.items()]


def figures(frame: pd.DataFrame) -> list[tuple[str, str, str, str]]:
    """Return the name, unit, meaning and accuracy of each figure in the report."""
    if frame.empty:
        return []
    rows = list(_SOURCES)
    if captions.doing(frame) == "saving":
        rows = [*(_OF_SAVES.get(row[0], row) for row in rows), *_WRITTEN]
    cuda = bool(frame["peak_cuda_allocated_bytes"].notna().any())
    return [*rows, *_CUDA] if cuda else rows


def when(results: Sequence[Result]) -> str:
    """Return the time of the run: the start of its first cell and the start of its last cell."""
    starts = sorted(result.started_at[:16].replace("T", " ") for result in results if result.started_at)  # fmt: skip
    if not starts:
        return ""
    first, last = starts[0], starts[-1]
    zone = " UTC" if all(r.started_at.endswith("+00:00") for r in results if r.started_at) else ""
    return (first if first == last else f"{first} to {last}") + zone


def _text(value: object) -> str:
    if value is None or value == "":
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _counted(counts: Mapping[str, int]) -> list[str]:
    if len(counts) == 1:
        return list(counts)
    return [f"{value} ({number} {'cell' if number == 1 else 'cells'})" for value, number in counts.items()]  # fmt: skip
