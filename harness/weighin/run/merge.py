"""Join runs that each measured a part (shard) of one plan into one run (``weighin merge``)."""

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from weighin.cell import Cell
from weighin.errors import RecordError
from weighin.plan import start
from weighin.records import coverage, run_folder
from weighin.records.coverage import Shard, parse_shard
from weighin.records.run_folder import Plan
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


@dataclass(frozen=True, slots=True)
class _Part:
    folder: Path
    plan: Plan
    plan_bytes: bytes
    results: Sequence[Result]
    warnings: Sequence[str]

    @property
    def shard(self) -> Shard | None:
        text = self.plan.settings.get("shard")
        return parse_shard(text) if text else None


def merge(folders: Sequence[Path], out: Path) -> Merged:
    """Write the records, samples and traces of the runs in ``folders`` to the new run ``out``.

    The new run has the whole plan, so that ``--resume`` measures the cells without a record.

    Raises:
        RecordError: the runs have different plans, two runs measured the same cell, ``out`` already
            contains a run, or a folder cannot be read or written.
    """
    if (out / run_folder.PLAN).exists() or (out / run_folder.RECORDS).exists():
        raise RecordError(f"{out} already contains a run", "name another folder with --out")
    parts = [_read(folder) for folder in folders]
    for part in parts[1:]:
        _check_same_plan(parts[0], part)
    results = _joined(parts)
    plan = parts[0].plan
    missing = coverage.pending(plan.cells, results)
    _write(parts, results, out)
    return Merged(
        folder=out,
        results=tuple(results),
        missing=tuple(missing),
        missing_shards=_missing_shards(parts),
        again=coverage.resume_command(coverage.verb_of(plan.settings), out),
        warnings=tuple(warning for part in parts for warning in part.warnings),
    )


def _read(folder: Path) -> _Part:
    records = run_folder.read(folder)
    text = run_folder.plan_bytes(folder)
    plan = run_folder.parse_plan(folder, text)
    return _Part(folder, plan, text, records.results, records.warnings)


def _check_same_plan(first: _Part, other: _Part) -> None:
    repair = "merge only runs of one plan: the same suite, the same options and the same version of weighin"
    was, now = _shared(first.plan.settings), _shared(other.plan.settings)
    if changed := [name for name in sorted({*was, *now}) if was.get(name) != now.get(name)]:
        shown = "; ".join(f"{name}: {was.get(name)} and {now.get(name)}" for name in changed[:3])
        raise RecordError(
            f"the runs in {first.folder} and {other.folder} have different plans ({shown}), and"
            " only runs of one plan can be merged",
            repair,
        )
    ours, theirs = (
        [coverage.identity(cell) for cell in part.plan.cells] for part in (first, other)
    )
    if ours != theirs:
        only = [*(set(theirs) - set(ours)), *(set(ours) - set(theirs))]
        shown = f", for example {json.loads(only[0])['strategy']}" if only else " in another order"
        raise RecordError(
            f"{first.folder} and {other.folder} have different plans: {len(ours)} and"
            f" {len(theirs)} cells, of which {len(only)} are in one plan only{shown}",
            repair,
        )


def _shared(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in _OF_A_PART}


def _joined(parts: Sequence[_Part]) -> list[Result]:
    """Return the results of all runs to merge, sorted by the time at which each measurement began."""
    measured_in: dict[str, Path] = {}
    for part in parts:
        for result in part.results:
            key = coverage.identity(result.cell)
            if key in measured_in:
                raise RecordError(
                    f"{measured_in[key]} and {part.folder} both measured the cell {result.cell.id}",
                    "leave one of the two folders out of weighin merge",
                )
            measured_in[key] = part.folder
    results = [result for part in parts for result in part.results]
    return sorted(results, key=lambda result: result.started_at)


def _missing_shards(parts: Sequence[_Part]) -> tuple[Shard, ...]:
    """Return the shards that no merged run measured; none if the plan was not divided into shards."""
    shards = [part.shard for part in parts]
    counts = {shard.count for shard in shards if shard}
    if None in shards or len(counts) != 1:
        return ()
    count = counts.pop()
    named = {shard.index for shard in shards if shard}
    return tuple(Shard(index, count) for index in range(1, count + 1) if index not in named)


def _write(parts: Sequence[_Part], results: Sequence[Result], out: Path) -> None:
    """Write the new run to a hidden folder, and rename the complete folder to ``out``."""
    unfinished = out.with_name(f".{out.name}.merging")
    folders = {
        coverage.identity(result.cell): part.folder for part in parts for result in part.results
    }
    all_ours = all(start.is_ours(part.plan_bytes) for part in parts)
    with run_folder.writing(unfinished):
        shutil.rmtree(unfinished, ignore_errors=True)
        settings = _shared(parts[0].plan.settings)
        plan = run_folder.write_plan(unfinished, parts[0].plan.cells, settings)
        if all_ours:
            start.remember(plan)
        for result in results:
            _copy_files(folders[coverage.identity(result.cell)], result, unfinished)
            run_folder.append(unfinished, result)
        unfinished.rename(out)


def _copy_files(source: Path, result: Result, target: Path) -> None:
    for name in run_folder.paths_of(result.cell):
        if os.path.lexists(source / name):
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_bytes(run_folder.read_file(source, name))
