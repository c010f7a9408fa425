"""Compare the measurements of published runs with predictions from the file predicted.json of each run.

``benchmarks/predicted_runs.py RUN --json FILE`` writes predicted.json. The file is published with the run,
because a prediction takes minutes, and differs by some MiB between machines.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from weighin.errors import RecordError
from weighin.files import parse_json, read_bytes
from weighin.records.floor import floors
from weighin.records.verdict import Verdict
from weighin.result import Result
from weighin.show import words
from weighin.show.table import Table
from weighin.units import MIB

FILE: Final = "predicted.json"
HEADINGS: Final = ("run", "code", "series", "largest difference of anonymous MiB", "strategy",
                   "largest difference of floors MiB", "strategy")  # fmt: skip
_NAMES: Final = 2


def markdown_checked(runs: Mapping[Path, Sequence[Result]]) -> str:
    """Return a table of the largest difference between prediction and measurement in each run.

    Raises:
        RecordError: the file predicted.json of a run cannot be read.
    """
    contents = {run: _read(run / FILE) for run in runs}
    rows = [_row(run, results, contents[run]) for run, results in runs.items()]
    made = [(content["environment"], content["predicted_at"]) for content in contents.values()]
    note = f"Predicted {words.when_and_what(made)}."
    return "\n".join([Table.of(HEADINGS, rows, names=_NAMES).markdown(), "", note])


def _row(run: Path, results: Sequence[Result], content: Mapping[str, Any]) -> list[str]:
    predicted = [series for series in content["checked"] if not series["cannot"]]
    anonymous = [
        (abs(sizes["predicted"] - sizes["measured"]), series["strategy"])
        for series in predicted
        for name, sizes in series["figures"].items()
        if name.startswith("host_anon_")
    ]
    return [
        run.name,
        words.code(results),
        str(len(predicted)),
        *_largest(anonymous),
        *_largest(list(_floor_differences(predicted, results))),
    ]


def _floor_differences(
    checked: Sequence[Mapping[str, Any]], results: Sequence[Result]
) -> Iterator[tuple[int, str]]:
    """Yield the difference in bytes between each measured and predicted RAM floor, with the strategy.

    A floor below which the load thrashes is left out, because only a time could predict it.
    """
    predicted = {
        (series["strategy"], series["format"]): series["floor_bytes"] for series in checked
    }
    for floor in floors(results):
        size = predicted.get((floor.cell.strategy, floor.cell.format))
        if floor.bytes is not None and size is not None and Verdict.THRASHES not in floor.below:
            yield abs(size - floor.bytes), floor.cell.strategy


def _largest(differences: Sequence[tuple[int, str]]) -> list[str]:
    if not differences:
        return ["-", "-"]
    size, strategy = max(differences)
    return [f"{size / MIB:.0f}", strategy]


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = parse_json(read_bytes(path))
    except (OSError, ValueError) as error:
        raise RecordError(
            f"cannot read predictions from {path}: {error}",
            f"create the file: .venv/bin/python benchmarks/predicted_runs.py {path.parent} --json {path}",
        ) from error
    return content
