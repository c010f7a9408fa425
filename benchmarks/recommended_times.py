"""Compare the strategies that ``weighin recommend`` names with the fastest ones that were measured.

    .venv/bin/python benchmarks/recommended_times.py results/published/*

Each model, device, dtype and RAM limit of a run under which at least two strategies were measured is
a question. weighin answers it without records, from predictions alone. The answer is right if the
measured ready time of the named strategy is within the range of the fastest one's times, or at most
15 % longer than the fastest one's median. Only strategies that the run measured can be named, and the
fastest is the fastest that needs no conversion of the checkpoint, unless recommend names one. A load
that ran once has no range: the loads under the run's other limits count, too, if the strategy fits
under both. Exits with 1 if fewer than 90 % of the answers are right, or if one takes more than 1.5
times as long as the fastest.
"""

import argparse
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from weighin.cell import Cell
from weighin.plan.loads import plan_cell
from weighin.predict.client import predict
from weighin.recommend.answer import PriorKnowledge, Question, advise
from weighin.recommend.candidates import SAVED_AS, FitVerdict, Limits
from weighin.records import run_folder
from weighin.result import Outcome, Result
from weighin.slow_disk import Pace
from weighin.stream.pretrained_folder import is_folder
from weighin.suite import registry
from weighin.units import format_exact

_REPEATS: Final = 3
_CLOSE: Final = 1.15
_RIGHT_SHARE: Final = 0.9
_FAR: Final = 1.5
_KILLED: Final = (Outcome.OOM_KILLED, Outcome.THRASHING)

Load = tuple[str, str]
"""A strategy and a format."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of ``recommend``, with the seconds of each measured strategy that fits."""

    run: str
    cell: Cell
    named: Load
    seconds: Mapping[Load, Sequence[float]]

    @property
    def fastest(self) -> Load:
        return min(self.seconds, key=lambda load: statistics.median(self.seconds[load]))

    @property
    def ratio(self) -> float:
        return self.median(self.named) / self.median(self.fastest)

    @property
    def is_right(self) -> bool:
        return self.ratio <= _CLOSE or self.median(self.named) <= max(self.seconds[self.fastest])

    def median(self, load: Load) -> float:
        return statistics.median(self.seconds[load])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    runs = [run for run in parser.parse_args().runs if (run / run_folder.RECORDS).exists()]
    answers = [answer for run in runs for answer in answers_of(run)]
    print(
        "| run | question | named | s | fastest | s | ratio | |\n|---|---|---|---:|---|---:|---:|---|"
    )
    for one in answers:
        words = (
            one.run, _question_text(one.cell), _name(one.named), f"{one.median(one.named):.2f}",
            _name(one.fastest), _range(one.seconds[one.fastest]), f"{one.ratio:.2f}",
            "" if one.is_right else "wrong",
        )  # fmt: skip
        print(f"| {' | '.join(words)} |")
    right = sum(one.is_right for one in answers)
    worst = max(one.ratio for one in answers)
    print(f"\n{right} of {len(answers)} answers are right. The largest ratio is {worst:.2f}.")
    sys.exit(right < _RIGHT_SHARE * len(answers) or worst > _FAR)


def answers_of(run: Path) -> Iterator[Answer]:
    """Yield the answer to each question of a run that predictions can answer."""
    groups: dict[tuple[object, ...], list[Result]] = defaultdict(list)
    for result in run_folder.read(run).results:
        cell = result.cell
        if cell.operation == "load" and not cell.options and not cell.environment:
            groups[
                cell.model.title, cell.dtype, cell.device, cell.ranks, cell.disk, cell.cache
            ].append(result)
    for results in groups.values():
        yield from _answers(run.name, results)


def known_of(results: Sequence[Result]) -> tuple[Question, PriorKnowledge]:
    """Predict each strategy that was measured; the user's checkpoint has the format of ``streaming``."""
    first = results[0].cell
    own = {one.cell.format for one in results if one.cell.strategy in ("streaming", "transformers")}
    fmt = "safetensors" if is_folder(first.model) or "pt" not in own else "pt"
    fmt = "pt" if not own else fmt
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


def _answers(run: str, results: Sequence[Result]) -> Iterator[Answer]:
    limits: dict[int | None, set[str]] = defaultdict(set)
    for one in results:
        limits[one.cell.ram_limit_bytes].add(one.cell.strategy)
    limits = {limit: names for limit, names in limits.items() if len(names) > 1}
    if not limits:
        return
    question, known = known_of(results)
    for limit in sorted(limits, key=lambda one: one or sys.maxsize):
        advice = advise(replace(question, limits=Limits(limit)), known)
        converts = {
            (one.strategy, one.format): any(asked.startswith(SAVED_AS) for asked in one.asks)
            for one in advice.candidates
        }
        fitting = {
            (one.strategy, one.format): seconds
            for one in advice.candidates
            if (seconds := _seconds(results, (one.strategy, one.format), limit, one.verdict))
        }
        named = next(
            (
                (one.strategy, one.format)
                for one in advice.candidates
                if (one.strategy, one.format) in fitting
            ),
            None,
        )
        if named and not converts[named]:
            fitting = {load: times for load, times in fitting.items() if not converts[load]}
        if advice.best and named and len(fitting) > 1:
            cell = replace(results[0].cell, ram_limit_bytes=limit)
            yield Answer(run, cell, named, fitting)


def _seconds(
    results: Sequence[Result], load: Load, limit: int | None, verdict: FitVerdict
) -> list[float]:
    """Return the ready times of a load under a limit; empty if the limit killed the load."""
    own = [one for one in results if (one.cell.strategy, one.cell.format) == load]
    if any(one.outcome in _KILLED and one.cell.ram_limit_bytes == limit for one in own):
        return []
    alive = [one for one in own if one.outcome is Outcome.OK and one.ready_ns]
    found = [one for one in alive if one.cell.ram_limit_bytes == limit]
    if len(found) < _REPEATS and verdict is FitVerdict.FITS:
        found += [
            one for one in alive
            if one not in found and (one.cell.ram_limit_bytes or sys.maxsize) >= _enough(own)
        ]  # fmt: skip
    return [(one.ready_ns or 0) / 1e9 for one in found]


def _enough(results: Sequence[Result]) -> int:
    """Return a RAM limit in bytes under which the whole model stays in memory."""
    return max(
        max(one.model_bytes or 0, one.peaks.anon_sampled_bytes or 0)
        for one in results
        if one.outcome is Outcome.OK
    )


def _name(load: Load) -> str:
    return load[0] if load[1] == "pt" else f"{load[0]} ({load[1]})"


def _question_text(cell: Cell) -> str:
    limit = format_exact(cell.ram_limit_bytes) if cell.ram_limit_bytes else "no limit"
    more = [f"{cell.ranks} ranks"] if cell.ranks > 1 else []
    more += [cell.device] if cell.device != "cpu" else []
    more += [cell.cache] if cell.cache != "cold" else []
    return " ".join([cell.model.title, cell.dtype, limit, *more, *cell.disk])


def _range(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    main()
