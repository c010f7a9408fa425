"""Predictions of published runs beside what was measured, from their predicted.json.

``weighin predict --check RUN --json`` wrote it: predicting takes minutes, and differs by some MiB
from one machine to another.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from weighin.errors import RecordError
from weighin.record import Result
from weighin.records.floor import floors
from weighin.report import captions
from weighin.report.markdown import table_lines
from weighin.units import MIB

FILE: Final = "predicted.json"
HEADINGS: Final = ("run", "measured by", "series", "anonymous apart at most MiB", "of",
                   "floors apart at most MiB", "of", "predicted by")  # fmt: skip
_NAMES: Final = 2


def markdown_checked(runs: Mapping[Path, Sequence[Result]]) -> str:
    """Return, a line a run, how far its predictions and measurements are apart.

    Raises:
        RecordError: a run has no predictions.
    """
    return "\n".join(table_lines(HEADINGS, (_row(*one) for one in runs.items()), names=_NAMES))


def _row(run: Path, results: Sequence[Result]) -> list[str]:
    told = _read(run / FILE)
    followed = [one for one in told["checked"] if not one["cannot"]]
    anonymous = [
        (abs(sizes["predicted"] - sizes["measured"]), one["strategy"])
        for one in followed
        for name, sizes in one["figures"].items()
        if name.startswith("host_anon_")
    ]
    return [
        run.name,
        captions.code(results),
        str(len(followed)),
        *_most(anonymous),
        *_most(list(_floors(followed, results))),
        captions.when_and_what([(told["environment"], told["predicted_at"])]),
    ]


def _floors(
    followed: Sequence[Mapping[str, Any]], results: Sequence[Result]
) -> Iterator[tuple[int, str]]:
    """Yield how far each floor that was found is from the predicted one, in bytes, and whose it is."""
    predicted = {(one["strategy"], one["format"]): one["floor_bytes"] for one in followed}
    for floor in floors(results):
        size = predicted.get((floor.cell.strategy, floor.cell.format))
        if floor.bytes is not None and size is not None:
            yield abs(size - floor.bytes), floor.cell.strategy


def _most(apart: Sequence[tuple[int, str]]) -> list[str]:
    if not apart:
        return ["-", "-"]
    size, strategy = max(apart)
    return [f"{size / MIB:.0f}", strategy]


def _read(path: Path) -> dict[str, Any]:
    try:
        told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecordError(
            f"no predictions can be read from {path}: {error}",
            f"make them: weighin predict --check {path.parent} --json > {path}",
        ) from error
    return told
