"""Runs that end early: by Ctrl-C, by SIGTERM, by kill -9. Nothing stays, nothing is lost or run twice.

The second of three cells waits for its file's mode to change: so long the run is in its midst. The
mode is all that a container sees of a change: of a strategy, it has the file alone.
"""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import leftovers
import pytest
from commands import NOT_LIMITED, CommandLine, Started
from nightly import isolations

from weighin.units import MIB

PAUSING = '''"""Wait while this file is marked as a program, then load rightly."""

import time
from pathlib import Path

import torch


def load_rightly(job):
    model = job.build_model()
    model.load_state_dict(torch.load(job.checkpoint, weights_only=True))
    return model


def load(job):
    with job.phase("pause"):
        while Path(__file__).stat().st_mode & 0o100:
            time.sleep(0.01)
    return load_rightly(job)
'''
CELLS = ["baseline", "pausing", "sequential"]


@pytest.fixture
def hold(command: CommandLine) -> Path:
    """The strategy of the second cell, which holds it up until ``let_go``."""
    folder = command.folder / "mine"
    folder.mkdir()
    strategy = folder / "pausing.py"
    strategy.write_text(PAUSING)
    strategy.chmod(0o755)
    return strategy


def let_go(hold: Path) -> None:
    hold.chmod(0o644)


def start(command: CommandLine, isolation: str) -> Started:
    """Start a run of three cells; returns when the worker of the second one is at work."""
    started = command.start(
        *("bench", "gpt2-tiny", "--isolation", isolation, "--out", "my run"),
        *("--strategies", "baseline,mine/pausing.py,sequential"),
    )
    leftovers.wait_until(
        lambda: (
            started.process.poll() is not None
            or (len(measured(command)) == 1 and started.at_work())
        ),
        "the second cell did not begin",
        patience_s=120,
    )
    assert started.process.poll() is None, started.process.communicate()
    return started


def measured(command: CommandLine) -> list[str]:
    """Return the strategies that have a record, in the order of the records."""
    return [record["cell"]["strategy"] for record in command.records("my run")]


def assert_resumes(command: CommandLine, hold: Path) -> str:
    """Go on with the run and return what it said; every cell is then measured, and once."""
    let_go(hold)
    resumed = command.run("bench", "--resume", "my run")
    assert (resumed.code, resumed.left) == (0, [])
    assert measured(command) == CELLS
    assert {record["outcome"] for record in command.records("my run")} == {"ok"}
    return resumed.err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_before_its_first_record_leaves_no_folder(
    command: CommandLine, hold: Path, number: signal.Signals
) -> None:
    started = command.start(
        *("bench", "gpt2-tiny", "--isolation", "process", "--out", "my run"),
        *("--strategies", "mine/pausing.py"),
    )
    leftovers.wait_until(started.at_work, "the cell did not begin", patience_s=120)
    stopped = started.end(number)
    assert (stopped.code, stopped.left) == (130, [])
    assert not (command.folder / "my run").exists()
    assert "resume" not in stopped.err


@pytest.mark.slow
@pytest.mark.parametrize("isolation", isolations("docker"))
def test_a_run_that_was_killed_is_resumed_where_it_was(
    command: CommandLine, hold: Path, isolation: str
) -> None:
    started = start(command, isolation)
    killed = started.end(signal.SIGKILL)
    assert killed.code == -signal.SIGKILL
    leftovers.wait_until(
        lambda: leftovers.processes(started.mark) == [], "a worker outlived its parent"
    )
    said = assert_resumes(command, hold)
    assert started.left() == []
    if isolation == "cgroup":  # the empty group is all that is left, and the next run removes it
        assert "removed a leftover of a killed run: cgroup " in said


@pytest.mark.slow
@pytest.mark.parametrize("isolation", isolations("docker"))
def test_ctrl_c_leaves_nothing_and_says_how_to_go_on(
    command: CommandLine, hold: Path, isolation: str
) -> None:
    stopped = start(command, isolation).end(signal.SIGINT)
    assert (stopped.code, stopped.out, stopped.left) == (130, "", [])
    assert stopped.err.splitlines()[-2:] == [
        "error: stopped; nothing is left running; 1 of 3 cells measured",
        "resume it: weighin bench --resume 'my run'",
    ]
    assert measured(command) == CELLS[:1]


