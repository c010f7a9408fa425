"""Test the answers of ``weighin recommend`` just below and just above every predicted floor.

For a floor that is predicted as a range, the limits are below its minimum and above its maximum.
First the script asks for a recommendation without records, under limits around each strategy's
floor. Then it runs every strategy without a limit, each rejected strategy under the largest limit
that rejects it, and each recommended strategy under the smallest limit that recommends it. A
rejected strategy must end oom_killed and a recommended strategy must end ok. At last the script
asks for a recommendation again, with the records of these cells. Under every limit, the recommended
strategy must be the same as without records. The script exits with 1 if an outcome or a
recommendation is not as expected. Cells that the --out folder contains are not run again.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from weighin.cell import Cell
from weighin.isolation import select
from weighin.plan.task import Planned, Progress, Run
from weighin.recommend.answer import Advice, PriorKnowledge, Question, advise, gather
from weighin.recommend.candidates import FitVerdict, Limits, doubt_bytes
from weighin.recommend.prior_runs import find
from weighin.records import run_folder
from weighin.result import Outcome, Result
from weighin.run.runner import run
from weighin.settings.definition import DTYPES
from weighin.suite import registry
from weighin.units import MIB, format_exact

_EXPECTED: Final = {True: Outcome.OK, False: Outcome.OOM_KILLED}


@dataclass(frozen=True, slots=True)
class Promise:
    """One cell with its predicted end: ok, or killed for lack of RAM."""

    planned: Planned
    lives: bool


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("model", nargs="?", default="gpt2-small")
    parser.add_argument("--dtype", default="float32", choices=DTYPES)
    parser.add_argument("--isolation", default="cgroup", choices=("cgroup", "docker"))
    parser.add_argument("--out", type=Path, default=Path("results/recommending"))
    parser.add_argument("--run", type=Path, help="use the records of this run; run nothing")
    options = parser.parse_args()
    question = Question(
        registry.model(options.model), Limits(), dtype=DTYPES[options.dtype], results=options.out
    )
    known = gather(question, _say)
    planned = [_changed(one, isolation=options.isolation) for one in known.planned]
    known = replace(known, planned=tuple(planned), evidence={})
    folder = options.run or options.out
    limits = list(_limits_of(options.run) if options.run else _limits(known))
    before = [_advice(question, known, limit) for limit in limits]
    promises, results = _tried(options, known, limits, before)
    kept = _print_cells(promises, results)
    after_known = replace(known, evidence=find([folder], known.planned[0].cell))
    after = [_advice(question, after_known, limit) for limit in limits]
    same = _print_names(limits, before, after)
    print(f"\n{kept} of {len(promises)} cells ended as predicted")
    print(f"{same} of {len(limits)} limits give the same strategy without and with records")
    if (kept, same) != (len(promises), len(limits)):
        sys.exit(1)


def _tried(
    options: argparse.Namespace,
    known: PriorKnowledge,
    limits: Sequence[int],
    asked: Sequence[Advice],
) -> tuple[list[Promise], Sequence[Result]]:
    """Return the predicted ends and the results, measured here or read from ``options.run``."""
    if options.run:
        results = run_folder.read(options.run).results
        return [*_promised(known, limits, asked, results)], results
    promises = [
        *[Promise(one, lives=True) for one in known.planned if not one.skip],
        *_refused(known, limits, asked),
        *_named(known, limits, asked),
    ]
    return promises, _measure(options.out, promises, options.isolation)


def _limits(known: PriorKnowledge) -> Iterator[int]:
    """Yield limits for each predicted floor: just below and above it, and two larger limits."""
    limits = set()
    for each in known.predictions:
        if each.floor_bytes and each.floor_least_bytes and each.model_bytes:
            least, doubt = each.floor_least_bytes, doubt_bytes(each.floor_bytes)
            limits |= {least - doubt_bytes(least) - MIB, each.floor_bytes + doubt}
            limits |= {each.floor_bytes * 21 // 20, each.floor_bytes + each.model_bytes}
    yield from sorted({-(-limit // MIB) * MIB for limit in limits})


def _limits_of(run: Path) -> list[int]:
    """Return the RAM limits of a run's cells."""
    limits = {one.cell.ram_limit_bytes for one in run_folder.read(run).results}
    return sorted(limit for limit in limits if limit is not None)


