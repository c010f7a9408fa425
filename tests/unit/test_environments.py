"""The environment of a cell: read strictly, part of its series, and shown where settings are."""

from dataclasses import replace
from typing import Any

import pytest
from factories import make_cell, planned

from weighin.cell import Cell, ModelSpec, decode_job, encode_job
from weighin.errors import ConfigError
from weighin.plan.loads import plan_cell
from weighin.predict.client import predict
from weighin.records.series import name_of
from weighin.settings.definition import check_suite
from weighin.suite import registry

ARENAS = {"MALLOC_ARENA_MAX": "2"}
PLAIN = make_cell("streaming")
CELL = replace(PLAIN, environment=ARENAS)


def test_cells_of_different_environments_are_of_different_series() -> None:
    cell = Cell(ModelSpec("m", "a.b:c"), "baseline", "process")
    assert cell.series == replace(cell, repeat=3).series
    assert replace(cell, environment=ARENAS).series != cell.series


def test_a_series_is_named_with_its_environment() -> None:
    assert name_of(CELL) == f"{name_of(PLAIN)} MALLOC_ARENA_MAX=2"


def test_a_worker_is_told_of_the_environment() -> None:
    from weighin.cell import Job

    job = Job(CELL, "c", "m", "s")
    assert decode_job(encode_job(job)) == job


@pytest.mark.parametrize(
    ("given", "read"),
    [
        ({"MALLOC_ARENA_MAX": 2}, [ARENAS]),
        ([{}, {"MALLOC_ARENA_MAX": "2"}], [{}, ARENAS]),
        ({"OMP_NUM_THREADS": 1, "A": "b c=d"}, [{"OMP_NUM_THREADS": "1", "A": "b c=d"}]),
    ],
)
def test_a_suite_lists_one_environment_or_several(given: Any, read: list[dict[str, str]]) -> None:
    assert check_suite({"models": "gpt2-small", "environment": given}).environment == read


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("A=1", ": input should be a valid dictionary, got 'A=1'"),
        ({"A=B": 1}, r": 'A=B' cannot be set\nwrite as in {MALLOC_ARENA_MAX: 2}"),
        ({"": 1}, ": '' cannot be set"),
        ({"A": True}, ".A: input should be a valid string, got True\nwrite the value in quotes"),
        ({"A": [1]}, r".A: input should be a valid string, got \[1\]"),
        ({"A": "a\0b"}, ": 'A' cannot be set"),
        ({3: "x"}, ": the name 3 is not a text\nwrite the name in quotes"),
        ({"PYTHONPATH": "x"}, ": weighin sets PYTHONPATH itself"),
        ({"WEIGHIN_WORKER": "x"}, ": weighin sets WEIGHIN_WORKER itself"),
    ],
)
def test_a_wrong_environment(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^--set environment{message}"):
        check_suite({"models": "gpt2-small", "environment": given})


def test_each_environment_is_measured_with_each_strategy() -> None:
    infos: tuple[tuple[registry.StrategyInfo, dict[str, Any]], ...] = tuple(
        (registry.strategy(name), {}) for name in ("baseline", "streaming")
    )
    cells = planned((ModelSpec("m", "a.b:c"),), infos, environment=[{}, ARENAS])
    order = [(one.cell.strategy, one.cell.environment) for one in cells]
    assert order == [
        ("baseline", {}),
        ("streaming", {}),
        ("baseline", ARENAS),
        ("streaming", ARENAS),
    ]


def test_a_prediction_follows_no_other_settings() -> None:
    [prediction] = predict([plan_cell(CELL, registry.strategy("streaming"))])
    assert prediction.cannot == "weighin cannot predict the effect of MALLOC_ARENA_MAX=2"


def test_a_prediction_says_that_it_reads_no_whole_training_checkpoint() -> None:
    cell = replace(PLAIN, options={"key": "model"})
    [prediction] = predict([plan_cell(cell, registry.strategy("streaming"))])
    assert prediction.cannot == "weighin cannot predict the load of a part of a training checkpoint"
