"""Format the phases of one measurement as a text table for the report of a failed test."""

from weighin.result import Phase, Result
from weighin.units import format_bytes, format_seconds

_HEADS = ("phase", "time", "peak RSS", "anonymous at end", "cgroup peak", "CUDA peak")


def phase_table(result: Result) -> str:
    """Return a table of the phases; an error message and the RSS at the start follow, if any."""
    rows = [_HEADS, *(_row(phase) for phase in result.phases)]
    used = [column for column in range(len(_HEADS)) if any(row[column] != "-" for row in rows[1:])]
    widths = {column: max(len(row[column]) for row in rows) for column in used}
    lines = [
        "  ".join(
            row[column].rjust(widths[column]) if column else row[column].ljust(widths[column])
            for column in used
        ).rstrip()
        for row in rows
    ]
    if result.message:
        lines.append(f"{result.outcome}: {result.message}")
    if result.baseline:
        lines.append(f"RSS at the start: {format_bytes(result.baseline.rss_bytes)}")
    return "\n".join(lines)


def _row(phase: Phase) -> tuple[str, ...]:
    return (
        phase.name,
        format_seconds(phase.end_ns - phase.start_ns),
        format_bytes(phase.peak_rss_bytes),
        format_bytes(phase.end.anon_bytes),
        _size(phase.peak_cgroup_bytes),
        _size(phase.peak_cuda_allocated_bytes),
    )


def _size(value: int | None) -> str:
    return "-" if value is None else format_bytes(value)
