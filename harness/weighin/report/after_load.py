"""Tabulate the memory of using a loaded model, for example of a training step, for each strategy.

A number is (anonymous memory - anonymous memory after the imports) / the size of the model.
"""

from collections.abc import Callable, Sequence
from typing import Final

from weighin.cell import FORK, NONE
from weighin.records import metrics
from weighin.records.metrics import grouped, middle
from weighin.report import captions
from weighin.report.findings import Found, of_texts
from weighin.report.rows import Row, series, split, values, varying
from weighin.report.tables import HEADINGS, name_text
from weighin.result import Outcome, Result

TITLE: Final = "After the load"
NOTE: Final = (
    "Each figure is a multiple of the model's size: anonymous memory, which the kernel cannot reclaim,"
    " minus the anonymous memory after the imports. A use has two figures: the largest during the use"
    " (sampled), and the one at the end of the use (exact)."
)
_NOTE_FORK: Final = "fork: the private memory that each of two forked processes adds (exact)."
_READY: Final = "loaded"
_MISSING: Final = "-"


def found(results: Sequence[Result]) -> list[Found]:
    """Return a list with the table of uses; an empty list if models ran nothing but forward passes."""
    if not any(result.cell.use for result in results):
        return []
    loads = [one for one in results if one.cell.operation == "load"]
    rows = series(loads)
    names = ["strategy", *(name for name in varying(rows) if name != "use")]
    groups = grouped(loads, lambda one: one.cell.series)
    uses = [use for use in values(rows, "use") if use != NONE]
    lines = [
        [*(name_text(name, group[0]) for name in names), *_cells(group, groups, uses)]
        for group in split(rows, names).values()
    ]
    heads = [*(HEADINGS.get(name, name) for name in names), _READY, *uses]
    notes = [NOTE, *([_NOTE_FORK] if any(one.cell.use == FORK for one in results) else [])]
    caption = captions.shared(series(results), results, without=("use",))
    return [Found(TITLE, heads, of_texts(lines), len(names), caption, notes)]


def _cells(rows: Sequence[Row], groups: dict[str, list[Result]], uses: Sequence[str]) -> list[str]:
    """Return the memory of one strategy after the load, followed by its memory in each use."""
    of_use = {row["use"]: groups[row["group"]] for row in rows}
    everything = [result for group in of_use.values() for result in group]
    texts = [_use_text(of_use.get(use, [])) for use in uses]
    return [multiple(everything, metrics.ready_anon), *texts]


def _use_text(repeats: Sequence[Result]) -> str:
    good = [result for result in repeats if result.outcome is Outcome.OK]
    if not good:
        ended = [one.outcome.value for one in repeats if one.outcome is not Outcome.SKIPPED]
        return ", ".join(dict.fromkeys(ended)) or _MISSING
    if children := [size for one in good if (size := metrics.use_child_bytes(one))]:
        size = good[0].model_bytes
        return f"+{max(children) / size:.2f}" if size else _MISSING
    return f"{multiple(good, metrics.use_most_anon_bytes)} {multiple(good, metrics.use_anon_bytes)}"


def multiple(results: Sequence[Result], read: Callable[[Result], int | None]) -> str:
    """Return the median of (``read(result)`` - anonymous memory after imports) / model size, as text."""
    found = middle(metrics.per_model(result, read(result)) for result in results)
    return _MISSING if found is None else f"{max(found, 0.0):.2f}"
