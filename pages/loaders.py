"""Print docs/loaders.md, which helps to choose a loader: ``python -m pages.loaders RUN...``.

The page has a table for each model, sorted by the times of the first run.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from predicted_runs import check

from weighin.records import run_folder
from weighin.records.metrics import METRICS, middle
from weighin.records.run import Measured
from weighin.result import Outcome, Result
from weighin.show import words
from weighin.show.table import Table
from weighin.show.words import by_reason, scaled
from weighin.text import markdown as escaped
from weighin.units import MIB, format_seconds

HEADINGS: Final = (
    "strategy",
    "format",
    "peak RSS MiB",
    "predicted floor MiB",
    "private memory left MiB",
)
"""The headings before those of the times; the memory is that of the first run."""
_NAMES: Final = 2

INTRODUCTION: Final = """\
# Loaders

`make peers MODEL=gpt2-small` measures all strategies that can load a model, and writes this page. Figures are medians of the repeats. A
strategy that cannot read the format of a Hugging Face folder reads a copy in the first format that it supports.

* **peak RSS**: the highest resident memory of the loading process, including torch.
* **predicted floor**: the smallest RAM limit under which the load succeeds, as `weighin predict` computes it. "-": `predict`
  cannot predict this strategy.
* **private memory left**: the process's anonymous memory with the loaded model, minus that after `import torch`. Without swap, the kernel cannot
  reclaim private memory. The pages of a mapped file are not private: the kernel can drop and read them again.
* **ready**: the time from the start of the load until every byte of the loaded model was read. A strategy that maps the file returns the
  model before this reading. At the start, the page cache holds no page of the checkpoint (cold) or all of its pages (warm).

If the whole model fits into RAM, a strategy that maps the file needs the least private memory. If RAM is so short that the kernel drops pages of
the file, take the fastest strategy that holds one copy of the weights. [Many tensors](many-tensors.md) shows how the time of a load grows with the
number of tensors.
"""


@dataclass(frozen=True, slots=True)
class _Row:
    ready_ns: int
    memory: tuple[str, ...]


def page(runs: Sequence[Sequence[Result]], floors: Mapping[str, int | None]) -> str:
    """Return the page for ``runs``, each a list of results.

    ``floors`` has the predicted RAM floors in bytes, by ``cell.series``.
    """
    models: dict[str, list[list[Result]]] = {}
    for results in runs:
        measured = [result for result in results if result.outcome is not Outcome.SKIPPED]
        if measured:
            models.setdefault(measured[0].cell.model.title, []).append(list(results))
    lines = (line for title, some in models.items() for line in _section(title, some, floors))
    return "\n".join([INTRODUCTION, *lines])


def _section(
    title: str, runs: Sequence[Sequence[Result]], floors: Mapping[str, int | None]
) -> Iterator[str]:
    yield f"## {escaped(title)}\n"
    results = [result for run in runs for result in run]
    measured = [result for result in results if result.outcome is not Outcome.SKIPPED]
    tables = [dict(_rows(run, floors)) for run in runs]
    found: dict[tuple[str, str], _Row] = {}
    for table in tables:
        found = table | found
    times = [f"ready, {_cache(run)}" for run in runs]
    rows = [
        (*name, *row.memory, *(_time(table[name].ready_ns) if name in table else "-" for table in tables))
        for name, row in sorted(found.items(), key=lambda one: one[1].ready_ns)
    ]  # fmt: skip
    yield Table.of((*HEADINGS, *times), rows, names=_NAMES).markdown()
    yield ""
    yield from _left_out(results)
    yield f"{escaped(words.shared(Measured(measured)))} · {_repeats(measured)}\n"


def _cache(run: Sequence[Result]) -> str:
    """Return the state of the page cache in a run: "cold"."""
    return next(str(result.cache) for result in run if result.outcome is not Outcome.SKIPPED)


def _rows(
    results: Sequence[Result], floors: Mapping[str, int | None]
) -> Iterator[tuple[tuple[str, str], _Row]]:
    """Yield the name, format and row of each strategy with a repeat that ended ok."""
    for name in dict.fromkeys(result.cell.series for result in results):
        good = [
            result
            for result in results
            if result.cell.series == name and result.outcome is Outcome.OK
        ]
        ready_ns = middle(map(METRICS["ready"].of, good))
        if ready_ns is None:
            continue
        cell = good[0].cell
        label = " ".join([cell.strategy, *(f"{k}={v}" for k, v in sorted(cell.options.items()))])
        memory = (
            scaled(middle(map(METRICS["peak_rss"].of, good)), MIB, 0),
            scaled(floors.get(name), MIB, 0),
            scaled(middle(map(_private_bytes, good)), MIB, 0),
        )
        yield (label, cell.format), _Row(ready_ns, memory)


def _repeats(measured: Sequence[Result]) -> str:
    """Return how many repeats ended ok: "3 repeats", "1 to 2 repeats"."""
    good = Counter(result.cell.series for result in measured if result.outcome is Outcome.OK)
    least, most = min(good.values(), default=0), max(good.values(), default=0)
    return f"{least} to {most} repeats" if least != most else f"{most} repeat{'s' * (most != 1)}"


def _left_out(results: Sequence[Result]) -> Iterator[str]:
    """Yield the strategies that have no row, grouped by the reason."""
    reasons = [
        (result.cell.strategy, result.message or result.outcome)
        for result in results
        if result.outcome is not Outcome.OK
    ]
    if reasons:
        yield "\n".join(["Not in the table:", "", *by_reason(reasons), ""])


def _private_bytes(result: Result) -> int | None:
    left = METRICS["ready_anon"].of(result)
    return (
        max(0, left - result.baseline.anon_bytes) if left is not None and result.baseline else None
    )


def _time(duration_ns: int | None) -> str:
    return "-" if duration_ns is None else format_seconds(duration_ns)


def main() -> None:
    folders = [Path(name) for name in sys.argv[1:]]
    runs = [run_folder.read(folder) for folder in folders]
    checked = [check(folder, run) for folder, run in zip(folders, runs, strict=True)]
    predictions = [each.prediction for of_run in checked for each in of_run]
    floors = {each.cell.series: each.floor_bytes for each in predictions}
    for warning in (text for run in runs for text in run.warnings):
        print(warning, file=sys.stderr)
    sys.stdout.write(page([run.results for run in runs], floors))


if __name__ == "__main__":
    main()
