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
from weighin.show.table import Table
from weighin.suite import registry
from weighin.units import MIB, format_exact

_EXPECTED: Final = {True: Outcome.OK, False: Outcome.OOM_KILLED}
_OF_CELLS: Final = ("strategy", "RAM limit", "predicted", "outcome", "ready s")
_OF_LIMITS: Final = ("RAM limit", "recommended without records", "with records")


@dataclass(frozen=True, slots=True)
class Promise:
    """One cell with its predicted end: ok, or killed for lack of RAM."""

    planned: Planned
    lives: bool
    verdict: FitVerdict | None = None


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
    results: Sequence[Result] = run_folder.read(options.run).results if options.run else ()
    limits = sorted({*_limits_of(results)} if options.run else {*_limits(known)})

    def asked() -> list[Advice]:
        return [advise(replace(question, limits=Limits(limit)), known) for limit in limits]

    before = asked()
    promises = list(_promises(known, limits, before))
    if not options.run:
        unlimited = [Promise(one, lives=True) for one in known.planned if not one.skip]
        promises = [*unlimited, *_outermost(promises)]
        results = _measure(options.out, [one.planned for one in promises], options.isolation)
    found = {_key(one.cell): one for one in results}
    promises = [one for one in promises if _key(one.planned.cell) in found]
    kept = sum(found[_key(one.planned.cell)].outcome is _EXPECTED[one.lives] for one in promises)
    rows = [_row(one, found[_key(one.planned.cell)]) for one in promises]
    print(Table.of(_OF_CELLS, rows).markdown())
    known = replace(known, evidence=find([options.run or options.out], known.planned[0].cell))
    after = asked()
    rows = [
        [format_exact(limit), *map(_named, both)]
        for limit, *both in zip(limits, before, after, strict=True)
    ]
    print(f"\n{Table.of(_OF_LIMITS, rows).markdown()}")
    same = sum(_best(one) == _best(other) for one, other in zip(before, after, strict=True))
    print(f"\n{kept} of {len(promises)} cells ended as predicted")
    print(f"{same} of {len(limits)} limits give the same strategy without and with records")
    sys.exit((kept, same) != (len(promises), len(limits)))


def _limits(known: PriorKnowledge) -> Iterator[int]:
    """Yield limits for each predicted floor: just below and above it, and two larger limits."""
    for each in known.predictions:
        if each.floor_bytes and each.floor_least_bytes and each.model_bytes:
            least, floor = each.floor_least_bytes, each.floor_bytes
            for limit in (
                least - doubt_bytes(least) - MIB,
                floor + doubt_bytes(floor),
                floor * 21 // 20,
                floor + each.model_bytes,
            ):
                yield -(-limit // MIB) * MIB


def _limits_of(results: Sequence[Result]) -> Iterator[int]:
    for one in results:
        if one.cell.ram_limit_bytes is not None:
            yield one.cell.ram_limit_bytes


def _promises(
    known: PriorKnowledge, limits: Sequence[int], asked: Sequence[Advice]
) -> Iterator[Promise]:
    """Yield each strategy that is recommended or rejected under a limit."""
    planned = {one.cell.strategy: one for one in known.planned}
    for limit, advice in zip(limits, asked, strict=True):
        for one in advice.candidates:
            if one == advice.best or one.verdict is FitVerdict.TOO_LARGE:
                limited = _changed(planned[one.strategy], ram_limit_bytes=limit)
                yield Promise(limited, one == advice.best, one.verdict)


def _outermost(promises: Sequence[Promise]) -> list[Promise]:
    """Return each strategy under the largest limit that rejects it, and the smallest that names it."""
    found: dict[object, Promise] = {}
    for one in promises:  # from the smallest limit to the largest
        key = one.planned.cell.strategy, one.lives, one.verdict
        if not one.lives or key not in found:
            found[key] = one
    return list(found.values())


def _key(cell: Cell) -> tuple[str, str, int | None]:
    return cell.strategy, cell.format, cell.ram_limit_bytes


def _changed(planned: Planned, **changes: Any) -> Planned:
    return replace(planned, cell=replace(planned.cell, **changes))


def _measure(folder: Path, planned: Sequence[Planned], isolation: str) -> list[Result]:
    if not (folder / run_folder.PLAN).exists():
        run_folder.write_plan(folder, [one.cell for one in planned], {})
    task = Run(folder, planned, select.choose(isolation, limited=True)[0])
    return run(task, Progress(starting=lambda one: _say(f"{one.strategy} under {_size(one)}")))


def _row(one: Promise, result: Result) -> list[str]:
    ready = "-" if result.ready_ns is None else f"{result.ready_ns / 1e9:.1f}"
    cell = one.planned.cell
    return [cell.strategy, _size(cell), _EXPECTED[one.lives], result.outcome, ready]


def _best(advice: Advice) -> str:
    return advice.best.strategy if advice.best else ""


def _named(advice: Advice) -> str:
    return f"{advice.best.strategy}, {advice.best.verdict}" if advice.best else "nothing"


def _size(cell: Cell) -> str:
    return "none" if cell.ram_limit_bytes is None else format_exact(cell.ram_limit_bytes)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
