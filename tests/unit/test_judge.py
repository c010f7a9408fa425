"""What the events of a worker mean, without any worker."""

from typing import Any

import fakes
import pytest
from factories import make_cell

from weighin.isolation.base import Exit
from weighin.probes.cgroup import Counters
from weighin.result import Outcome, Phase
from weighin.run import listener as messages
from weighin.run.judge import Evidence, judge
from weighin.run.listener import Reported

KILLED = Exit(None, signal=9)


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


def judged(
    track: Reported, ended: Exit, oom_kills: int | None, **facts: Any
) -> tuple[Outcome, str]:
    cell = make_cell()
    return judge(Evidence(cell, ended, ranks=[track], oom_kills=oom_kills, **facts))


BEFORE = (fakes.begin("import"), fakes.phase("import"), fakes.begin("prepare"))
BASELINE = (*BEFORE, fakes.phase("prepare"), fakes.baseline())
LOADED = (*BASELINE, fakes.begin("read"), fakes.phase("read"), fakes.loaded())
READY = (*LOADED, fakes.begin("touch"), fakes.phase("touch"), fakes.ready())
DONE = (*READY, fakes.begin("forward"), fakes.phase("forward"), fakes.done())


@pytest.mark.parametrize(
    ("lines", "ended", "oom_kills", "stderr_tail", "outcome", "message"),
    [
        (
            (*BASELINE, fakes.begin("read")),
            KILLED,
            1,
            b"",
            Outcome.OOM_KILLED,
            "killed by the kernel for lack of memory in phase 'read'",
        ),
        (
            (*READY, fakes.begin("use: adamw")),
            KILLED,
            1,
            b"",
            Outcome.OOM_KILLED,
            "killed by the kernel for lack of memory in phase 'use: adamw'",
        ),
        (
            (*READY, fakes.begin("use: mine")),
            Exit(None, signal=11),
            0,
            b"",
            Outcome.USE_FAILED,
            "the measured process was ended by SIGSEGV in phase 'use: mine'; every weight is right",
        ),
        (
            (*READY, fakes.failed("use_failed", "fork: a forked process was ended by SIGKILL")),
            Exit(1),
            1,
            b"",
            Outcome.OOM_KILLED,
            "the measured process lost a child, killed by the kernel for lack of memory; then it"
            " failed: fork: a forked process was ended by SIGKILL",
        ),
        (
            (*BASELINE, fakes.begin("read")),
            Exit(None, signal=9),
            1,
            b"",
            Outcome.OOM_KILLED,
            "killed by the kernel for lack of memory in phase 'read'",
        ),
        (
            (*LOADED, fakes.failed("strategy_failed", "BrokenProcessPool (mine.py:3)")),
            Exit(1),
            1,
            b"Traceback",
            Outcome.OOM_KILLED,
            "the measured process lost a child, killed by the kernel for lack of memory; then it"
            " failed: BrokenProcessPool (mine.py:3)",
        ),
        (
            (*LOADED, fakes.failed("strategy_failed", "BrokenProcessPool (mine.py:3)")),
            Exit(1),
            0,
            b"Traceback",
            Outcome.STRATEGY_FAILED,
            "BrokenProcessPool (mine.py:3)",
        ),
        (
            LOADED,
            Exit(3),
            2,
            b"no child",
            Outcome.OOM_KILLED,
            "the measured process lost a child, killed by the kernel for lack of memory; then it"
            " ended with exit code 3 after phase 'read': no child",
        ),
        (
            BASELINE,
            KILLED,
            1,
            b"",
            Outcome.OOM_KILLED,
            "killed by the kernel for lack of memory before its first phase",
        ),
        (
            BEFORE,
            KILLED,
            1,
            b"",
            Outcome.OOM_KILLED,
            "killed by the kernel for lack of memory in phase 'prepare'",
        ),
        (
            (*BASELINE, fakes.begin("read")),
            KILLED,
            0,
            b"",
            Outcome.STRATEGY_FAILED,
            "the measured process was ended by SIGKILL in phase 'read'",
        ),
        (
            (*BASELINE, fakes.begin("read")),
            KILLED,
            None,
            b"",
            Outcome.STRATEGY_FAILED,
            "the measured process was ended by SIGKILL in phase 'read'",
        ),
        (
            (*BASELINE, fakes.begin("read")),
            Exit(None, signal=11),
            1,  # a child was killed, the worker itself was not
            b"Loading\n\n",
            Outcome.STRATEGY_FAILED,
            "the measured process was ended by SIGSEGV in phase 'read': Loading",
        ),
        (
            LOADED,
            Exit(3),
            0,
            b"\xff!",
            Outcome.STRATEGY_FAILED,
            "the measured process ended with exit code 3 after phase 'read': \ufffd!",
        ),
        (
            (),
            Exit(127),
            0,
            b"python: not found",
            Outcome.MEASUREMENT_FAILED,
            "the measured process ended with exit code 127 before its first phase: python: not found",
        ),
        (
            BEFORE,
            Exit(1),
            0,
            b"",
            Outcome.MEASUREMENT_FAILED,
            "the measured process ended with exit code 1 in phase 'prepare'",
        ),
        (
            (*LOADED, fakes.failed("wrong_weights", "1 tensor missing from the model: a")),
            Exit(1),
            0,
            b"Traceback",
            Outcome.WRONG_WEIGHTS,
            "1 tensor missing from the model: a",
        ),
        (
            (*LOADED, fakes.failed("cuda_oom", "CUDA out of memory.")),
            Exit(1),
            1,
            b"",
            Outcome.CUDA_OOM,
            "CUDA out of memory.",
        ),
    ],
)
def test_the_outcome_of_a_worker_that_ended(
    lines: tuple[bytes, ...],
    ended: Exit,
    oom_kills: int | None,
    stderr_tail: bytes,
    outcome: Outcome,
    message: str,
) -> None:
    assert judged(told(*lines), ended, oom_kills, printed=stderr_tail) == (outcome, message)


