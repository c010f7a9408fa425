"""One lock for the machine: for all caches and all users."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from factories import refused

from weighin.plan.task import Progress
from weighin.probes.cgroup import LOCK_VARIABLE
from weighin.run import runner

HOLDS = (
    "from weighin.run.runner import only_run\nwith only_run(): print('held', flush=True); input()"
)


@pytest.fixture
def holder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock, with a cache of its own."""
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "lock"))
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "ours"))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        env=os.environ | {"WEIGHIN_CACHE": str(tmp_path / "theirs")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def measure(wait_s: float = 0, progress: Progress | None = None) -> None:
    with runner.only_run(wait_s, progress or Progress()):
        pass


@pytest.mark.usefixtures("holder")
def test_a_second_run_is_refused_unless_it_is_told_of_another_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(measure) == (
        "another run is measuring on this machine\nwait for its end: weighin bench --set wait=true;"
        " parallel runs would distort each other's figures"
    )
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "other"))
    measure()


def test_a_run_waits_for_another_one_and_the_lock_goes_with_its_killed_process(
    holder: subprocess.Popen[str],
) -> None:
    said = []

    def waiting(what: str, _: float | None) -> None:
        said.append(what)
        holder.kill()

    measure(30, Progress(preparing=waiting))
    assert said == ["waiting for another run on this machine to end"]
