"""A run that cannot go on: its records are kept, and its error says how to go on with it."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import fakes
import pytest
from factories import make_result
from fakes import JOB, KILLED, FakeRunning, done, loaded, ready, take

from weighin import child_process
from weighin.cli import app as cli
from weighin.errors import HarnessError, IsolationUnavailable, RecordError, StillRunning
from weighin.isolation import cgroup, process
from weighin.isolation.process import CgroupIsolation, ProcessIsolation, Started
from weighin.plan.task import Run
from weighin.probes import page_cache
from weighin.probes.cgroup import this_process
from weighin.records import run_folder
from weighin.result import Outcome, Sample
from weighin.run import measure as watch
from weighin.run.measure import Measured
from weighin.run.runner import resumable

SLEEPING = (sys.executable, "-c", "import time; time.sleep(1000)")
AGAIN = replace(make_result().cell, repeat=1)
SCRIPT = [fakes.baseline(), loaded(), ready(), done()]


@contextmanager
def files_of_at_most(size_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size: EFBIG, where a full disk says ENOSPC."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_record_that_finds_no_room_leaves_no_half_of_it(tmp_path: Path) -> None:
    run_folder.append(tmp_path, make_result())
    before = (tmp_path / run_folder.RECORDS).read_bytes()
    with files_of_at_most(len(before) + 100), pytest.raises(RecordError) as caught:
        run_folder.append(tmp_path, make_result(AGAIN))
    assert (tmp_path / run_folder.RECORDS).read_bytes() == before
    lost = make_result(AGAIN).cell.id
    assert caught.value.message == (
        f"cannot write {tmp_path / run_folder.RECORDS}: File too large;"
        f" the measurement of {lost} is lost"
    )


def test_samples_that_find_no_room_are_told_and_leave_nothing(tmp_path: Path) -> None:
    result = make_result(samples_path="samples/x.csv")
    (tmp_path / "samples").mkdir()
    measured = Measured(result, [Sample(*range(8))] * 1000)
    with files_of_at_most(1000), pytest.raises(RecordError) as caught:
        measured.finish(tmp_path)
    assert caught.value.message == (
        f"cannot write {tmp_path}/samples/x.csv: File too large; the record of its cell is kept"
    )
    assert list((tmp_path / "samples").iterdir()) == []


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


@pytest.fixture(autouse=True)
def no_page_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_cache, "drop", lambda _: 0)


@pytest.mark.parametrize(
    ("script", "outcome", "message"),
    [
        (SCRIPT, Outcome.OK, ""),
        (
            [fakes.begin("read"), TimeoutError],
            Outcome.TIMEOUT,
            "still running after 0.25 s, in phase 'read'",
        ),
    ],
)
def test_a_worker_that_does_not_die_has_its_result_and_then_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: list[Any],
    outcome: Outcome,
    message: str,
) -> None:
    monkeypatch.setattr(watch, "_PATIENCE_S", 0.01)
    trouble = StillRunning("process 5 does not end")
    isolation: Any = _Isolation(trouble, list(script), hangs=99)
    measured = take(isolation, JOB, [], None, {})
    assert (measured.result.outcome, measured.result.message) == (outcome, message)
    assert (
        "the measured process was still running when this was recorded: SIGKILL did not end it"
        in (measured.result.warnings)
    )
    with pytest.raises(StillRunning):
        measured.finish(tmp_path)
    assert trouble.exit_code == 4


def test_an_engine_that_is_gone_when_a_container_is_removed_costs_no_result(tmp_path: Path) -> None:
    isolation: Any = _Isolation(IsolationUnavailable("no engine"), list(SCRIPT), hangs=0)
    measured = take(isolation, JOB, [], None, {})
    assert measured.result.outcome is Outcome.OK
    with pytest.raises(IsolationUnavailable):
        measured.finish(tmp_path)


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
    for group in [path for root in _groups() for path in root.glob(f"weighin.{this_process()}.*")]:
        with suppress(OSError):
            group.rmdir()


def _groups() -> list[Path]:
    with suppress(IsolationUnavailable):
        return cgroup.roots()
    return []


@pytest.mark.usefixtures("deathless")
def test_closing_a_worker_that_does_not_die_ends_and_says_so() -> None:
    running = Started(SLEEPING)
    with pytest.raises(StillRunning) as caught:
        running.close()
    assert str(caught.value) == (
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
    while not (groups[0] / "cgroup.procs").read_text():
        pass
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
    before = error.repair
    with pytest.raises(HarnessError), resumable("bench", Run(tmp_path, [], ProcessIsolation())):
        raise error
    assert error.repair == before, "there is nothing to go on with"
    run_folder.append(tmp_path, make_result())
    for _ in range(2):
        with pytest.raises(HarnessError), resumable("floor", Run(tmp_path, [], ProcessIsolation())):
            raise error
    again = f"resume: weighin floor --resume {tmp_path}"
    assert error.repair == (f"{before}; then {again}" if before else again)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device", "/x/y"),
            "/x/y: No space left on device\n"
            "free some space there, or set TMPDIR or WEIGHIN_CACHE to a folder on another disk",
        ),
        (
            PermissionError(errno.EACCES, "Permission denied", "/x y"),
            "/x y: Permission denied\nrun ls -ld '/x y' to see who owns it",
        ),
        (
            OSError(errno.EMFILE, "Too many open files"),
            "the operating system refused: Too many open files\n"
            "allow more open files: ulimit -n 4096",
        ),
        (
            OSError("odd"),
            "the operating system refused: odd\nrun weighin doctor to see what works on this machine",
        ),
    ],
)
def test_an_os_error_that_nobody_expected_is_two_lines_and_exit_code_2(
    error: OSError,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def app(**_: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)
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
    assert (ended.returncode, ended.stderr) == (
        2,
        "error: the operating system refused: No space left on device\n"
        "free some space there, or set TMPDIR or WEIGHIN_CACHE to a folder on another disk\n",
    )
