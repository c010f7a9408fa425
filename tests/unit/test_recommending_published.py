"""Over the published runs: what is named is what was the fastest there, after its records."""

from pathlib import Path
from statistics import median

import pytest
from pytest import MonkeyPatch

from weighin.plan.task import Planned
from weighin.predict.prediction import Prediction, Work
from weighin.probes import environment
from weighin.recommend import answer
from weighin.recommend.answer import PriorKnowledge, Question, advise
from weighin.recommend.candidates import FitVerdict, Limits
from weighin.recommend.prior_runs import find
from weighin.records import run_folder
from weighin.result import Outcome, Result
from weighin.suite import registry
from weighin.units import GIB, MIB

PUBLISHED = Path(__file__).parents[2] / "results" / "published"
RUNS = [
    ("gpt2-medium-floors", None),
    ("gpt2-medium-floors-again", None),
    ("gpt2-medium-floors-cgroup", None),
    ("gpt2-xl-8GiB", 8 * GIB),
    ("gpt2-xl-16GiB", 16 * GIB),
    ("gpt2-xl-floors", None),
    ("gpt2-xl-survival", 8 * GIB),
    ("gpt2-xl-survival", 16 * GIB),
    ("gpt2-xl-survival", None),
]
COPIES = {"baseline": 2, "sequential": 2, "meta_copy": 2, "mmap_assign": 0}
"""Of the weights, in memory; one for every other strategy."""


def fastest(results: list[Result], limit: int | None) -> str:
    """Return the strategy of the least median time among those that ended ok under a limit."""
    times: dict[str, list[float]] = {}
    for one in results:
        if one.outcome is Outcome.OK and one.cell.ram_limit_bytes == limit and one.ready_ns:
            times.setdefault(one.cell.strategy, []).append(one.ready_ns / 1e9)
    return min(times, key=lambda name: median(times[name]))


def predicted(planned: Planned, size: int) -> Prediction:
    """As the strategy's loads do: what it maps or reads, and the copies that it holds."""
    held = round(COPIES.get(planned.cell.strategy, 1) * size)
    return Prediction(
        planned.cell,
        model_bytes=size,
        baseline_anon_bytes=144 * MIB,
        host_anon_peak_bytes=144 * MIB + held,
        tensor_peak_bytes=held,
        floor_bytes=160 * MIB + held,
        work=Work(read_bytes=size, fresh_bytes=held) if held else Work(mapped_bytes=size),
    )


@pytest.mark.parametrize(("run", "limit"), RUNS)
def test_after_a_full_run_the_measured_fastest_is_named(
    run: str, limit: int | None, monkeypatch: MonkeyPatch
) -> None:
    results = list(run_folder.read(PUBLISHED / run).results)
    monkeypatch.setattr(environment, "machine", lambda: results[0].environment)
    question = Question(results[0].cell.model, Limits(limit), results=PUBLISHED / run)
    planned = tuple(answer._planned(question, "pt"))
    size = next(one.model_bytes for one in results if one.model_bytes)
    known = PriorKnowledge(
        planned,
        tuple(predicted(one, size) for one in planned),
        find([PUBLISHED / run], planned[0].cell),
        "pt",
    )
    advice = advise(question, known)
    assert advice.best
    assert advice.best.time_from == "measured"
    assert (advice.best.strategy, advice.best.verdict) == (fastest(results, limit), FitVerdict.FITS)
    assert registry.strategy(advice.best.strategy)
