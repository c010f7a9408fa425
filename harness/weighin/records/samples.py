"""Read the samples and the allocator traces of a run, which are CSV files of whole numbers."""

from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from operator import attrgetter
from pathlib import Path, PurePath
from typing import Any, Final

from weighin.foreign import read_bytes
from weighin.result import Sample

_NAMES: Final = tuple(field.name for field in fields(Sample))
_REQUIRED: Final = sum(field.default is MISSING for field in fields(Sample))
_MOST_BYTES: Final = 1024**3  # twelve days of samples, 5 ms apart, have this size
_TOO_LARGE: Final = 2**63  # no counter of the kernel reaches this value


def read_samples(run: Path, path: str | None) -> list[Sample]:
    """Return the samples in a file of a run, the oldest first; empty if the file has none.

    A row without a value that ``Sample`` requires is left out, as is a row that ``read_columns``
    leaves out.
    """
    rows = read_columns(run, path, _NAMES)
    samples = [Sample(*row) for row in rows if None not in row[:_REQUIRED]]
    return sorted(samples, key=attrgetter("t_ns"))


def read_columns(run: Path, path: str | None, names: Sequence[str]) -> Iterator[tuple[Any, ...]]:
    """Yield the named columns of each row in a file of a run; a missing value is None.

    An incomplete last line and rows with impossible values are left out. A missing or unreadable
    file has no rows. A path outside the run's folder is not read, because the path comes from a
    record that a stranger may have written.
    """
    if path is None or PurePath(path).is_absolute() or ".." in PurePath(path).parts:
        return
    try:
        text = read_bytes(run / path, _MOST_BYTES, within=run).decode()
    except (OSError, ValueError):
        return
    head, *lines = text[: text.rfind("\n") + 1].splitlines() or [""]
    places = {name: place for place, name in enumerate(head.split(","))}
    wanted = [places.get(name) for name in names]
    for line in lines:
        texts = line.split(",")
        try:
            row = tuple(int(texts[at]) if at is not None and texts[at] else None for at in wanted)
        except (IndexError, ValueError):
            continue
        if all(value is None or 0 <= value < _TOO_LARGE for value in row):
            yield row
