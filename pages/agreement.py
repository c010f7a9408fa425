"""Compare the floors of several searches."""

from collections.abc import Mapping, Sequence

from weighin.records.floor import KILLED, Aim, Floor, floors
from weighin.report import captions
from weighin.report.markdown import table_lines
from weighin.report.rows import series
from weighin.result import Result
from weighin.text import markdown as escaped
from weighin.units import MIB

NOTE = (
    "One step below its floor, a load was killed for lack of memory, unless the table names another"
    " outcome."
)


def markdown_agreement(runs: Mapping[str, Sequence[Result]]) -> str:
    """Return a table with the floors of several searches side by side, and their differences.

    ``runs`` maps the name of each search to its results.
    """
    searches = {
        name: {floor.cell.strategy: floor for floor in floors(results)}
        for name, results in runs.items()
    }
    rows = []
    for strategy in dict.fromkeys(name for search in searches.values() for name in search):
        of_strategy = [search.get(strategy) for search in searches.values()]
        sizes = [size for floor in of_strategy if floor and (size := floor.bytes) is not None]
        difference = "-"
        if len(sizes) > 1:
            apart = max(sizes) - min(sizes)
            difference = f"{apart / MIB:.0f} ({apart / min(sizes):.1%})"
        rows.append([strategy, *map(_floor_text, of_strategy), difference])
    lines = table_lines(["floor, MiB", *searches, "difference, MiB"], rows, names=1)
    everything = [result for results in runs.values() for result in results]
    shared = captions.shared(series(everything), everything, without=("ram_limit_bytes",))
    return "\n".join([*lines, "", NOTE, "", escaped(shared)])


def _floor_text(floor: Floor | None) -> str:
    """Return a floor in MiB, with the outcome one step below the floor unless that is "killed"."""
    if floor is None or floor.bytes is None:
        return "-"
    mark = " (ends)" if floor.aim is Aim.ENDS else ""
    below = f" ({floor.below})" if floor.below != KILLED else ""
    return f"{floor.bytes / MIB:.0f}{mark}{below}"
