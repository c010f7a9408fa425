"""Write the tables of a page that helps to choose a loader: ``python -m pages.loaders docs/loaders.md RUN...``.

The page has a table for each model, sorted by the times of the first run.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from page_blocks import by_reason, filled

from weighin.records import run_folder
from weighin.records.metrics import METRICS, grouped, middle
from weighin.records.series import Measured, option_words
from weighin.result import Outcome, Result
from weighin.show import words
from weighin.show.table import Table
from weighin.show.words import scaled
from weighin.text import markdown as escaped
from weighin.units import MIB, format_seconds

HEADINGS: Final = ("strategy", "format", "peak RSS MiB", "private memory left MiB")
"""The headings before those of the times; the memory is that of the first run."""


def tables(runs: Sequence[Sequence[Result]]) -> str:
    """Return the tables for ``runs``, each a list of results."""
    measured = [run for run in runs if any(one.outcome is not Outcome.SKIPPED for one in run)]
    models = grouped(measured, lambda run: _first(run).cell.model.title)
    lines = (line for title, some in models.items() for line in _section(title, some))
    return "\n".join(lines).rstrip()


def _first(run: Sequence[Result]) -> Result:
    return next(one for one in run if one.outcome is not Outcome.SKIPPED)


def _section(title: str, runs: Sequence[Sequence[Result]]) -> Iterator[str]:
    yield f"## {escaped(title)}\n"
    rows: dict[tuple[str, str], tuple[int, list[str]]] = {}
    times: list[dict[tuple[str, str], str]] = []
    for run in runs:
        good = grouped(
            (one for one in run if one.outcome is Outcome.OK), lambda one: one.cell.series
        )
        times.append({})
        for repeats in good.values():
            ready_ns = middle(map(METRICS["ready"].of, repeats))
            if ready_ns is None:
                continue
            cell = repeats[0].cell
            name = " ".join([cell.strategy, *option_words(cell)]), cell.format
            memory = (
                middle(map(METRICS["peak_rss"].of, repeats)),
                middle(map(_private_bytes, repeats)),
            )
            rows.setdefault(name, (ready_ns, [scaled(size, MIB, 0) for size in memory]))
            times[-1][name] = format_seconds(ready_ns)
    heads = [*HEADINGS, *(f"ready, {_first(run).cache}" for run in runs)]
    table = [
        [*name, *memory, *(each.get(name, "-") for each in times)]
        for name, (_, memory) in sorted(rows.items(), key=lambda row: row[1][0])
    ]
    yield Table.of(heads, table, names=2).markdown()
    yield ""
    results = [one for run in runs for one in run]
    reasons = [
        (one.cell.strategy, one.message or one.outcome)
        for one in results
        if one.outcome is not Outcome.OK
    ]
    if reasons:
        yield "\n".join(["Not in the table:", "", *by_reason(reasons), ""])
    measured = [one for one in results if one.outcome is not Outcome.SKIPPED]
    yield f"{escaped(words.shared(Measured(measured)))} · {_repeats(measured)}\n"


def _repeats(measured: Sequence[Result]) -> str:
    """Return how many repeats ended ok: "3 repeats", "1 to 2 repeats"."""
    good = Counter(result.cell.series for result in measured if result.outcome is Outcome.OK)
    least, most = min(good.values(), default=0), max(good.values(), default=0)
    return f"{least} to {most} repeats" if least != most else f"{most} repeat{'s' * (most != 1)}"


def _private_bytes(result: Result) -> int | None:
    left = METRICS["ready_anon"].of(result)
    return (
        max(0, left - result.baseline.anon_bytes) if left is not None and result.baseline else None
    )


def main() -> None:
    page, *folders = map(Path, sys.argv[1:])
    runs = [run_folder.read(folder) for folder in folders]
    for warning in (text for run in runs for text in run.warnings):
        print(warning, file=sys.stderr)
    text = tables([run.results for run in runs])
    page.write_text(filled(page.read_text(), {"pages/loaders.py": text}))


if __name__ == "__main__":
    main()
