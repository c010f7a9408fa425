"""List the machine and software of a run, and the meaning and accuracy of each figure."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from weighin.record import Result
from weighin.records.machine import settings_of
from weighin.report import captions, operations
from weighin.report.rows import Row, has

_CUDA: Final = (
    ("CUDA requested", "GiB", "peak of the bytes that tensors on the GPU requested during the load", "exact, allocator"),
    ("CUDA allocated", "GiB", "the same, with each request rounded up to the allocator's blocks", "exact, allocator"),
    ("CUDA reserved", "GiB", "peak of the bytes that the allocator reserved from the driver", "exact, allocator"),
    ("CUDA driver", "GiB", "sampled maximum of the driver's own figure, which includes the CUDA context and buffers of libraries", "sampled"),
    ("pinned", "GiB", "peak of page-locked host memory", "exact, its allocator"),
)  # fmt: skip


_USES: Final = (
    ("use", "s", "time of the use of the ready model, in a phase of its own", "exact, clock"),
    ("peak RSS of use", "GiB", "highest resident set size during the use", "exact, kernel"),
    ("most in use", "x model", "sampled maximum of anonymous memory during the use, less that after the imports, divided by the model's size", "sampled"),
    ("after use", "x model", "anonymous memory at the end of the use, less that after the imports, divided by the model's size", "exact"),
    ("forked process", "GiB", "private dirty memory of the forked process with the most, after it wrote every weight", "exact at that instant"),
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
    counts_of: dict[str, Counter[str]] = {}
    for result in results:
        for key, value in settings_of([result.environment]).items():
            counts_of.setdefault(key, Counter())[_text(value)] += 1
    return [Fact(key, _counted(counts)) for key, counts in counts_of.items()]


def figures(rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    """Return the name, unit, meaning and accuracy of each figure in the report."""
    if not rows:
        return []
    meanings = dict.fromkeys(one for kind in operations.of(rows) for one in kind.meanings)
    uses = _USES if captions.has_uses(rows) else ()
    return [*meanings, *uses, *(_CUDA if has(rows, "peak_cuda_allocated_bytes") else ())]


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
