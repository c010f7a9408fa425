"""Show a test the phases of a measurement, and no peaks of one that did not end ok."""

from dataclasses import fields
from typing import Any, Final

from weighin.result import Outcome, Result
from weighin.units import format_bytes, format_seconds

_FIGURES: Final = ("peaks", "above_import_bytes", "use_phases")
_HEADS: Final = ("phase", "time", "peak RSS", "anonymous at end", "cgroup peak", "CUDA peak")


class NotOk(Result):
    """A ``Result`` of a failed measurement: to read its peaks raises AssertionError.

    The peaks of a failed load do not show how much memory the load needs. A test that expects a
    failure can read ``outcome``, ``message`` and ``phases``.
    """

    __slots__ = ()

    def __getattribute__(self, name: str) -> Any:
        if name in _FIGURES:
            __tracebackhide__ = True
            end = f"{self.outcome}: {self.message}" if self.message else self.outcome
            raise AssertionError(
                f"{name} cannot be read, because {self.cell.strategy} did not end ok: {end}\nthe"
                " peaks of such a load are incomplete: if the outcome is intended, assert"
                ' run.outcome == "..." and read no peaks'
            )
        return super().__getattribute__(name)

    def __repr__(self) -> str:
        """Return a short text, which pytest prints when an assertion on the outcome fails."""
        return f"<result of {self.cell.strategy}: {self.outcome}>"


def guarded(result: Result) -> Result:
    """Return the result if its outcome is ok, else a ``NotOk``."""
    if result.outcome is Outcome.OK:
        return result
    return NotOk(**{each.name: getattr(result, each.name) for each in fields(result)})


def phase_table(result: Result) -> str:
    """Return a table of the phases; an error message and the RSS at the start follow, if any."""
    rows = [
        (
            phase.name,
            format_seconds(phase.end_ns - phase.start_ns),
            *(
                "-" if size is None else format_bytes(size)
                for size in (
                    phase.peak_rss_bytes,
                    phase.end.anon_bytes,
                    phase.peak_cgroup_bytes,
                    phase.peak_cuda_allocated_bytes,
                )
            ),
        )
        for phase in result.phases
    ]
    columns = [each for each in zip(_HEADS, *rows, strict=True) if {*each[1:]} - {"-"}]
    widths = [max(map(len, column)) for column in columns]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip()
        for row in zip(*columns, strict=True)
    ]
    if result.message:
        lines.append(f"{result.outcome}: {result.message}")
    if result.baseline:
        lines.append(f"RSS at the start: {format_bytes(result.baseline.rss_bytes)}")
    return "\n".join(lines)
