"""Read the samples of a cell, for those who need no table of pandas."""

import csv
from dataclasses import fields
from pathlib import Path, PurePath
from typing import Final

from weighin.record import Result, Sample

_NAMES: Final = tuple(field.name for field in fields(Sample))


def read_samples(run: Path, result: Result) -> list[Sample]:
    """Return the samples of a cell, oldest first; empty if there are none. Damaged rows are left out."""
    path = result.samples_path
    if path is None or PurePath(path).is_absolute() or ".." in PurePath(path).parts:
        return []
    try:
        text = (run / path).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return []
    samples = []
    for row in csv.DictReader(text.splitlines()):
        try:
            figures = {name: int(row[name]) for name in _NAMES if row.get(name)}
            samples.append(Sample(**figures))
        except (TypeError, ValueError):  # a figure is missing, or is no number
            continue
    return sorted(samples, key=lambda sample: sample.t_ns)
