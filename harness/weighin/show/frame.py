"""Return a run as a pandas DataFrame, for notebooks."""

from collections.abc import Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from weighin.records import run_folder
from weighin.records.metrics import COLUMNS
from weighin.records.run import OF_SERIES, Measured, Row
from weighin.records.series import name_of
from weighin.result import Sample
from weighin.show.report import csv_columns

if TYPE_CHECKING:  # the import of pandas takes half a second
    from pandas import DataFrame

_INTEGERS = ("ram_limit_bytes", "vram_limit_bytes", "repeat", "repeats", "ok", "missing_cells")


def results(run: str | Path, *, samples: bool = False) -> "DataFrame":
    """Return a run's figures: a row for the repeats of each measurement, with the columns of summary.csv.

    With ``samples``, return instead the memory over time: a row for each sample of each repeat, whose
    column ``series`` has the measurement's name in ``weighin check``.

    Raises:
        RecordError: the folder has no readable records.
    """
    measured = Measured.of(Path(run), run_folder.read(Path(run)))
    if not samples:
        return frame(measured.rows, csv_columns(measured.rows, OF_SERIES), measured.missing)
    import pandas as pd

    return pd.DataFrame(
        [
            {"series": name_of(one.cell), "repeat": one.cell.repeat, **asdict(sample)}
            for one in measured.results
            for sample in run_folder.read_samples(measured.folder, one.samples_path)
        ],
        columns=["series", "repeat", *(each.name for each in fields(Sample))],
    )


def frame(rows: Sequence[Row], names: Sequence[str], missing: int | None) -> "DataFrame":
    """Return the rows as a table whose integers stay exact, beside missing values too."""
    import pandas as pd

    table = pd.DataFrame([[row[n] for n in names] for row in rows], columns=[*names], dtype=object)
    table["missing_cells"] = missing
    types = dict.fromkeys(_INTEGERS, "Int64")
    for key, figure in COLUMNS.items():
        kind = "Int64" if figure.is_whole else "Float64"
        types |= dict.fromkeys((key, f"{key}_min", f"{key}_max"), kind)
    return table.astype({name: types[name] for name in table.columns if name in types})
