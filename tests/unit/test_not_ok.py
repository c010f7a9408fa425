"""A test that reads the peaks of what did not end ok fails, and says how it ended."""

from dataclasses import replace

import pytest
from factories import make_cell, make_result

from weighin.result import Outcome, Peaks
from weighin.testing import bodies
from weighin.testing.bodies import guarded


@pytest.mark.parametrize("message", ["KeyError: 'gone' (mine.py, line 3)", ""])
def test_of_a_failure_the_end_can_be_read_and_no_figure(message: str) -> None:
    result = make_result(make_cell("mine"), outcome=Outcome.STRATEGY_FAILED, message=message)
    run = guarded(result)
    assert (run.outcome, run.message, run.phases) == ("strategy_failed", message, result.phases)
    assert repr(run) == "<result of mine: strategy_failed>"
    told = "strategy_failed: " + message if message else "strategy_failed"
    for name in ("peaks", "above_import_bytes"):
        with pytest.raises(AssertionError) as caught:
            getattr(run, name)
        assert str(caught.value) == f"{name} cannot be read, because mine did not end ok: {told}"


def test_a_result_that_is_ok_stays_as_it_is() -> None:
    result = make_result()
    assert guarded(result) is result


def test_a_metric_that_was_not_measured_says_what_it_needs_if_anything() -> None:
    result = replace(make_result(make_cell(isolation="process")), peaks=Peaks())
    for metric, needs in (("rss", ""), ("anon", ""), ("cgroup", ": needs the isolation cgroup")):
        why = bodies.excess(result, bodies.Limit("1MiB", metric), 0)
        assert why == f"{metric} was not measured under the isolation process{needs}"
