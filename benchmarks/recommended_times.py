"""Compare the strategies that ``weighin recommend`` names with the fastest ones that were measured.

    .venv/bin/python benchmarks/recommended_times.py results/published/*

Each model, device, dtype, disk and RAM limit of a run under which at least two strategies were measured is a
question. weighin answers it without records, from predictions alone. The answer is right if the measured
ready time of the named strategy is within the range of the fastest one's times, or at most 15 % longer than
the fastest one's median. Only strategies that the run measured can be named, and the fastest is the fastest
that needs no conversion of the checkpoint, unless recommend names one. A load that ran once has no range:
the loads under the run's other limits count, too, if the strategy fits under both. The last line compares the
predicted with the measured times. Exits with 1 if fewer than 90 % of the answers are right, or if one takes
more than 1.5 times as long as the fastest.
"""

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Final

from rounds import spread

from weighin.cell import Cell
from weighin.plan.loads import plan_cell
from weighin.predict.client import predict
from weighin.recommend.answer import PriorKnowledge, Question, advise
from weighin.recommend.candidates import SAVED_AS, Candidate, FitVerdict, Limits
from weighin.records import run_folder
from weighin.records.metrics import grouped
from weighin.result import Outcome, Result
from weighin.show.table import Table
from weighin.slow_disk import Pace
from weighin.stream.hugging_face_folder import folder_library
from weighin.suite import registry
from weighin.units import format_exact

_REPEATS: Final = 3
_CLOSE: Final = 1.15
_RIGHT_SHARE: Final = 0.9
_FAR: Final = 1.5
_KILLED: Final = (Outcome.OOM_KILLED, Outcome.THRASHING)
_HEADS: Final = ("run", "question", "named", "s", "predicted s", "fastest", "s", "ratio", "")


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of ``recommend``, with the measured seconds of each strategy that fits, the named one first."""

    run: str
    question: Cell
    seconds: Mapping[Candidate, Sequence[float]]

    def judged(self) -> tuple[list[str], float, bool]:
        """Return the row of the table, the ratio of the two strategies' times, and whether the answer is right."""
        named, fastest = next(iter(self.seconds)), min(self.seconds, key=self._median)
        named_s, ratio = self._median(named), self._median(named) / self._median(fastest)
        is_right = ratio <= _CLOSE or named_s <= max(self.seconds[fastest])
        row = [
            self.run, _in_words(self.question), _name(named), f"{named_s:.2f}", f"{named.ready_s:.2f}",
            _name(fastest), spread(self.seconds[fastest]), f"{ratio:.2f}", "" if is_right else "wrong",
        ]  # fmt: skip
        return row, ratio, is_right

    def _median(self, one: Candidate) -> float:
        return median(self.seconds[one])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    runs = [run for run in parser.parse_args().runs if (run / run_folder.RECORDS).exists()]
    answers = [answer for run in runs for answer in answers_of(run)]
    rows, ratios, are_right = zip(*(one.judged() for one in answers), strict=True)
    print(Table.of(_HEADS, rows, names=3).markdown())
    right, worst = sum(are_right), max(ratios)
    print(f"\n{right} of {len(answers)} answers are right. The largest ratio is {worst:.2f}.")
    off = [
        abs(one.ready_s / median(seconds) - 1)
        for answer in answers
        for one, seconds in answer.seconds.items()
        if one.ready_s
    ]
    print(f"The median error of {len(off)} predicted times is {median(off):.0%}, the largest {max(off):.0%}.")  # fmt: skip
    sys.exit(right < _RIGHT_SHARE * len(answers) or worst > _FAR)


