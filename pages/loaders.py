"""Write the table that helps to choose a loader: ``python -m pages.loaders docs/results.md RUN...``.

The rows are sorted by the times of the first run; the memory is that of the first model. Strategies that
nobody would choose for their figures (``_LEFT_OUT``) have no rows.
"""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from page_blocks import filled

from pages.run_tables import caption
from weighin.records import run_folder
from weighin.records.metrics import METRICS, grouped, middle
from weighin.records.series import Measured, option_words
from weighin.result import Outcome, Result
from weighin.show.table import Table
from weighin.show.words import scaled
from weighin.units import MIB, format_seconds

_LEFT_OUT: Final = frozenset({
    "sequential", "meta_copy", "per_param", "per_param_mmap", "per_module", "sharded", "eager", "dcp",
    "safetensors_pread",
})  # fmt: skip


def table(runs: Sequence[Sequence[Result]]) -> str:
    """Return the table of ``runs``, each the results of one model in one state of the page cache."""
    measured = [[one for one in run if one.outcome is not Outcome.SKIPPED] for run in runs]
    measured = [run for run in measured if run]
    heads, columns = list[str](), list[dict[str, str]]()
    order = dict[str, int]()  # by the first time of each loader
    for run in measured:
        title, cache = run[0].cell.model.title, run[0].cell.cache
        good = [one for one in run if one.outcome is Outcome.OK]
        loads = grouped(good, lambda one: " ".join([one.cell.strategy, *option_words(one.cell)]))

        def medians(
            read: Callable[[Result], int | None], loads: dict[str, list[Result]] = loads
        ) -> dict[str, int]:
            found = {name: middle(map(read, repeats)) for name, repeats in loads.items()}
            return {name: value for name, value in found.items() if value is not None}

        if not columns:
            heads.append(f"{title}, private left MiB")
            left = medians(_private_bytes).items()
            columns.append({name: scaled(size, MIB, 0) for name, size in left})
        ready = medians(METRICS["ready"].of)
        heads.append(f"{title}, {cache}")
        columns.append({name: format_seconds(ns) for name, ns in ready.items()})
        order = ready | order
    if not order:
        return ""
    rows = [
        [name, *(each.get(name, "-") for each in columns)]
        for name in sorted(order, key=lambda name: order[name])
        if name.partition(" ")[0] not in _LEFT_OUT
    ]
    about = caption(Measured([one for run in measured for one in run]))
    found = Table.of(["strategy", *heads], rows).markdown()
    return f"{found}\n\n{about}"


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
    text = table([run.results for run in runs])
    page.write_text(filled(page.read_text(), {"pages/loaders.py": text}))


if __name__ == "__main__":
    main()