def _promised(
    known: PriorKnowledge, limits: Sequence[int], asked: Sequence[Advice], results: Sequence[Result]
) -> Iterator[Promise]:
    """Yield each strategy that is recommended or rejected under a limit of the run."""
    planned = {one.cell.strategy: one for one in known.planned}
    for limit, advice in zip(limits, asked, strict=True):
        for one in advice.candidates:
            if one != advice.best and one.verdict is not FitVerdict.TOO_LARGE:
                continue
            for result in results:
                cell = result.cell
                if (cell.strategy, cell.format, cell.ram_limit_bytes) == (
                    one.strategy, one.format, limit,
                ):  # fmt: skip
                    yield Promise(replace(planned[one.strategy], cell=cell), one == advice.best)


def _advice(question: Question, known: PriorKnowledge, limit: int) -> Advice:
    return advise(replace(question, limits=Limits(limit)), known)


def _refused(
    known: PriorKnowledge, limits: Sequence[int], asked: Sequence[Advice]
) -> Iterator[Promise]:
    """Yield each strategy under the largest limit that rejects it."""
    for planned in known.planned:
        too_small = [
            limit
            for limit, advice in zip(limits, asked, strict=True)
            for one in advice.candidates
            if (one.strategy, one.verdict) == (planned.cell.strategy, FitVerdict.TOO_LARGE)
        ]
        if too_small:
            yield Promise(_changed(planned, ram_limit_bytes=max(too_small)), lives=False)


def _named(
    known: PriorKnowledge, limits: Sequence[int], asked: Sequence[Advice]
) -> Iterator[Promise]:
    """Yield each strategy under the smallest limit that recommends it, for each verdict."""
    smallest: dict[tuple[str, FitVerdict], int] = {}
    for limit, advice in zip(limits, asked, strict=True):
        if advice.best:
            smallest.setdefault((advice.best.strategy, advice.best.verdict), limit)
    for (name, _), limit in smallest.items():
        (planned,) = [one for one in known.planned if one.cell.strategy == name]
        yield Promise(_changed(planned, ram_limit_bytes=limit), lives=True)


def _changed(planned: Planned, **changes: Any) -> Planned:
    return replace(planned, cell=replace(planned.cell, **changes))


def _measure(folder: Path, promises: Sequence[Promise], isolation: str) -> list[Result]:
    planned = [one.planned for one in promises]
    if not (folder / run_folder.PLAN).exists():
        run_folder.write_plan(folder, [one.cell for one in planned], {})
    task = Run(folder, planned, select.choose(isolation, limited=True)[0])
    return run(task, Progress(starting=_say_cell))


def _print_cells(promises: Sequence[Promise], results: Sequence[Result]) -> int:
    """Print the outcome of each cell; return the number of cells that ended as predicted."""
    by_id = {result.cell.id: result for result in results}
    print(
        "| strategy | RAM limit | predicted | outcome | ready s |\n| --- | ---: | --- | --- | ---: |"
    )
    kept = 0
    for one in promises:
        cell, result = one.planned.cell, by_id[one.planned.cell.id]
        kept += result.outcome is _EXPECTED[one.lives]
        print(
            f"| {cell.strategy} | {_size(cell.ram_limit_bytes)} | {_EXPECTED[one.lives]} |"
            f" {result.outcome} | {'-' if result.ready_ns is None else f'{result.ready_ns / 1e9:.1f}'} |"
        )
    return kept


def _print_names(limits: Sequence[int], before: Sequence[Advice], after: Sequence[Advice]) -> int:
    """Print the strategy of each limit; return the number of limits where both answers agree."""
    print("\n| RAM limit | recommended without records | with records |\n| ---: | --- | --- |")
    same = 0
    for limit, *asked in zip(limits, before, after, strict=True):
        first, last = (
            f"{one.best.strategy}, {one.best.verdict}" if one.best else "nothing" for one in asked
        )
        names = [one.best.strategy if one.best else "" for one in asked]
        same += names[0] == names[1]
        print(f"| {format_exact(limit)} | {first} | {last} |")
    return same


def _size(limit: int | None) -> str:
    return "none" if limit is None else format_exact(limit)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _say_cell(cell: Cell) -> None:
    _say(f"{cell.strategy} under {_size(cell.ram_limit_bytes)}")


if __name__ == "__main__":
    main()