@pytest.mark.parametrize(
    ("oom_kills", "machine_oom_kills", "outcome", "message"),
    [
        (
            None,
            1,
            Outcome.OOM_KILLED,
            "killed by the kernel when the whole machine ran out of memory, in phase 'read'",
        ),
        (
            None,
            0,
            Outcome.STRATEGY_FAILED,
            "the measured process was ended by SIGKILL in phase 'read'",
        ),
        (
            None,
            None,
            Outcome.STRATEGY_FAILED,
            "the measured process was ended by SIGKILL in phase 'read'",
        ),
        # Another process was killed: this cell's own counter says so.
        (
            0,
            1,
            Outcome.STRATEGY_FAILED,
            "the measured process was ended by SIGKILL in phase 'read'",
        ),
    ],
)
def test_a_worker_without_a_cgroup_is_judged_by_the_machines_counter(
    oom_kills: int | None, machine_oom_kills: int | None, outcome: Outcome, message: str
) -> None:
    track = told(*BASELINE, fakes.begin("read"))
    found = judged(track, KILLED, oom_kills, machine_oom_kills=machine_oom_kills)
    assert found == (outcome, message)


def names(track: Reported) -> list[str]:
    return [phase.name for phase in track.load_phases]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ((), []),
        (BEFORE, []),
        (BASELINE, []),
        (LOADED, ["read"]),
        (READY, ["read", "touch"]),
        (DONE, ["read", "touch"]),
    ],
)
def test_the_phases_of_the_load_lie_between_baseline_and_ready(
    lines: tuple[bytes, ...], expected: list[str]
) -> None:
    assert names(told(*lines)) == expected


@pytest.mark.parametrize(
    ("lines", "load_ns", "ready_ns"),
    [(BASELINE, None, None), (LOADED, 1000, None), (READY, 1000, 1200), (DONE, 1000, 1200)],
)
def test_ready_is_the_load_and_one_reading_of_every_byte(
    lines: tuple[bytes, ...], load_ns: int | None, ready_ns: int | None
) -> None:
    track = told(*lines)
    assert (track.told.load_ns, track.ready_ns) == (load_ns, ready_ns)


def test_a_gap_that_counts_as_a_phase_does_not_move_the_rank_that_hangs() -> None:
    baseline = fakes.baseline()
    waiting = told(baseline, fakes.begin("meet"))
    hanging = told(baseline, fakes.phase("other"), fakes.begin("bad"))
    ranks = [waiting, hanging, waiting]
    assert Evidence(make_cell(), ranks=ranks).where == "rank 1 in phase 'bad'"
