"""What is recommended lives, and what is refused dies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typed import CommandLine

from weighin.isolation import select
from weighin.plan.task import Planned, Progress, Run
from weighin.predict.prediction import Prediction
from weighin.recommend.answer import Question, advise, gather
from weighin.recommend.candidates import FitVerdict, Limits, doubt_bytes
from weighin.records import run_folder
from weighin.result import Outcome
from weighin.run.runner import run
from weighin.suite import registry
from weighin.units import MIB


@pytest.mark.slow
@pytest.mark.cgroup
@pytest.mark.nightly
def test_over_a_grid_of_limits_recommendations_are_kept(
    command: CommandLine, shared_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHIN_CACHE", str(shared_cache))
    nowhere = command.folder / "no records"
    question = Question(registry.model("gpt2-small"), Limits(), results=nowhere)
    known = gather(question, print)
    planned = {
        one.cell.strategy: replace(one, cell=replace(one.cell, isolation="cgroup"))
        for one in known.planned
    }
    unlimited = [(one, Outcome.OK) for one in planned.values() if not one.skip]
    # Each strategy under the smallest limit that names it, and under the largest that rejects it.
    smallest: dict[tuple[str, FitVerdict], tuple[Planned, Outcome]] = {}
    largest: dict[str, tuple[Planned, Outcome]] = {}
    for limit in sorted({size for one in known.predictions for size in _around(one)}):
        advice = advise(replace(question, limits=Limits(limit)), known)
        for one in advice.candidates:
            load = planned[one.strategy]
            limited = replace(load, cell=replace(load.cell, ram_limit_bytes=limit))
            if one == advice.best:
                smallest.setdefault((one.strategy, one.verdict), (limited, Outcome.OK))
            elif one.verdict is FitVerdict.TOO_LARGE:
                largest[one.strategy] = limited, Outcome.OOM_KILLED
    expected = [*unlimited, *smallest.values(), *largest.values()]
    loads = [one for one, _ in expected]
    folder = command.folder / "run"
    run_folder.write_plan(folder, [one.cell for one in loads], {})
    isolation, _ = select.choose("cgroup", limited=True)
    results = run(Run(folder, loads, isolation), Progress())
    assert smallest and largest
    assert [(one.cell, one.outcome) for one in results] == [
        (one.cell, outcome) for one, outcome in expected
    ]


def _around(prediction: Prediction) -> Iterator[int]:
    """Yield limits just below and just above a predicted floor, and two larger ones."""
    least, floor, size = (
        prediction.floor_least_bytes,
        prediction.floor_bytes,
        prediction.model_bytes,
    )
    if least and floor and size:
        below = least - doubt_bytes(least) - MIB
        for limit in (below, floor + doubt_bytes(floor), floor * 21 // 20, floor + size):
            yield -(-limit // MIB) * MIB


@pytest.mark.slow
def test_a_command_says_what_fits_with_its_code(command: CommandLine) -> None:
    asked = command.run("recommend", "gpt2-tiny", "--ram", "1g", "--json", "-", patience_s=400)
    assert asked.code == 0, asked.err
    found = json.loads(asked.out)
    assert found["ram_limit_bytes"] == 1024**3
    first = found["candidates"][0]
    assert (first["strategy"], first["verdict"]) == (found["recommended"], "fits")
    assert first["memory_from"] == first["time_from"] == "predicted"
    compile(found["code"], "pasted", "exec")
    assert asked.err == ""  # only a terminal shows the progress
    nothing = command.run("recommend", "gpt2-tiny", "--ram", "64m", patience_s=400)
    assert nothing.code == 1, nothing.err
    assert "No strategy certainly fits." in nothing.out
