"""Which way of loading survives which limit: one row a way, one column a limit."""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from harness.record import Outcome
from harness.report import captions, look
from harness.report.frame import known


@dataclass(frozen=True, slots=True)
class Field:
    """What became of one way under one limit; ``kind`` is ok, mixed, skipped, bad or empty."""

    kind: str
    sign: str
    words: str


@dataclass(frozen=True, slots=True)
class Matrix:
    title: str
    limits: list[str]
    rows: list[tuple[str, list[Field]]]


def build(frame: pd.DataFrame) -> list[Matrix]:
    """Return a matrix for each setting that has several limits."""
    if frame.empty:
        return []
    by = [name for name in look.SCENE if name != "ram_limit_bytes"]
    changing = [name for name in by if frame[name].nunique(dropna=False) > 1]
    groups = frame.groupby(changing, sort=False) if changing else [((), frame)]
    found = []
    for values, group in groups:
        pairs = zip(changing, values, strict=True)
        title = " · ".join(captions.dimension(name, value) for name, value in pairs)
        if group["ram_limit_bytes"].nunique(dropna=False) > 1:
            found.append(_matrix(title, group))
    return found


def _matrix(title: str, group: pd.DataFrame) -> Matrix:
    limits = sorted(group["ram_limit_bytes"].dropna().unique())
    columns = [*(int(limit) for limit in limits)]
    nothing = [None] if group["ram_limit_bytes"].isna().any() else []
    rows = []
    # A way of loading is what its row is called: the strategy, with its format and options.
    names = pd.Series(look.row_labels(group), index=group.index, dtype=object)
    for name in dict.fromkeys(names):
        mine = group[names == name]
        by_limit = {known(row["ram_limit_bytes"]): row for _, row in mine.iterrows()}
        rows.append((name, [_field(by_limit.get(limit)) for limit in [*columns, *nothing]]))
    heads = [captions.size(limit) for limit in columns] + ["no limit"] * len(nothing)
    return Matrix(title, heads, rows)


def _field(row: "pd.Series[Any] | None") -> Field:
    if row is None:
        return Field("empty", "", "not measured")
    ready = known(row["ready_s"])
    if row["outcome"] == Outcome.OK.value:
        return Field("ok", "✓", "ok" if ready is None else f"{ready:.2f} s")
    if row["outcome"] == Outcome.SKIPPED.value:
        return Field("skipped", "-", "skipped")
    if row["ok"]:
        return Field("mixed", "±", row["outcome"])
    return Field("bad", "✗", captions.ending(row))
