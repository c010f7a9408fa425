"""A run that cannot go on: its records are kept, and its error says how to go on with it."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import fakes
import pytest
from factories import make_result, refused, run_of
from fakes import JOB, KILLED, FakeRunning, done, loaded, ready, take
from leftovers import wait_until

from weighin import child_process
from weighin.cli import app as cli
from weighin.errors import HarnessError, IsolationUnavailable, RecordError, StillRunning
from weighin.isolation import cgroup, process
from weighin.isolation.process import CgroupIsolation, ProcessIsolation, Started
from weighin.plan.task import Run
from weighin.probes import page_cache
from weighin.probes.cgroup import this_process
from weighin.result import Outcome
from weighin.run import measure as watch
from weighin.run.runner import resumable

SLEEPING = (sys.executable, "-c", "import time; time.sleep(1000)")
SCRIPT = [fakes.baseline(), loaded(), ready(), done()]


class _Isolation:
    """Starts a worker whose end nobody sees, and whose removal fails."""

    name, limits = "process", False

    def __init__(self, trouble: HarnessError, script: list[Any], hangs: int) -> None:
        self._trouble, self._script, self._hangs = trouble, script, hangs

    def start(self, *_: Any) -> Any:
        trouble = self._trouble

        class Running(FakeRunning):
            def close(self) -> None:
                super().close()
                raise trouble

        return Running(self._script, KILLED, hangs=self._hangs)


STAYS = "the measured process was still running when this was recorded: SIGKILL did not end it"


@pytest.mark.parametrize(
    ("script", "hangs", "trouble", "outcome", "message"),
    [
        (SCRIPT, 99, StillRunning("process 5 does not end"), Outcome.OK, ""),
        (
            [fakes.begin("read"), TimeoutError], 99, StillRunning("process 5 does not end"),
            Outcome.TIMEOUT, "still running after 0.25 s, in phase 'read'",
        ),
        (SCRIPT, 0, IsolationUnavailable("no engine"), Outcome.OK, ""),
    ],
    ids=["it does not die", "it does not die when its time is over", "the engine is gone"],
)  # fmt: skip
def test_a_worker_that_cannot_be_removed_has_its_result_and_then_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: list[Any],
    hangs: int,
    trouble: HarnessError,
    outcome: Outcome,
    message: str,
) -> None:
    monkeypatch.setattr(page_cache, "drop", lambda _: 0)
    monkeypatch.setattr(watch, "_PATIENCE_S", 0.01)
    isolation: Any = _Isolation(trouble, list(script), hangs)
    measured = take(isolation, JOB, [], None, {})
    assert (measured.result.outcome, measured.result.message) == (outcome, message)
    assert (STAYS in measured.result.warnings) == (hangs > 0)
    with pytest.raises(type(trouble)) as caught:
        measured.finish(tmp_path)
    assert caught.value.exit_code == (4 if hangs else 3)


@pytest.fixture
def deathless(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Signals that have no effect, as on a process in uninterruptible sleep."""
    kill = os.kill
    monkeypatch.setattr(os, "kill", lambda *_: None)
    monkeypatch.setattr(os, "killpg", lambda *_: None)
    monkeypatch.setattr(cgroup, "kill_members", lambda _: None)
    monkeypatch.setattr(child_process, "PATIENCE_S", 0.1)
    monkeypatch.setattr(cgroup, "PATIENCE_S", 0.1)
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def noting(*arguments: Any, **named: Any) -> Any:
        started.append(popen(*arguments, **named))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", noting)
    yield
    monkeypatch.setattr(os, "kill", kill)
    for one in started:
        one.kill()
        one.wait()
    with suppress(IsolationUnavailable):
        for group in [one for root in cgroup.roots() for one in root.glob(f"weighin.{this_process()}.*")]:  # fmt: skip
            with suppress(OSError):
                group.rmdir()


@pytest.mark.usefixtures("deathless")
def test_closing_a_worker_that_does_not_die_ends_and_says_so() -> None:
    running = Started(SLEEPING)
    assert refused(running.close) == (
        f"the measured process {running.pid} does not end, not even after SIGKILL\nthe process"
        " waits in the kernel, for example for a disk or a network share that does not answer:"
        " repair the disk or share, or restart the machine"
    )


@pytest.mark.cgroup
@pytest.mark.usefixtures("deathless")
def test_a_cgroup_whose_worker_does_not_die_stays_and_a_later_run_is_not_stopped_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    groups = cgroup.make()
    running = Started(SLEEPING, groups=groups)
    wait_until((groups[0] / "cgroup.procs").read_text, "the worker did not enter its cgroup")
    with pytest.raises(StillRunning):
        running.close()
    assert groups[0].exists()
    monkeypatch.setattr(process, "is_left_behind", groups[0].name.endswith)
    assert f"cgroup {groups[0]}" not in CgroupIsolation().remove_stale()


@pytest.mark.parametrize(
    "error", [RecordError("full", "free"), IsolationUnavailable("gone"), StillRunning("x")]
)
def test_what_stops_a_run_that_has_records_says_how_to_go_on(
    tmp_path: Path, error: HarnessError
) -> None:
    def stop(verb: str) -> None:
        with resumable(verb, Run(tmp_path, [], ProcessIsolation())):
            raise error

    before = error.repair
    refused(stop, "bench")
    assert error.repair == before, "there is nothing to go on with"
    run_of(tmp_path, make_result())
    for _ in range(2):
        refused(stop, "floor")
    again = f"resume: weighin floor --resume {tmp_path}"
    assert error.repair == (f"{before}; then {again}" if before else again)


REFUSED = "the operating system refused"
NO_ROOM = "free some space there, or set TMPDIR or WEIGHIN_CACHE to a folder on another disk"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), f"/x/y: No space left on device\n{NO_ROOM}"),
        (PermissionError(errno.EACCES, "Permission denied", "/x y"), "/x y: Permission denied\nrun ls -ld '/x y' to see who owns it"),
        (OSError(errno.EMFILE, "Too many open files"), f"{REFUSED}: Too many open files\nallow more open files: ulimit -n 4096"),
        (OSError("odd"), f"{REFUSED}: odd\nrun weighin doctor to see what works on this machine"),
    ],
)  # fmt: skip
def test_an_os_error_that_nobody_expected_is_two_lines_and_exit_code_2(
    error: OSError, text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "app", Mock(side_effect=error))
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert (caught.value.code, capsys.readouterr().err) == (2, f"error: {text}\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_is_full_is_an_error_without_a_traceback(unbuffered: str) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "weighin", "list"],
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    said = f"error: {REFUSED}: No space left on device\n{NO_ROOM}\n"
    assert (ended.returncode, ended.stderr) == (2, said)
