"""One lock for the machine: for all caches and all users."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from factories import refused

from weighin.plan.task import Progress
from weighin.probes.cgroup import LOCK_VARIABLE
from weighin.run import runner

HOLDS = (
    "from weighin.run.runner import only_run\nwith only_run(): print('held', flush=True); input()"
)


def measure(wait_s: float = 0, progress: Progress | None = None) -> None:
    with runner.only_run(wait_s, progress or Progress()):
        pass


def test_a_second_run_is_refused_or_waits_unless_it_is_told_of_another_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has a cache of its own; its lock goes with its killed process."""
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "lock"))
    said: list[str] = []
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS],
        env=os.environ | {"WEIGHIN_CACHE": str(tmp_path / "theirs")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as holder:

        def waiting(what: str, _: float | None) -> None:
            said.append(what)
            holder.kill()

        assert holder.stdout
        assert holder.stdout.readline() == "held\n"
        assert refused(measure).startswith("another run is measuring on this machine\n")
        with monkeypatch.context() as patch:
            patch.setenv(LOCK_VARIABLE, str(tmp_path / "other"))
            measure()
        measure(30, Progress(preparing=waiting))
    assert said == ["waiting for another run on this machine to end"]
