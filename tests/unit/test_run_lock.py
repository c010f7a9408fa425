"""One lock for the machine: for all caches and all users."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from weighin.errors import HarnessError
from weighin.plan.task import Progress
from weighin.probes.cgroup import LOCK_VARIABLE
from weighin.run import runner

HOLDS = (
    "from weighin.run.runner import only_run\nwith only_run(): print('held', flush=True); input()"
)


def held(path: Path | None, **settings: str) -> subprocess.Popen[str]:
    """Start a process that holds the lock, and return once it does."""
    variables = os.environ | settings | ({LOCK_VARIABLE: str(path)} if path else {})
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        env=variables,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    assert process.stdout.readline() == "held\n"
    return process


def test_two_caches_share_one_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LOCK_VARIABLE, str(path := tmp_path / "lock"))
    first = held(path, WEIGHIN_CACHE=str(tmp_path / "one"))
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "two"))
    with pytest.raises(HarnessError) as caught, runner.only_run():
        pytest.fail("both measured")
    assert caught.value.exit_code == 4
    assert str(caught.value) == (
        "another run is measuring on this machine\nwait for its end: weighin bench --set wait=true;"
        " parallel runs would distort each other's figures"
    )
    first.communicate("\n")
    with runner.only_run():
        pass


def test_a_run_waits_for_another_one_that_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "lock"))
    first = held(tmp_path / "lock")
    said = []

    def waiting(what: str, _: float | None) -> None:
        said.append(what)
        first.kill()  # the lock goes with its process

    with runner.only_run(30, Progress(preparing=waiting)):
        pass
    first.communicate()
    assert said == ["waiting for another run on this machine to end"]


def test_a_run_that_is_told_of_another_lock_waits_for_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = held(tmp_path / "lock")
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "other"))
    with runner.only_run():
        pass
    first.communicate("\n")
