"""Commands in the gate: their metrics, the phases of their programs, and failures that fail it."""

from dataclasses import replace

import pytest
from factories import make_cell, make_result
from ran_commands import RAN, make_command, make_killed, make_ran

from weighin.errors import ConfigError
from weighin.gate.rules import parse_expected
from weighin.records.metrics import METRICS, phases_of_load
from weighin.records.run_folder import Records
from weighin.records.series import summarise
from weighin.result import Memory, Outcome, Phase, Result
from weighin.units import MIB

NAME = "command train.py as_found cgroup ram=none"


def phase(name: str, mib: int) -> Phase:
    end = Memory(mib * MIB, mib * MIB, 0, 0)
    return Phase(name, 0, 5, mib * MIB, end, 0, 0, peak_cgroup_bytes=2 * mib * MIB)


def summary(*results: Result) -> dict[str, int]:
    (series,) = summarise([Records(results)]).values()
    return {name: figure.median for name, figure in series.figures.items()}


def test_the_metrics_of_a_command() -> None:
    assert summary(make_ran()) == {
        "anon": 657 * MIB,
        "peak_cgroup": 957 * MIB,
        "needed": 757 * MIB,
        "time": 3 * 10**9,
    }


def test_a_load_has_no_metric_of_commands() -> None:
    figures = summary(make_result(make_cell("mmap_assign")))
    assert not {"needed", "time"} & figures.keys()
    assert {"load", "ready", "peak_rss"} <= figures.keys()


def test_the_need_is_judged_as_tightly_as_the_memory_of_a_load() -> None:
    assert METRICS["needed"].tolerance == METRICS["anon"].tolerance
    assert METRICS["time"].tolerance == METRICS["ready"].tolerance
    assert METRICS["needed"].title == "needed (sampled)"


def test_every_phase_of_a_program_counts_whatever_its_name() -> None:
    result = make_ran(phases=(phase("prepare", 10), phase("read", 20), phase("read", 30)))
    assert [name for name, _ in phases_of_load(result)] == ["prepare", "read", "read 2"]
    (series,) = summarise([Records([result])]).values()
    assert series.phases["read 2"]["peak_cgroup"] == 60 * MIB


def test_a_stretch_between_two_phases_is_the_same_one_in_each_repeat() -> None:
    """On a busy machine there is such a stretch now and then."""
    stretch = phase("other", 20)
    quiet = make_ran(phases=(phase("read", 20), stretch, phase("apply", 30)))
    busy = make_ran(
        make_command(repeat=1),
        phases=(phase("other", 5), phase("read", 20), stretch, phase("apply", 30), stretch),
    )
    (series,) = summarise([Records([quiet, busy])]).values()
    assert {name: figures["peak_cgroup"] // MIB for name, figures in series.phases.items()} == {
        "read": 40,
        "other after read": 40,
        "apply": 60,
        "other": 10,
        "other after apply": 40,
    }


def test_a_series_is_named_by_label_and_not_by_arguments() -> None:
    other = make_ran(make_command(command=("python", "train.py", "--epochs", "2"), repeat=1))
    series = summarise([Records([make_ran(), other])])
    assert list(series) == [NAME]
    assert series[NAME].repeats == 2


def test_figures_are_those_of_repeats_that_succeeded() -> None:
    failed = make_ran(
        make_command(repeat=1), Outcome.COMMAND_FAILED, ran=replace(RAN, needed_bytes=MIB)
    )
    assert summary(make_ran(), failed)["needed"] == 757 * MIB


def test_a_kill_can_be_expected_and_a_failure_cannot() -> None:
    assert [each.outcome for each in parse_expected("train.py=oom_killed")] == [Outcome.OOM_KILLED]
    assert make_killed().outcome is Outcome.OOM_KILLED
    with pytest.raises(ConfigError, match="command_failed cannot be an expected outcome"):
        parse_expected("train.py=command_failed")