def answers_of(run: Path) -> Iterator[Answer]:
    """Yield the answer to each question of a run that predictions can answer."""
    loads = [
        one
        for one in run_folder.read(run).results
        if one.cell.operation == "load" and not one.cell.options and not one.cell.environment
    ]

    def place(one: Result) -> tuple[object, ...]:
        cell = one.cell
        return cell.model.title, cell.dtype, cell.device, cell.ranks, cell.disk, cell.cache

    for results in grouped(loads, place).values():
        limits: dict[int | None, set[str]] = defaultdict(set)
        for one in results:
            limits[one.cell.ram_limit_bytes].add(one.cell.strategy)
        asked = [limit for limit, names in limits.items() if len(names) > 1]
        if not asked:
            continue
        question, known = known_of(results)
        for limit in sorted(asked, key=lambda one: one or sys.maxsize):
            advice = advise(replace(question, limits=Limits(limit)), known)
            fitting = {
                one: seconds
                for one in advice.candidates
                if (seconds := _seconds(results, one, limit))
            }
            if fitting and not _converts(next(iter(fitting))):
                fitting = {one: times for one, times in fitting.items() if not _converts(one)}
            if advice.best and len(fitting) > 1:
                yield Answer(run.name, replace(results[0].cell, ram_limit_bytes=limit), fitting)


def known_of(results: Sequence[Result]) -> tuple[Question, PriorKnowledge]:
    """Predict each strategy that was measured; the user's checkpoint has the format of ``streaming``."""
    first = results[0].cell
    own = {one.cell.format for one in results if one.cell.strategy in ("streaming", "transformers")}
    fmt = "safetensors" if own and (folder_library(first.model) or "pt" not in own) else "pt"
    question = Question(
        first.model, Limits(), device=first.device, dtype=first.dtype, ranks=first.ranks,
        disk=Pace(first.disk_bytes_per_s, first.disk_latency_ns),
    )  # fmt: skip
    cells = {
        (one.cell.strategy, one.cell.format): replace(
            one.cell, isolation="process", ram_limit_bytes=None, use="", passes=0, repeat=0
        )
        for one in results
        if one.outcome is Outcome.OK
    }
    # Of a strategy that was measured with several formats, recommend takes the user's own.
    for name, each in [*cells]:
        if each != fmt and (name, fmt) in cells:
            del cells[name, each]
    planned = tuple(plan_cell(cell, registry.strategy(cell.strategy)) for cell in cells.values())
    return question, PriorKnowledge(planned, tuple(predict(planned)), {}, fmt)


def _converts(candidate: Candidate) -> bool:
    return any(asked.startswith(SAVED_AS) for asked in candidate.asks)


def _seconds(results: Sequence[Result], candidate: Candidate, limit: int | None) -> list[float]:
    """Return the ready times of a strategy under a limit; empty if the limit killed the load."""
    load = candidate.strategy, candidate.format
    own = [one for one in results if (one.cell.strategy, one.cell.format) == load]
    if any(one.outcome in _KILLED and one.cell.ram_limit_bytes == limit for one in own):
        return []
    alive = [one for one in own if one.outcome is Outcome.OK and one.ready_ns]
    found = [one for one in alive if one.cell.ram_limit_bytes == limit]
    if alive and len(found) < _REPEATS and candidate.verdict is FitVerdict.FITS:
        # Under these limits, too, the whole model stays in memory.
        enough = max(max(one.model_bytes or 0, one.peaks.anon_sampled_bytes or 0) for one in alive)
        found += [
            one
            for one in alive
            if one not in found and (one.cell.ram_limit_bytes or sys.maxsize) >= enough
        ]
    return [(one.ready_ns or 0) / 1e9 for one in found]


def _name(one: Candidate) -> str:
    return one.strategy if one.format == "pt" else f"{one.strategy} ({one.format})"


def _in_words(cell: Cell) -> str:
    limit = format_exact(cell.ram_limit_bytes) if cell.ram_limit_bytes else "no limit"
    more = [f"{cell.ranks} ranks"] if cell.ranks > 1 else []
    more += [cell.device] if cell.device != "cpu" else []
    more += [cell.cache] if cell.cache != "cold" else []
    return " ".join([cell.model.title, cell.dtype, limit, *more, *cell.disk])


if __name__ == "__main__":
    main()
