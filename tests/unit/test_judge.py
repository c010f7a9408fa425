"""What the events of a worker mean, without any worker, and which of its figures cannot be."""

from dataclasses import replace
from typing import Any

import fakes
import pytest
from factories import make_cell, make_result
from snapshots import Compare

from weighin.isolation.base import Exit
from weighin.probes.cgroup import Counters
from weighin.result import Cost, Memory, Peaks, Phase, Rank, Result
from weighin.run import listener as messages
from weighin.run.judge import Evidence, contradiction, is_beyond, judge
from weighin.run.listener import Reported
from weighin.units import MIB

KILLED, SEGFAULT = Exit(None, signal=9), Exit(None, signal=11)


def told(*lines: bytes) -> Reported:
    """A track in which these messages were taken in, as ``Watch`` does it."""
    track = Reported()
    for line in lines:
        match messages.decode(line)[1]:
            case Phase() as message:
                track.add(message, Counters())
            case messages.Told() as message:
                track.take(message)
                track.current = None if message.baseline else track.current
    return track


BEFORE = (fakes.begin("import"), fakes.phase("import"), fakes.begin("prepare"))
BASELINE = (*BEFORE, fakes.phase("prepare"), fakes.baseline())
READING = (*BASELINE, fakes.begin("read"))
LOADED = (*READING, fakes.phase("read"), fakes.loaded())
READY = (*LOADED, fakes.begin("touch"), fakes.phase("touch"), fakes.ready())
DONE = (*READY, fakes.begin("forward"), fakes.phase("forward"), fakes.done())
FORK = fakes.failed("use_failed", "fork: a forked process was ended by SIGKILL")
BROKEN = fakes.failed("strategy_failed", "BrokenProcessPool (mine.py:3)")
WRONG = fakes.failed("wrong_weights", "1 tensor missing from the model: a")
FULL = fakes.failed("cuda_oom", "CUDA out of memory.")

ENDS: dict[str, tuple[tuple[bytes, ...], Exit, dict[str, Any]]] = {
    "killed in a phase": (READING, KILLED, {"oom_kills": 1}),
    "killed in a use": ((*READY, fakes.begin("use: adamw")), KILLED, {"oom_kills": 1}),
    "killed before the first phase of the load": (BASELINE, KILLED, {"oom_kills": 1}),
    "killed before the baseline": (BEFORE, KILLED, {"oom_kills": 1}),
    "a use crashes": ((*READY, fakes.begin("use: mine")), SEGFAULT, {"oom_kills": 0}),
    "a use loses a child": ((*READY, FORK), Exit(1), {"oom_kills": 1}),
    "a load loses a child": ((*LOADED, BROKEN), Exit(1), {"oom_kills": 1, "printed": b"Traceback"}),
    "a load fails": ((*LOADED, BROKEN), Exit(1), {"oom_kills": 0, "printed": b"Traceback"}),
    "a load loses a child and exits": (LOADED, Exit(3), {"oom_kills": 2, "printed": b"no child"}),
    "a load exits": (LOADED, Exit(3), {"oom_kills": 0, "printed": b"\xff!"}),
    "SIGKILL without a kill": (READING, KILLED, {"oom_kills": 0}),
    "a crash beside a child's kill": (READING, SEGFAULT, {"oom_kills": 1, "printed": b"Loading\n\n"}),
    "no Python": ((), Exit(127), {"oom_kills": 0, "printed": b"python: not found"}),
    "an exit before the baseline": (BEFORE, Exit(1), {"oom_kills": 0}),
    "wrong weights": ((*LOADED, WRONG), Exit(1), {"oom_kills": 0, "printed": b"Traceback"}),
    "a full GPU": ((*LOADED, FULL), Exit(1), {"oom_kills": 1}),
    "without a cgroup, SIGKILL": (READING, KILLED, {"oom_kills": None}),
    "without a cgroup, and the machine killed one": (READING, KILLED, {"oom_kills": None, "machine_oom_kills": 1}),
    "without a cgroup, and the machine killed none": (READING, KILLED, {"oom_kills": None, "machine_oom_kills": 0}),
    "the machine killed another process": (READING, KILLED, {"oom_kills": 0, "machine_oom_kills": 1}),
}  # fmt: skip


