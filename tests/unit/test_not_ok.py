"""A test that reads the peaks of what did not end ok fails, and says how it ended."""

from dataclasses import replace

import pytest
from factories import make_cell, make_result

from weighin.result import Outcome, Peaks
from weighin.testing import bodies
from weighin.testing.bodies import guarded


@pytest.mark.parametrize(
    ("name", "message", "told"),
    [
        ("peaks", "KeyError: 'gone' (mine.py, line 3)", ": KeyError: 'gone' (mine.py, line 3)"),
        ("above_import_bytes", "", ""),
    ],
)
def test_the_peaks_of_a_failure_cannot_be_read(name: str, message: str, told: str) -> None:
    result = make_result(make_cell("mine"), outcome=Outcome.STRATEGY_FAILED, message=message)
    run = guarded(result)
    with pytest.raises(AssertionError) as caught:
        getattr(run, name)
    assert str(caught.value) == (
        f"{name} cannot be read, because mine did not end ok: strategy_failed{told}"
    )


def test_the_end_of_a_failure_can_be_read() -> None:
    result = make_result(make_cell("mine"), outcome=Outcome.OOM_KILLED, message="killed")
    run = guarded(result)
    assert (run.outcome, run.message, run.phases) == ("oom_killed", "killed", result.phases)
    assert repr(run) == "<result of mine: oom_killed>"


def test_a_result_that_is_ok_stays_as_it_is() -> None:
    result = make_result()
    assert guarded(result) is result


@pytest.mark.parametrize(
    ("metric", "needs"),
    [("rss", ""), ("anon", ""), ("cgroup", ": needs the isolation cgroup")],
)
def test_a_metric_that_was_not_measured_says_what_it_needs_if_anything(
    metric: str, needs: str
) -> None:
    result = replace(make_result(make_cell(isolation="process")), peaks=Peaks())
    why = bodies.excess(result, bodies.Limit("1MiB", metric), 0)
    assert why == f"{metric} was not measured under the isolation process{needs}"
