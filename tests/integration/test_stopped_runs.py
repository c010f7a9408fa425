"""Runs that end early: by Ctrl-C, by SIGTERM, by kill -9. Nothing stays, nothing is lost or run twice.

The second of three cells waits, until it is let go: so long the run is in its midst.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from datetime import datetime, timedelta
from typing import Any

import leftovers
import pytest
from nightly import isolations
from typed import CommandLine, Started

from weighin.units import MIB

CELLS = ["baseline", "pausing", "sequential"]
RUN = "bench gpt2-tiny --out 'my run' -s baseline,./pausing.py,sequential --isolation"
SAID = [
    "error: stopped; nothing is left running; 1 of 3 cells measured",
    "resume it: weighin bench --resume 'my run'",
]


def measured(command: CommandLine) -> list[str]:
    """Return the strategies that have a record, in the order of the records."""
    return [record["cell"]["strategy"] for record in command.records("my run")]


def assert_resumes(command: CommandLine) -> str:
    """Go on with the run and return what it said; every cell is then measured, and once."""
    command.let_go()
    resumed = command.run("bench --resume 'my run'")
    assert (resumed.code, resumed.left) == (0, [])
    assert measured(command) == CELLS
    assert {record["outcome"] for record in command.records("my run")} == {"ok"}
    return resumed.err


@pytest.mark.slow
@pytest.mark.parametrize("isolation", isolations("docker"))
def test_a_run_that_was_killed_is_resumed_where_it_was(
    command: CommandLine, isolation: str
) -> None:
    started = command.hold(f"{RUN} {isolation}", records=1)
    assert started.end(signal.SIGKILL).code == -signal.SIGKILL
    leftovers.wait_until(
        lambda: leftovers.processes(started.mark) == [], "a worker outlived its parent"
    )
    said = assert_resumes(command)
    assert started.left() == []
    if isolation == "cgroup":  # the empty group is all that is left, and the next run removes it
        assert "removed a leftover of a killed run: cgroup " in said


@pytest.mark.slow
@pytest.mark.parametrize("isolation", isolations("docker"))
def test_ctrl_c_leaves_nothing_and_says_how_to_go_on(command: CommandLine, isolation: str) -> None:
    stopped = command.hold(f"{RUN} {isolation}", records=1).end(signal.SIGINT)
    assert (stopped.code, stopped.out, stopped.left) == (130, "", [])
    assert stopped.err.splitlines()[-2:] == SAID
    assert measured(command) == CELLS[:1]


def test_sigterm_is_the_same_and_the_run_can_go_on(command: CommandLine) -> None:
    stopped = command.hold(f"{RUN} process", records=1).end(signal.SIGTERM)
    assert (stopped.code, stopped.left) == (130, [])
    assert stopped.err.splitlines()[-2:] == SAID
    checked = command.run("check 'my run' --budget 'peak_rss <= 100GiB'")
    assert (checked.code, "my run: 1 of 3 cells measured" in checked.err) == (1, True)
    assert_resumes(command)
    again = command.run("bench --resume 'my run'")
    assert (again.code, again.left, measured(command)) == (0, [], CELLS)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_before_its_first_record_leaves_no_folder(
    command: CommandLine, number: signal.Signals
) -> None:
    first = "bench gpt2-tiny --out 'my run' -s ./pausing.py --isolation process"
    stopped = command.hold(first).end(number)
    assert (stopped.code, stopped.left) == (130, [])
    assert not (command.folder / "my run").exists()
    assert "resume" not in stopped.err


def read_until(started: Started, line: str) -> None:
    assert started.process.stderr
    while started.process.stderr.readline() != line:
        assert started.process.poll() is None


def test_ctrl_c_while_a_checkpoint_is_made_leaves_nothing_half_made(command: CommandLine) -> None:
    cache = command.folder / "cache"
    bench = "bench gpt2-tiny -s baseline --isolation process --out run"
    started = command.start(bench, WEIGHIN_CACHE=str(cache))
    read_until(started, "making the checkpoint of gpt2-tiny\n")
    stopped = started.end(signal.SIGINT)
    assert (stopped.code, stopped.out, stopped.left) == (130, "", [])
    # The process that makes it, if it had just been started, ends by itself.
    leftovers.wait_until(lambda: leftovers.processes(str(cache)) == [], "a process stayed")
    assert stopped.err == "error: stopped; nothing is left running\n"
    assert not (command.folder / "run").exists()
    made = [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert [path for path in made if path.name != "plans.sha256"] == []


def test_a_second_run_is_refused_or_waits_while_one_measures(command: CommandLine) -> None:
    first = command.hold(f"{RUN} process", records=1)
    second = "bench tied-tiny --isolation process --out second"
    refused = command.run(second)
    assert (refused.code, refused.out) == (4, "")
    waiting = command.start(f"{second} --set wait=true")
    read_until(waiting, "waiting for another run on this machine to end\n")
    stopped = waiting.end(signal.SIGINT)
    assert (stopped.code, stopped.out) == (130, "")
    assert stopped.err == "error: stopped; nothing is left running\n"
    assert not (command.folder / "second").exists()
    command.let_go()
    ended = first.end()
    assert (ended.code, ended.left, measured(command)) == (0, [], CELLS)


IGNORES = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"


@pytest.mark.slow
@pytest.mark.parametrize("options", ["--use fork", "--ranks 2 --use none"])
def test_a_parent_that_ignores_the_end_of_its_children_stops_no_run(
    command: CommandLine, options: str
) -> None:
    bench = f"bench gpt2-tiny -s baseline --isolation process {options} --out run"
    ended = command.run(bench, before=(sys.executable, "-c", IGNORES))
    assert (ended.code, ended.left) == (0, []), ended.err
    assert command.record("run")["outcome"] == "ok"


@pytest.mark.slow
@pytest.mark.root
def test_an_ordinary_user_without_docker_is_measured_and_told_that_nothing_was_limited(
    command: CommandLine,
) -> None:
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv (util-linux) is missing")
    (home := command.folder / "home").mkdir()
    os.chown(home, 65534, 65534)
    # The right to read everything, and to write nothing: Python itself may lie in root's home.
    reading = "-all,+dac_read_search"
    as_nobody = (
        *("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"),
        *(f"--inh-caps={reading}", f"--ambient-caps={reading}", f"--bounding-set={reading}"),
    )
    probe = subprocess.run([*as_nobody, "true"], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"cannot become nobody here: {probe.stderr.strip()}")
    variables: dict[str, Any] = {"DOCKER_HOST": "unix:///nonexistent", "HOME": str(home)}
    variables |= {"WEIGHIN_CACHE": str(home / "cache")}
    bench = "bench gpt2-tiny --out home/run -s baseline,streaming"
    ended = command.run(bench, before=as_nobody, **variables)
    assert (ended.code, ended.left) == (0, [])
    assert ended.err.splitlines()[:2] == [
        "note: isolation process: no Docker engine answers at unix:///nonexistent: No such"
        " file or directory; this user may not create memory cgroups",
        "note: this run has no RAM limit: weighin measures peaks, but only a run with --ram shows"
        " whether a strategy fits",
    ]
    found = command.records("home/run")
    assert [(one["outcome"], one["cell"]["isolation"]) for one in found] == [("ok", "process")] * 2
    assert all(one["peaks"]["rss_bytes"] > 100 * MIB for one in found)
    assert {one["cached_bytes_at_start"] for one in found} == {0}
    assert {path.stat().st_uid for path in home.rglob("*")} == {65534}


TWO_AT_ONCE = "--isolation cgroup --set jobs=2 --out run"


def two_at_once(command: CommandLine) -> Started:
    """Start four cells, two at once, and return when two workers wait."""
    return command.hold(
        f"bench gpt2-tiny --ram 1g,900m -s streaming,./pausing.py {TWO_AT_ONCE}",
        records=2,
        at_work=lambda started: len(started.workers()) == 2,
    )


@pytest.mark.cgroup
@pytest.mark.slow
def test_two_cells_run_at_once_and_their_records_say_so(command: CommandLine) -> None:
    started = two_at_once(command)
    command.let_go()
    ended = started.end()
    assert (ended.code, ended.left) == (0, []), ended.err
    found = command.records("run")
    assert [record["outcome"] for record in found] == ["ok"] * 4
    first, second = found[2:]  # both had begun when the first of them ended
    begun = datetime.fromisoformat(second["started_at"])
    took = timedelta(microseconds=first["cost"]["wall_ns"] / 1000)
    assert begun < datetime.fromisoformat(first["started_at"]) + took
    for record in found:
        assert record["environment"]["concurrent_cells"] == 2
        assert record["warnings"] == ["up to 2 cells ran at once (jobs): times are not comparable"]
        assert record["cached_bytes_at_start"] == 0
        assert (command.folder / "run" / record["samples_path"]).stat().st_size > 100
    assert not [*command.cache.glob("jobs*")]


@pytest.mark.cgroup
@pytest.mark.slow
def test_the_ranks_of_two_cells_that_run_at_once_have_their_own_samples(
    command: CommandLine,
) -> None:
    bench = "bench gpt2-tiny --ranks 2 --ram 1200m -s streaming,baseline"
    ended = command.run(f"{bench} {TWO_AT_ONCE}")
    assert (ended.code, ended.left) == (0, []), ended.err
    found = command.records("run")
    assert [(one["outcome"], len(one["ranks"])) for one in found] == [("ok", 2)] * 2
    paths = [rank["samples_path"] for one in found for rank in one["ranks"]]
    paths += [one["samples_path"] for one in found]
    there = (command.folder / "run" / "samples").iterdir()
    assert sorted(paths) == sorted(f"samples/{path.name}" for path in there)


@pytest.mark.cgroup
@pytest.mark.slow
def test_ctrl_c_ends_all_cells_that_run_at_once_and_the_run_can_go_on(command: CommandLine) -> None:
    stopped = two_at_once(command).end(signal.SIGINT)
    assert (stopped.code, stopped.left) == (130, []), stopped.err
    assert "2 of 4 cells measured" in stopped.err
    assert not [*command.cache.glob("jobs*")]
    command.let_go()
    ended = command.run("bench --resume run")
    assert (ended.code, ended.left) == (0, [])
    cells = [json.dumps(one["cell"], sort_keys=True) for one in command.records("run")]
    assert len(set(cells)) == len(cells) == 4
