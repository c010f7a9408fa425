"""A run of commands: its records, the time-outs of a search, signals, and how an end is judged."""

import os
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from leftovers import wait_until
from ran_commands import SECOND_NS, make_command, make_ran, settings_of

from weighin.cell import Cell
from weighin.errors import Interrupted
from weighin.isolation import process
from weighin.isolation.base import Exit
from weighin.isolation.process import ProcessIsolation, Started
from weighin.plan.task import Planned, Progress, Run
from weighin.records import run_folder
from weighin.records.floor import Aim
from weighin.records.verdict import Reference
from weighin.result import Kill, Outcome
from weighin.run import commands, runner
from weighin.run.judge import Evidence, judge
from weighin.run.measure import Measured
from weighin.units import GIB, MIB


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def asked(*scripts: str, **changes: Any) -> Run:
    """Plan a run of one command for each script."""
    Path("run").mkdir()
    cells = [
        Cell.of_command(f"command {number}", ("sh", "-c", script), "process")
        for number, script in enumerate(scripts)
    ]
    settings = settings_of(*cells, cwd=str(Path.cwd())).model_copy(update=changes)
    planned = [Planned(cell) for cell in cells]
    return Run(Path("run"), planned, ProcessIsolation(), settings, is_new=True)


def test_a_run_of_commands_may_run_inside_another() -> None:
    with runner.only_run():
        (result,) = runner.run(asked("exit 0"), Progress())
    assert result.outcome is Outcome.OK


def test_a_run_parses_each_record_once(monkeypatch: pytest.MonkeyPatch) -> None:
    parse = Mock(wraps=run_folder.parse)
    monkeypatch.setattr(run_folder, "parse", parse)
    run = asked("exit 0", within=0.05, aim=Aim.SURVIVES)
    limits = [None, *range(GIB, 6 * GIB, GIB)]  # each limited cell is compared with the first one
    planned = [replace(run.planned[0].cell, ram_limit_bytes=limit) for limit in limits]
    run = replace(run, planned=[Planned(cell) for cell in planned])
    first = runner.run(replace(run, planned=run.planned[:4]), Progress())
    assert [each.cell for each in first] == planned[:4]
    assert len({call.args[1] for call in parse.call_args_list}) == parse.call_count == 4
    every = runner.run(replace(run, is_new=False), Progress())
    assert (every[:4], len(every)) == (first, 6)
    assert parse.call_count == 4 + 6
    assert tuple(every) == run_folder.read(run.folder).results


def test_a_signal_that_a_command_got_ends_the_run_before_the_next() -> None:
    run = asked("kill -TERM $PPID; sleep 600", "touch more")
    with pytest.raises(Interrupted, match="stopped; nothing is left running"):
        runner.run(run, Progress())
    assert not Path("more").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_start(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread of this process, which blocks no signal, takes it before the command has a pid."""
    ended = threading.Event()

    def start(*given: Any, **named: Any) -> Started:
        started = Started(*given, **named)
        os.kill(os.getpid(), number)
        wait_until(lambda: number not in signal.sigpending(), "no thread takes the signal")
        return started

    monkeypatch.setattr(process, "Started", start)
    other = threading.Thread(target=ended.wait)
    other.start()
    try:
        with pytest.raises(Interrupted):
            runner.run(asked("exec sleep 600", "touch more"), Progress())
        assert not Path("more").exists()
    finally:
        ended.set()
        other.join()


UNLIMITED = make_ran(make_command())  # 3 s
LIMITED = make_command(ram_limit_bytes=GIB)


def searching(aim: Aim = Aim.ENDS, **changes: Any) -> Run:
    """A search for a floor in which the command without a limit has run."""
    run_folder.append(Path("run"), UNLIMITED)
    run_folder.append(Path("run"), make_ran(make_command("other.py")))
    settings = settings_of(LIMITED, within=0.05, aim=aim).model_copy(update=changes)
    run = Run(Path("run"), [Planned(LIMITED)], ProcessIsolation(), settings)
    run.begin()
    return run


@pytest.mark.parametrize(
    ("settings", "cell", "expected_s"),
    [
        ({}, LIMITED, 60.0),  # ten times the 3 s without a limit, and 30 s more
        ({"timeout_s": 7.0}, LIMITED, 7.0),
        ({}, UNLIMITED.cell, 0.0),
        ({"within": None}, LIMITED, 0.0),
    ],
    ids=["in a search", "a time-out of its own", "without a limit", "no search"],
)
def test_a_command_that_starves_in_a_search_is_ended(
    settings: dict[str, Any], cell: Cell, expected_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = Mock(return_value=Measured(UNLIMITED))
    monkeypatch.setattr(commands, "measure", measure)
    commands.take(searching(**{"timeout_s": 0.0} | settings), Progress(), {}, Planned(cell), {})
    assert measure.call_args.args[1].settings.timeout_s == expected_s


def test_a_cell_of_a_search_for_survival_is_compared_with_the_same_one_without_a_limit() -> None:
    reference = Reference(3 * SECOND_NS, (757 + 200) * MIB)
    survives = searching(Aim.SURVIVES)
    assert survives.reference_for(LIMITED) == reference
    assert survives.reference_for(replace(LIMITED, repeat=2)) == reference
    assert survives.reference_for(UNLIMITED.cell) is None
    assert survives.reference_for(make_command("new.py", ram_limit_bytes=GIB)) is None
    assert searching(Aim.ENDS).reference_for(LIMITED) is None
    assert searching(Aim.SURVIVES, within=None).reference_for(LIMITED) is None


KILLED = "the kernel killed python (pid 1) for lack of memory: the"
AROUND = "/user.slice/run.scope"
ESCAPED = (
    "x (pid 1) left the cgroup, so the figures are of a part of it and its limit is not valid"
    " (--isolation process measures all processes); it ended with ok"
)


def killed_by(limit_of: str, limit_bytes: int | None = None) -> dict[str, Any]:
    place = "around" if limit_of.startswith("/") else ""
    kill = Kill(1, "python", True, limit_of, limit_bytes=limit_bytes, limit_is=place)
    return {"ended": Exit(None, signal=9), "oom_kills": 1, "machine_oom_kills": 1, "kills": [kill]}


@pytest.mark.parametrize(
    ("known", "outcome", "message"),
    [
        (killed_by(AROUND, 800 * MIB), "oom_killed", f"{KILLED} command reached the limit of 800.000 MiB of the outer cgroup {AROUND}"),
        (killed_by("/user.slice"), "oom_killed", f"{KILLED} command reached the limit of the outer cgroup /user.slice"),
        (killed_by("unknown"), "oom_killed", f"{KILLED} command reached its RAM limit of 600 MiB"),  # by the peak
        (killed_by("machine"), "oom_killed", f"{KILLED} machine had no memory left"),
        ({"ended": Exit(0), "oom_kills": 0, "machine_oom_kills": 1, "escape": "x (pid 1) left the cgroup"}, "measurement_failed", ESCAPED),
    ],
    ids=["around", "far around", "unknown", "machine", "escape"],
)  # fmt: skip
def test_the_message_names_the_limit_that_was_met(
    known: dict[str, Any], outcome: str, message: str
) -> None:
    """A command under 600 MiB in a scope of 800 MiB, whose first process was killed."""
    outer = [(800 * MIB, Path(f"/sys/fs/cgroup{AROUND}"))]
    cell = make_command(ram_limit_bytes=600 * MIB)
    told = judge(Evidence(cell=cell, peak_bytes=600 * MIB, limits=outer, **known))
    assert told == (outcome, message)
