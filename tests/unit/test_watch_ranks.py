"""Workers of several ranks, lost processes and limits around: what the watch makes of them."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import fakes
import pytest
from fakes import (
    BASELINE,
    DONE,
    JOB,
    KILLED,
    LOADED,
    FakeRunning,
    FakeSampler,
    Silent,
    Step,
    begin,
    done,
    event,
    failed,
    fake_sampler,
    loaded,
    phase,
    ready,
    watched,
)
from test_watch import sample
from test_watch_cgroup import Group

from weighin.isolation.base import Exit
from weighin.probes import kernel_log
from weighin.probes.cgroup import Counters
from weighin.result import Kill, Outcome, Result
from weighin.run import measure as watch
from weighin.run.measure import Watch
from weighin.units import MIB

__all__ = ["fake_sampler"]


def of(rank: int, line: bytes) -> bytes:
    """Return the event of one rank."""
    return json.dumps(json.loads(line) | {"rank": rank}).encode() + b"\n"


ENDED_0 = event("ended", rank=0, code=1, signal=None, stderr_tail="")


class Seen(Silent):
    """An observer that sees what a script tells it."""

    def __init__(self, **figures: Any) -> None:
        self.now = Counters(**figures)

    def sees(self, **figures: Any) -> Callable[[], None]:
        """Return a step of a script that sets figures."""

        def step() -> None:
            self.now = replace(self.now, **figures)

        return step

    def counters(self) -> Counters:
        return self.now


def followed(running: FakeRunning, ranks: int = 2, **options: Any) -> tuple[Result, Watch]:
    return fakes.followed(running, ranks=ranks, **options)


def both(seen: Seen) -> list[Step]:
    """Two ranks that load, of which the second is slower and takes more."""
    return [
        of(0, begin("import")), of(1, begin("import")),
        seen.sees(usage_bytes=10, peak_bytes=99), of(0, fakes.baseline(t_ns=100)),
        seen.sees(usage_bytes=20), of(1, fakes.baseline(t_ns=200)),
        of(0, begin("read")), of(1, begin("read")),
        seen.sees(usage_bytes=30, peak_bytes=40), of(0, phase("read", 500)),
        seen.sees(peak_bytes=60), of(1, phase("read", 600)),
        of(0, loaded(1000)), of(1, loaded(2000)),
        of(0, ready(t_ns=2000, touch_ns=5)),
        seen.sees(peak_bytes=70, refaults=9), of(1, ready(t_ns=3000, touch_ns=1)),
        of(0, event("shared", pss_bytes=7)), of(1, event("shared", pss_bytes=8)),
        seen.sees(peak_bytes=1000), of(0, done()), of(1, done()),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("then", "outcome"),
    [
        ([of(0, failed("strategy_failed", "a")), ENDED_0], Outcome.OK),
        (
            [of(0, failed("strategy_failed", "a")), ENDED_0, of(1, failed("wrong_weights", "b"))],
            Outcome.OK,
        ),
        ([], None),  # the process that starts the ranks ended
    ],
)
@pytest.mark.parametrize("compares", [False, True], ids=["all in forward", "one compares"])
def test_a_forward_pass_of_ranks_fails_after_a_right_load_only_if_every_rank_is_in_it(
    compares: bool, then: list[bytes], outcome: Outcome | None
) -> None:
    whole = both(Seen())[:-4]
    begun = [of(0, begin("forward")), *([] if compares else [of(1, begin("forward"))])]
    shared = [of(0, event("shared", pss_bytes=7)), of(1, event("shared", pss_bytes=8))]
    result, _ = followed(FakeRunning([*whole, *shared, *begun, *then], Exit(1), inside=Seen()))
    is_fault_of_model = outcome is Outcome.OK and not compares
    assert (result.outcome is Outcome.OK) == is_fault_of_model
    assert any("Every weight is right" in each for each in result.warnings) == is_fault_of_model


def test_events_of_ranks_that_do_not_exist_are_passed_over() -> None:
    seen = Seen()
    script = [*both(seen)[:8], of(2, phase("read", 900)), *both(seen)[8:]]
    result, _ = followed(FakeRunning(script, inside=seen))
    assert (result.outcome, result.peaks.rss_bytes) == (Outcome.OK, 600 * MIB)


def own(kind: str, **fields: Any) -> bytes:
    """A message of a phase that a strategy measures with weighin.phase."""
    reading = {"id": 1, "t_ns": 1, "faults": [0, 0], "peak_rss_bytes": 1}
    return event(kind, **reading, memory=fakes.memory(1), **fields)


OWN = own("begin", name="own", resets=True), own("end")


def test_no_peak_of_a_phase_of_one_of_several_ranks_was_to_be_had() -> None:
    seen = Seen()
    whole = both(seen)
    script = [*whole[:8], *(of(1, message) for message in OWN), *whole[8:]]
    assert followed(FakeRunning(script, inside=seen))[0].warnings == ()


def test_a_load_of_more_phases_than_a_program_may_have_gets_none_of_a_program() -> None:
    many = [phase("forward") for _ in range(1001)]
    result = watched(FakeRunning([*DONE[:-1], *many, *OWN, done()]))
    assert "own" not in [each.name for each in result.phases]
    assert result.warnings == ("a process had more than 1000 phases: later ones are not recorded",)


class Others(Silent):
    """Observes a worker that started other processes."""

    def __init__(self, number: int, private_bytes: int) -> None:
        self.others = (number, private_bytes)


@pytest.mark.parametrize(
    ("number", "private_bytes", "words"),
    [
        (1, 2 * MIB, "it started 1 process, with 2.000 MiB of private memory in all (sampled)"),
        (3, 5 * MIB, "it started 3 processes, with 5.000 MiB of private memory in all (sampled)"),
        (1, 2 * MIB - 1, ""),
        (0, 0, ""),
    ],
)
def test_processes_that_a_worker_started_are_told(
    number: int, private_bytes: int, words: str
) -> None:
    result = watched(FakeRunning([*DONE], inside=Others(number, private_bytes)))
    expected = "peak RSS and anonymous memory are those of the measured process alone; " + words
    assert result.warnings == ((expected,) if words else ())
    assert result.peaks.others_private_sampled_bytes == (private_bytes if number else None)


def test_processes_that_a_use_forks_are_no_surprise() -> None:
    for use, number in (("fork", 0), ("", 1)):
        running = FakeRunning([*DONE], inside=Others(2, 9 * MIB))
        job = replace(JOB, cell=replace(JOB.cell, use=use))
        assert len(followed(running, ranks=1, job=job)[0].warnings) == number


def killed_at(peak: int, limit: int | None, group: Path | None = None) -> str:
    """The message of a worker that the kernel killed when its cell was charged this much."""
    seen = Seen(oom_kills=1)
    script: list[Step] = [*BASELINE, begin("read"), seen.sees(peak_bytes=peak)]
    job = replace(JOB, cell=replace(JOB.cell, ram_limit_bytes=limit))
    running = FakeRunning(script, KILLED, inside=seen, cgroup=group)
    message = followed(running, ranks=1, job=job)[0].message
    return message.removeprefix("killed by the kernel for lack of memory in phase 'read'")


def test_a_kill_far_below_the_limit_met_another_one() -> None:
    assert killed_at(900, 1000) == killed_at(1000, 1000) == ""
    other = ": the load reached the limit of an outer cgroup, or the end of the machine's memory"
    assert killed_at(899, 1000) == killed_at(899, None) == other


def test_the_limit_is_said_with_the_lost_child_and_not_with_the_error() -> None:
    script = [*LOADED, failed("strategy_failed", "broken pool")]
    job = replace(JOB, cell=replace(JOB.cell, ram_limit_bytes=1000))
    running = FakeRunning(script, Exit(1), inside=Seen(oom_kills=1, peak_bytes=899))
    message = followed(running, ranks=1, job=job)[0].message
    assert "memory: the load reached the limit of an outer cgroup" in message
    assert "; then it failed: broken pool; the peak of the cgroup was 899 B" in message


def test_a_refused_message_of_any_rank_is_a_warning() -> None:
    seen = Seen()
    script = [*both(seen)[:8], lambda: running.listener.ranks[1].note("sent a wrong message")]
    running: Any = FakeRunning([*script, *both(seen)[8:]], inside=seen)
    assert any("sent a wrong message" in text for text in followed(running)[0].warnings)


def test_a_kill_by_a_visible_limit_around_names_it(tmp_path: Path) -> None:
    around = Group(tmp_path / "around", 2).start()  # with a limit of 100 bytes
    (cell := around / "cell").mkdir()
    said = f": the load reached the limit of 100 B of the outer cgroup {around}"
    assert killed_at(95, 1000, cell) == said
    assert killed_at(95, None, cell) == said
    assert killed_at(95, 100, cell) == ""
    assert killed_at(80, 99, cell).endswith("the end of the machine's memory")


def lost(kills: Sequence[Kill], group: Path | None, monkeypatch: pytest.MonkeyPatch) -> str:
    """The message of a worker that failed after the kernel had killed its children."""
    asked: list[tuple[Any, ...]] = []

    def since(*arguments: Any) -> Sequence[Kill]:
        asked.append(arguments)
        return kills

    monkeypatch.setattr(kernel_log, "position", lambda **_: 0)
    monkeypatch.setattr(kernel_log, "kills_since", since)
    monkeypatch.setattr("weighin.probes.cgroup.read_machine_oom_kills", count(3).__next__)
    seen = Seen(oom_kills=1, peak_bytes=3 * MIB)
    script = [*LOADED, failed("strategy_failed", "broken pool")]
    running = FakeRunning(script, Exit(1), inside=seen, cgroup=group)
    result = watched(running)
    assert result.outcome is Outcome.OOM_KILLED
    assert asked[0][:3] == (0, group, running.pid)
    return result.message.partition("; then it failed: ")[2]


def test_children_that_the_kernel_killed_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kills = [Kill(pid, "python", is_main=pid == 5, anon_bytes=MIB) for pid in (5, 6, 7, 8)]
    peak = "; the peak of the cgroup was 3.000 MiB"
    each = "; the kernel killed python (process {}) with 1.000 MiB of anonymous memory"
    assert (
        lost(kills, tmp_path, monkeypatch)
        == (
            f"broken pool{each.format(6)}{each.format(7)}{peak}"  # up to three, of which one is the worker
        )
    )
    assert lost([Kill(6, "x", is_main=False)], tmp_path, monkeypatch) == (
        f"broken pool; the kernel killed x (process 6) with 0 B of anonymous memory{peak}"
    )


def test_a_worker_that_does_not_even_end_after_sigkill_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watch, "_PATIENCE_S", 0.01)
    running = FakeRunning([*BASELINE, begin("read")], hangs=2)
    result = watched(running)
    assert (result.outcome, running.kills) == (Outcome.TIMEOUT, 1)
    assert result.warnings[-1] == (
        "the measured process was still running when this was recorded: SIGKILL did not end it"
    )


def test_kills_that_did_not_decide_the_outcome_are_a_warning() -> None:
    seen = Seen(oom_kills=2)
    script = [*LOADED, failed("wrong_weights", "1 tensor differs")]
    result = watched(FakeRunning(script, Exit(1), inside=seen))
    assert (result.outcome, result.oom_kills) == (Outcome.WRONG_WEIGHTS, 2)
    assert result.warnings == (
        "the kernel killed 2 processes of this measurement for lack of memory",
    )


class Disk:
    closed = 0

    def close(self) -> None:
        self.closed += 1


def test_a_time_out_closes_the_disk() -> None:
    disk: Any = Disk()
    running = FakeRunning([*BASELINE, TimeoutError], KILLED, inside=Seen())
    followed(running, ranks=1, disk=disk)
    assert disk.closed == 1
    disk = Disk()
    followed(FakeRunning([*DONE]), ranks=1, disk=disk)
    assert disk.closed == 0


def test_the_memory_of_a_use_is_the_most_that_was_seen_in_it(sampler: type[FakeSampler]) -> None:
    script = [
        *LOADED, ready(), begin("forward"), phase("forward", 300, start_ns=3000, end_ns=4000),
        begin("forward"), phase("forward", 330, start_ns=5000, end_ns=6000), done(),
    ]  # fmt: skip
    of_phases = 2 * (330 * MIB // 3)
    for t_ns, mib, most in (
        (2999, 900, of_phases),
        (3000, 900, 900 * MIB),
        (4500, 900, 900 * MIB),  # between two passes
        (6000, 900, 900 * MIB),
        (6001, 900, of_phases),
        (3500, 1, of_phases),
    ):
        sampler.seen = (sample(t_ns, mib),)
        use = watched(FakeRunning(script, pid=1)).use
        assert use and use.anon_sampled_bytes == most, t_ns
    assert watched(FakeRunning([*LOADED, ready(), done()], pid=1)).use is None
