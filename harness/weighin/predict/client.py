"""Asking for predictions, from a process without torch."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from weighin import formats
from weighin.checkpoint import entries
from weighin.checkpoint.subprocess_client import environment
from weighin.errors import HarnessError, UnknownName
from weighin.predict.prediction import Prediction, from_json
from weighin.probes.environment import read_ahead_bytes
from weighin.suite.config import DTYPES
from weighin.suite.matrix import Planned

Report = Callable[[int, str], None]
"""Called with the number of cells that are done, and the name of the next strategy."""


def predict(
    planned: Sequence[Planned],
    *,
    checkpoint: Path | None = None,
    checkpoint_dtype: str | None = None,
    python_path: Sequence[str] = (),
    report: Report | None = None,
) -> list[Prediction]:
    """Return what each cell would need, in their order; reads no tensor data and needs no GPU.

    A cell's checkpoint is ``checkpoint`` itself where it has the cell's layout; otherwise one with
    its structure (or the model's, of dtype ``checkpoint_dtype``) and no values. A cell that cannot
    be followed says why in ``cannot``: its figures are None.

    Raises:
        HarnessError: the process that predicts was killed.
    """
    own = formats.detect(checkpoint).NAME if checkpoint else None
    with tempfile.TemporaryDirectory(prefix="weighin-predict-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "weighin.predict"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment(python_path),
            text=True,
        )
        try:
            assert process.stdin and process.stdout
            ask = _Asker(process.stdin, process.stdout)
            made: dict[str, dict[str, Any]] = {}
            found = []
            for number, one in enumerate(planned):
                if report:
                    report(number, one.cell.strategy)
                found.append(
                    Prediction(one.cell, cannot=one.skip)
                    if one.skip
                    else _one(one, ask, made, folder, checkpoint, own, checkpoint_dtype)
                )
            return found
        finally:
            process.kill()
            process.communicate()


def dtype_name(text: str) -> str:
    """Return the dtype that ``text`` names, as torch calls it; raises UnknownName."""
    if text not in DTYPES:
        raise UnknownName("dtype", text, DTYPES)
    return DTYPES[text]


def _one(
    planned: Planned,
    ask: "_Asker",
    made: dict[str, dict[str, Any]],
    folder: str,
    checkpoint: Path | None,
    own: str | None,
    dtype: str | None,
) -> Prediction:
    cell = planned.cell
    fields = {
        "cell": asdict(cell),
        "read_ahead_bytes": read_ahead_bytes(checkpoint or entries.folder()),
    }
    key = f"{cell.model}{cell.format}"
    if key not in made:
        make = {
            "folder": f"{folder}/{len(made)}",
            "dtype": dtype,
            "source": str(checkpoint) if checkpoint else None,
            "own": own == cell.format,
        }
        made[key] = ask(fields | {"make": make})
    place = made[key]
    if place.get("cannot"):
        return Prediction(cell, cannot=place["cannot"])
    strategy = {"strategy_path": str(planned.strategy.path)}
    return from_json(cell, ask(fields | place | strategy))


class _Asker:
    """Asks the process that predicts; one question at a time."""

    def __init__(self, questions: IO[str], answers: IO[str]) -> None:
        self._questions, self._answers = questions, answers

    def __call__(self, question: dict[str, Any]) -> dict[str, Any]:
        try:
            self._questions.write(json.dumps(question) + "\n")
            self._questions.flush()
            answer: dict[str, Any] = json.loads(self._answers.readline())
        except (OSError, ValueError):
            raise HarnessError(
                "the process that predicts was killed",
                "run it again; if the kernel killed it (see `dmesg`), free some memory first",
            ) from None
        return answer