def test_sigterm_is_the_same_and_the_run_can_go_on(command: CommandLine, hold: Path) -> None:
    stopped = start(command, "process").end(signal.SIGTERM)
    assert (stopped.code, stopped.left) == (130, [])
    assert stopped.err.endswith(
        "error: stopped; nothing is left running; 1 of 3 cells measured\n"
        "resume it: weighin bench --resume 'my run'\n"
    )
    assert_resumes(command, hold)
    again = command.run("bench", "--resume", "my run")
    assert (again.code, again.left, measured(command)) == (0, [], CELLS)


def test_ctrl_c_while_a_checkpoint_is_made_leaves_nothing_half_made(
    command: CommandLine,
) -> None:
    cache = command.folder / "cache"
    started = command.start(
        *("bench", "gpt2-tiny", "-s", "baseline", "--isolation", "process", "--out", "run"),
        WEIGHIN_CACHE=str(cache),
    )
    assert started.process.stderr
    while started.process.stderr.readline() != "making the checkpoint of gpt2-tiny\n":
        assert started.process.poll() is None
    stopped = started.end(signal.SIGINT)
    assert (stopped.code, stopped.out, stopped.left) == (130, "", [])
    assert leftovers.processes(str(cache)) == []
    assert stopped.err == "error: stopped; nothing is left running\n"
    assert not (command.folder / "run").exists()
    made = [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert [path for path in made if path.name != "plans.sha256"] == []


def test_a_second_run_is_refused_while_one_measures(command: CommandLine, hold: Path) -> None:
    first = start(command, "process")
    second = command.run("bench", "tied-tiny", "--isolation", "process", "--out", "second")
    assert (second.code, second.out) == (4, "")
    assert second.err == (
        f"{NOT_LIMITED}error: another run is measuring on this machine\nwait for its end: weighin bench"
        " --set wait=true; parallel runs would distort each other's figures\n"
    )
    assert not (command.folder / "second").exists()
    waiting = command.start(
        *("bench", "tied-tiny", "--isolation", "process", "--out", "third", "--set", "wait=true")
    )
    line = "waiting for another run on this machine to end"
    assert waiting.process.stderr
    while waiting.process.stderr.readline() != f"{line}\n":
        assert waiting.process.poll() is None
    stopped = waiting.end(signal.SIGINT)
    assert (stopped.code, stopped.out) == (130, "")
    assert stopped.err == "error: stopped; nothing is left running\n"
    assert not (command.folder / "third").exists()
    let_go(hold)
    ended = first.end()
    assert (ended.code, ended.left, measured(command)) == (0, [], CELLS)


@pytest.mark.slow
def test_an_ordinary_user_without_docker_is_measured_and_told_that_nothing_was_limited(
    command: CommandLine,
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv (util-linux) is missing")
    home = command.folder / "home"
    home.mkdir()
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
    ended = command.run(
        *("bench", "gpt2-tiny", "--out", str(home / "run"), "-s", "baseline,streaming"),
        before=as_nobody,
        DOCKER_HOST="unix:///nonexistent",
        WEIGHIN_CACHE=str(home / "cache"),
        HOME=str(home),
    )
    assert (ended.code, ended.left) == (0, [])
    why, limited, *_ = ended.err.splitlines()
    assert why == (
        "note: isolation process: no Docker engine answers at unix:///nonexistent: No such"
        " file or directory; this user may not create memory cgroups"
    )
    assert f"{limited}\n" == NOT_LIMITED
    lines = (home / "run" / "records.jsonl").read_text().splitlines()
    results = [json.loads(line) for line in lines]
    assert [result["outcome"] for result in results] == ["ok", "ok"]
    assert {result["cell"]["isolation"] for result in results} == {"process"}
    assert all(result["peaks"]["rss_bytes"] > 100 * MIB for result in results)
    assert {result["cached_bytes_at_start"] for result in results} == {0}
    assert {path.stat().st_uid for path in home.rglob("*")} == {65534}
