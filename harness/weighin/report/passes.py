"""Tabulate the forward passes after a load: the time and the major faults of each pass."""

from collections.abc import Sequence
from typing import Final

from weighin.records.metrics import grouped, middle
from weighin.report import captions
from weighin.report.findings import Found, of_texts
from weighin.report.rows import series, varying
from weighin.report.tables import HEADINGS, name_text
from weighin.result import Phase, Result
from weighin.units import format_seconds

NOTE: Final = (
    "A forward pass has three figures: its time, its major page faults (waits for the disk), and the bytes"
    " of evicted pages that it read again (refaults), as a multiple of the model's size."
)


def found(results: Sequence[Result]) -> list[Found]:
    """Return a table of the forward passes; an empty list if every model was called at most once.

    Of several repeats, the table shows the repeat whose passes took the median time.
    """
    if not any(len(_passes(result)) > 1 for result in results):
        return []
    all_series = series(results)
    names = ["strategy", *varying(all_series)]
    groups = grouped(filter(_passes, results), lambda one: one.cell.series)
    rows = []
    for row in all_series:
        if (repeats := groups.get(row["group"])) is None:
            continue
        typical_ns = middle(map(_spent_ns, repeats))
        chosen = next(repeat for repeat in repeats if _spent_ns(repeat) == typical_ns)
        words = [name_text(name, row) for name in names]
        rows.append([*words, *(_pass_text(each, chosen) for each in _passes(chosen))])
    most = max(map(len, rows)) - len(names)
    heads = [
        *(HEADINGS.get(name, name) for name in names),
        *(f"pass {number + 1}" for number in range(most)),
    ]
    fields = of_texts([row + ["-"] * (len(heads) - len(row)) for row in rows])
    caption = captions.shared(all_series, results)
    return [Found("Forward passes", heads, fields, len(names), caption, [NOTE])]


def _pass_text(phase: Phase, result: Result) -> str:
    words = [format_seconds(phase.end_ns - phase.start_ns), f"{phase.major_faults} faults"]
    if phase.workingset_refault_file is not None and result.model_bytes:
        words.append(
            f"{phase.workingset_refault_file * result.page_bytes / result.model_bytes:.2f}x reread"
        )
    return ", ".join(words)


def _passes(result: Result) -> list[Phase]:
    return [phase for phase in result.phases if phase.name == "forward"]


def _spent_ns(result: Result) -> int:
    return sum(phase.end_ns - phase.start_ns for phase in _passes(result))
