"""What surrounds the figures of a run: its machine, its warnings, and how each figure was taken."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pandas as pd

from weighin.record import Result
from weighin.records.machine import settings_of
from weighin.report import captions

_SOURCES: Final = (
    ("load", "s", "until the strategy returned, without the time that marks took", "exact, clock"),
    ("ready", "s", "load, and until every byte of every parameter and buffer was read through once: a lazy load has not loaded when it returns", "exact, clock"),
    ("peak RSS", "GiB", "highest resident set until ready: the kernel's VmHWM, reset at the start of each phase; of a cell that was killed, as last seen", "exact, kernel"),
    ("above import", "x model", "peak RSS less the resident set after import torch, over the size of all parameters and buffers", "exact, computed"),
    ("anonymous", "GiB", "largest part of the resident set that cannot be given back; looked at from outside, so a short spike may be missed", "sampled"),
    ("file-backed", "GiB", "largest part that is mapped files, which the kernel may take back; need not be at the same time as the largest anonymous part", "sampled"),
    ("cgroup peak", "GiB", "highest charge of the cell's cgroup, with the page cache that it was first to touch: a peak at the limit says nothing about need", "exact, kernel"),
    ("outcome", "", "ok: every parameter and buffer was compared with the checkpoint, and the model ran once. oom_killed: the kernel's own counter says so", "exact"),
)  # fmt: skip
# The same figures of a save, and those that only a save has.
_OF_SAVES: Final = {
    "load": ("save", "s", "until the strategy returned, without the time that marks took", "exact, clock"),
    "ready": ("on the disk", "s", "save, and until every file was synced (fsync)", "exact, clock"),
    "above import": ("above the model", "x model", "peak RSS less the resident set with the model in memory, over the size of all parameters and buffers", "exact, computed"),
    "outcome": ("outcome", "", "ok: what was written was read back from the disk, and every tensor compared with the model. oom_killed: the kernel's own counter says so", "exact"),
}  # fmt: skip
_WRITTEN: Final = (
    ("written", "GiB", "sizes of the files, together", "exact"),
    ("files", "", "how many files", "exact"),
)
_CUDA: Final = (
    ("CUDA requested", "GiB", "highest sum of what tensors on the GPU asked for, during the load", "exact, allocator"),
    ("CUDA allocated", "GiB", "the same, rounded up to the allocator's blocks", "exact, allocator"),
    ("CUDA reserved", "GiB", "highest sum that the allocator held of the driver", "exact, allocator"),
    ("CUDA driver", "GiB", "largest figure of the driver's own: the context and the libraries' buffers too", "sampled"),
    ("pinned", "GiB", "highest sum of page-locked host memory", "its allocator's mark"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fact:
    """One key of the environment; where cells differ, each value with the number of its cells."""

    key: str
    values: list[str]

    @property
    def differs(self) -> bool:
        return len(self.values) > 1


def environment(results: Sequence[Result]) -> list[Fact]:
    """Return what the cells were measured on, a line for each key that was recorded."""
    found: dict[str, dict[str, int]] = {}
    for result in results:
        for key, value in settings_of([result.environment]).items():
            counts = found.setdefault(key, {})
            counts[_text(value)] = counts.get(_text(value), 0) + 1
    return [Fact(key, _counted(counts)) for key, counts in found.items()]


def figures(frame: pd.DataFrame) -> list[tuple[str, str, str, str]]:
    """Return name, unit, meaning and exactness of each figure in the report."""
    if frame.empty:
        return []
    found = list(_SOURCES)
    if captions.doing(frame) == "saving":
        found = [*(_OF_SAVES.get(one[0], one) for one in found), *_WRITTEN]
    cuda = bool(frame["peak_cuda_allocated_bytes"].notna().any())
    return [*found, *_CUDA] if cuda else found


def when(results: Sequence[Result]) -> str:
    """Return when the run was measured: the first and the last start of a cell."""
    starts = sorted(result.started_at[:16].replace("T", " ") for result in results if result.started_at)  # fmt: skip
    if not starts:
        return ""
    first, last = starts[0], starts[-1]
    zone = " UTC" if all(r.started_at.endswith("+00:00") for r in results if r.started_at) else ""
    return (first if first == last else f"{first} to {last}") + zone


def _text(value: object) -> str:
    if value is None or value == "":
        return "not known"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _counted(counts: Mapping[str, int]) -> list[str]:
    if len(counts) == 1:
        return list(counts)
    return [f"{value} ({number} {'cell' if number == 1 else 'cells'})" for value, number in counts.items()]  # fmt: skip
