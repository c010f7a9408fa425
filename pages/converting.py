"""Tabulate loads that change the weights: the peaks of each as multiples of the result's size."""

from collections.abc import Iterator, Sequence
from typing import Final

from weighin.records.repeats import grouped, middle, outcome_of
from weighin.report import captions
from weighin.report.markdown import table_lines
from weighin.report.rows import series
from weighin.result import Outcome, Result
from weighin.text import markdown as escaped
from weighin.units import MIB, format_seconds

HEADINGS: Final = (
    "load", "strategy", "outcome", "result MiB", "anonymous (sampled), x result", "peak RSS, x result",
    "load time",
)  # fmt: skip
_NAMES: Final = 3


def markdown_converting(results: Sequence[Result]) -> str:
    """Return the table of all series that were measured, in the order of their models."""
    measured = [one for one in results if one.outcome is not Outcome.SKIPPED]
    lines = table_lines(HEADINGS, _rows(measured), names=_NAMES)
    caption = captions.shared(series(measured), measured)
    return "\n".join([*lines, "", escaped(caption)])


def _rows(measured: Sequence[Result]) -> Iterator[tuple[str, ...]]:
    for title, ours in grouped(measured, lambda one: one.cell.model.title).items():
        for repeats in grouped(ours, lambda one: one.cell.series).values():
            good = [one for one in repeats if one.outcome is Outcome.OK]
            cell, size = repeats[0].cell, repeats[0].model_bytes
            options = (f"{name}={value}" for name, value in sorted(cell.options.items()))
            load_ns = middle(one.load_ns for one in good)
            yield (
                title,
                " ".join([cell.strategy, *options]),
                outcome_of(one.outcome for one in repeats),
                f"{size / MIB:.0f}" if size else "-",
                _multiple(map(_anonymous_bytes, good), size),
                _multiple(map(_resident_bytes, good), size),
                "-" if load_ns is None else format_seconds(load_ns),
            )


def _multiple(sizes: Iterator[int | None], of_bytes: int | None) -> str:
    size = middle(sizes)
    return "-" if size is None or not of_bytes else f"{size / of_bytes:.3f}"


def _anonymous_bytes(result: Result) -> int | None:
    """Return the sampled maximum of anonymous memory above the memory after all imports."""
    peak = result.peaks.anon_sampled_bytes
    return peak - result.baseline.anon_bytes if peak and result.baseline else None


def _resident_bytes(result: Result) -> int | None:
    peak = result.peaks.rss_bytes
    return peak - result.baseline.rss_bytes if peak and result.baseline else None