def test_the_outcome_of_a_worker_that_ended(same: Compare) -> None:
    text = ""
    for name, (lines, ended, facts) in ENDS.items():
        outcome, message = judge(Evidence(make_cell(), ended, ranks=[told(*lines)], **facts))
        text += f"{name}\n  {outcome}: {message}\n"
    same("judged.txt", text)


LOADS: dict[str, tuple[tuple[bytes, ...], list[str], int | None, int | None]] = {
    "nothing": ((), [], None, None),
    "before": (BEFORE, [], None, None),
    "baseline": (BASELINE, [], None, None),
    "loaded": (LOADED, ["read"], 1000, None),
    "ready": (READY, ["read", "touch"], 1000, 1200),  # the load, and one reading of every byte
    "done": (DONE, ["read", "touch"], 1000, 1200),
}


@pytest.mark.parametrize("name", LOADS)
def test_the_phases_of_the_load_lie_between_baseline_and_ready(name: str) -> None:
    lines, *expected = LOADS[name]
    track = told(*lines)
    names = [phase.name for phase in track.load_phases]
    assert [names, track.told.load_ns, track.ready_ns] == expected


def test_a_gap_that_counts_as_a_phase_does_not_move_the_rank_that_hangs() -> None:
    baseline = fakes.baseline()
    waiting = told(baseline, fakes.begin("meet"))
    hanging = told(baseline, fakes.phase("other"), fakes.begin("bad"))
    ranks = [waiting, hanging, waiting]
    assert Evidence(make_cell(), ranks=ranks).where == "rank 1 in phase 'bad'"


# -- figures that contradict each other

PEAKS = Peaks(rss_bytes=300 * MIB, cgroup_bytes=400 * MIB, anon_sampled_bytes=250 * MIB)


def result(peaks: dict[str, int], **changes: Any) -> Result:
    plain = replace(
        make_result(make_cell(ram_limit_bytes=500 * MIB, ranks=changes.pop("number", 1))),
        baseline=Memory(100 * MIB, 60 * MIB, 40 * MIB, 0),
        peaks=replace(PEAKS, **{f"{name}_bytes": mib * MIB for name, mib in peaks.items()}),
        load_ns=10,
        ready_ns=20,
        cost=Cost(wall_ns=30),
    )
    return replace(plain, **changes)


VOID: dict[str, tuple[Result, str]] = {
    "none": (result({}), ""),
    "outside": (result({"anon_sampled": 410, "rss": 450}), "outside of its cgroup"),
    "ranks": (result({"anon_sampled": 410}, number=2, ranks=(Rank(), Rank())), ""),  # they share it
    "limit": (result({"cgroup": 520}), "the limit was changed"),
    "reset": (result({"anon_sampled": 320}), "the peak was reset"),
    "before": (result({"rss": 80, "anon_sampled": 60}), "the memory before the load"),
    "time": (result({}, ready_ns=31), "longer than the whole measurement"),
}


@pytest.mark.parametrize("name", VOID)
def test_a_contradiction_voids_a_result(name: str) -> None:
    result, words = VOID[name]
    spent_ns = max(result.ready_ns or 0, result.load_ns or 0)
    assert result.cost
    said = contradiction(result.cell, result.peaks, result.baseline, spent_ns, result.cost.wall_ns)
    assert words in said and bool(words) == bool(said)


@pytest.mark.parametrize(("size", "bound"), [(None, 5), (5, None), (104 * MIB, 100 * MIB)])
def test_a_size_within_the_kernels_slack_is_not_beyond(size: int | None, bound: int | None) -> None:
    assert not is_beyond(size, bound)
