"""``--disk``, ``disk_latency`` and ``storage`` on the command line, and what a killed run leaves."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import leftovers
import pytest
from typed import CommandLine, Ended, Started

PAUSING = '''"""Wait for longer than the test does."""

import time


def load(job):
    with job.phase("pause"):
        time.sleep(600)
'''
pytestmark = pytest.mark.fuse


@pytest.fixture
def paused(command: CommandLine) -> Iterator[Started]:
    with pause(command, "killed") as started:
        yield started


@contextmanager
def pause(command: CommandLine, out: str) -> Iterator[Started]:
    """Start a run whose cell has a slow disk and waits."""
    (command.folder / "pausing.py").write_text(PAUSING)
    started = command.start(
        *("bench", "gpt2-tiny", "--set", "disk_latency=20ms", "--isolation", "process"),
        *("--strategies", "./pausing.py", "--out", out),
    )
    try:
        leftovers.wait_until(
            lambda: started.process.poll() is not None or (started.workers() and mounts(started)),
            "the cell did not begin",
            patience_s=120,
        )
        assert started.process.poll() is None, started.process.communicate()
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


def mounts(started: Started) -> list[str]:
    return leftovers.mounts(started.process.pid)


def server_of(started: Started) -> int:
    """Return the process that answers the reads of a run's slow disk."""
    (server,) = (
        int(line.split()[0])
        for line in leftovers.processes(started.mark)
        if "weighin.slow_disk" in line
    )
    return server


@pytest.mark.slow
def test_a_killed_run_takes_its_slow_disk_with_it(paused: Started) -> None:
    paused.process.kill()
    leftovers.wait_until(lambda: not mounts(paused), "the disk stayed mounted")
    leftovers.wait_until(lambda: not leftovers.processes(paused.mark), "a process stayed")


def next_to_a_killed_run(command: CommandLine, *arguments: str, **environment: Any) -> Ended:
    """Run weighin beside the slow disk of a killed run, and return what it says about this disk.

    Any other run on this machine may be the next one and remove the disk first; then try again.
    """
    for attempt in range(5):
        with pause(command, f"killed-{attempt}") as paused:
            kill_all(paused)
            ended = command.run(*arguments, **environment)
            assert mounts(paused) == []
        if "slow disk at" in ended.out + ended.err:
            break
    return ended


def kill_all(paused: Started) -> None:
    """Kill the run and the process behind its disk, so that nobody is left to unmount it."""
    server = server_of(paused)
    os.kill(server, signal.SIGSTOP)
    paused.process.kill()
    paused.process.wait()
    os.kill(server, signal.SIGKILL)
    leftovers.wait_until(lambda: not leftovers.processes(paused.mark), "a process stayed")


@pytest.mark.slow
def test_the_next_run_unmounts_what_a_killed_one_left(command: CommandLine) -> None:
    ended = next_to_a_killed_run(
        command, "bench", "gpt2-tiny", "-s", "baseline", "--isolation", "process"
    )
    assert (ended.code, ended.left) == (0, [])
    assert "removed a leftover of a killed run: slow disk at " in ended.err
    assert list((command.cache / "disks").iterdir()) == []


@pytest.mark.slow
@pytest.mark.nightly
def test_doctor_unmounts_what_a_killed_run_left(command: CommandLine) -> None:
    ended = next_to_a_killed_run(
        command, "doctor", "--json", "-", DOCKER_HOST="unix:///nonexistent"
    )
    details = [one["detail"] for one in json.loads(ended.out)["capabilities"]]
    assert [text for text in details if text.startswith("removed: slow disk at ")], details


@pytest.mark.slow
def test_a_run_on_two_disks_is_recorded_with_its_storage(command: CommandLine) -> None:
    ended = command.run(
        *("bench", "gpt2-tiny", "--disk", "20MB/s", "--set", "disk_latency=4ms,none"),
        *("--set", "storage=slow storage", "--strategies", "streaming", "--isolation", "process"),
        *("--out", "run"),
    )
    assert (ended.code, ended.left) == (0, []), ended.err
    assert "gpt2-tiny streaming    disk=20MB/s, disk_latency=4ms  ok" in ended.err
    for record in command.records("run"):
        assert record["environment"]["disk"]["means"] == "fuse"
        assert record["environment"]["storage"]["file_system"]
    assert list((command.folder / "slow storage" / "models").iterdir())
    plan = json.loads((command.folder / "run" / "plan.json").read_text())
    assert Path(plan["settings"]["storage"]) == command.folder / "slow storage"
    again = command.run("bench", "--resume", "run")
    assert (again.code, again.left) == (0, [])


def test_a_machine_that_cannot_be_slow_says_why(command: CommandLine) -> None:
    without = "import sys; sys.modules['mfusepy'] = None"
    (command.folder / "sitecustomize.py").write_text(without)
    path = f"{command.folder}{os.pathsep}{command.environment['PYTHONPATH']}"
    ended = command.run(
        *("bench", "gpt2-tiny", "--set", "disk_latency=5ms", "-s", "baseline"),
        *("--isolation", "process", "--out", "run"),
        PYTHONPATH=path,
    )
    assert ended.code == 3
    assert (
        "error: weighin slows a disk down with FUSE, which does not work here: mfusepy is not"
        " installed\n"
    ) in ended.err
    assert not (command.folder / "run").exists()
