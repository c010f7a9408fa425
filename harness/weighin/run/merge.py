"""Join runs that each measured a part (shard) of one plan into one run (``weighin merge``)."""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from weighin.cell import Cell
from weighin.errors import RecordError
from weighin.plan import start
from weighin.records import run_folder
from weighin.records.run_folder import Plan, Shard, parse_shard
from weighin.result import Result

_OF_A_PART: Final = ("shard", "engine")
"""Settings in which the runs to merge may differ."""


@dataclass(frozen=True, slots=True)
class Merged:
    """The run that ``weighin merge`` wrote, and the cells that the run lacks.

    ``missing`` has the plan's cells that no merged run measured; the command ``again`` measures
    them.
    """

    folder: Path
    results: tuple[Result, ...]
    missing: tuple[Cell, ...]
    missing_shards: tuple[Shard, ...]
    again: str
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        return {
            "run": str(self.folder),
            "records": len(self.results),
            "missing": [cell.id for cell in self.missing],
            "missing_shards": [str(shard) for shard in self.missing_shards],
        }


def merge(folders: Sequence[Path], out: Path) -> Merged:
    """Write the records, samples and traces of the runs in ``folders`` to the new run ``out``.

    The new run has the whole plan, so that ``--resume`` measures the cells without a record. Its
    records are sorted by the time at which each measurement began.

    Raises:
        RecordError: the runs have different plans, two runs measured the same cell, ``out`` already
            contains a run, or a folder cannot be read or written.
    """
    if (out / run_folder.PLAN).exists() or (out / run_folder.RECORDS).exists():
        raise RecordError(f"{out} already contains a run", "name another folder with --out")
    plans, texts, warnings = list[Plan](), list[bytes](), list[str]()
    measured_in: dict[str, Path] = {}
    results: list[Result] = []
    for folder in folders:
        records, text = run_folder.read(folder), run_folder.read_file(folder, run_folder.PLAN)
        plans.append(run_folder.parse_plan(folder, text))
        texts.append(text)
        warnings += records.warnings
        _check_same_plan(folders[0], plans[0], folder, plans[-1])
        for result in records.results:
            if (key := result.cell.id) in measured_in:
                raise RecordError(
                    f"{measured_in[key]} and {folder} both measured the cell {key}",
                    "leave one of the two folders out of weighin merge",
                )
            measured_in[key] = folder
            results.append(result)
    results.sort(key=lambda result: result.started_at)
    cells, settings = plans[0].cells, _shared(plans[0])
    unfinished = out.with_name(f".{out.name}.merging")
    with run_folder.writing(unfinished):
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        text = run_folder.write_plan(unfinished, cells, settings)
        if all(map(start.is_ours, texts)):
            start.remember(text)
        for result in results:
            source = measured_in[result.cell.id]
            for name in run_folder.paths_of(result.cell):
                if os.path.lexists(source / name):
                    (unfinished / name).parent.mkdir(exist_ok=True)
                    (unfinished / name).write_bytes(run_folder.read_file(source, name))
            run_folder.append(unfinished, result)
        unfinished.rename(out)
    shards = (plan.settings.get("shard") for plan in plans)
    measured = [parse_shard(shard) for shard in shards if shard]
    counts = {shard.count for shard in measured}
    missing_shards = set[Shard]()  # unknown if a run has none, or the plan was divided twice
    if len(measured) == len(plans) and len(counts) == 1:
        (count,) = counts
        missing_shards = {Shard(index, count) for index in range(1, count + 1)} - {*measured}
    return Merged(
        folder=out,
        results=tuple(results),
        missing=tuple(run_folder.pending(cells, results)),
        missing_shards=tuple(sorted(missing_shards, key=lambda shard: shard.index)),
        again=run_folder.resume_command(run_folder.verb_of(plans[0].settings), out),
        warnings=tuple(warnings),
    )


def _shared(plan: Plan) -> dict[str, Any]:
    """Return the settings that all runs to merge must have in common."""
    return {name: it for name, it in plan.settings.items() if name not in _OF_A_PART}


def _check_same_plan(first: Path, plan: Plan, other: Path, others: Plan) -> None:
    repair = "merge only runs of one plan: the same suite, the same options and the same version of weighin"
    was, now = _shared(plan), _shared(others)
    if changed := [name for name in sorted({*was, *now}) if was.get(name) != now.get(name)]:
        shown = "; ".join(f"{name}: {was.get(name)} and {now.get(name)}" for name in changed[:3])
        raise RecordError(
            f"the runs in {first} and {other} have different plans ({shown}), and only runs of one"
            " plan can be merged",
            repair,
        )
    ours, theirs = ({cell.id: cell for cell in each.cells} for each in (plan, others))
    if [*ours] != [*theirs]:
        only = [*(theirs.keys() - ours.keys()), *(ours.keys() - theirs.keys())]
        shown = (
            f", for example {(ours | theirs)[only[0]].strategy}" if only else " in another order"
        )
        raise RecordError(
            f"{first} and {other} have different plans: {len(ours)} and {len(theirs)} cells, of"
            f" which {len(only)} are in one plan only{shown}",
            repair,
        )
