"""A run that cannot go on: its records are kept, and its error says how to go on with it."""

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
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
from weighin.run import measure as watch
from weighin.run.runner import resumable

SLEEPING = ("sleep", "600")
SCRIPT = [fakes.baseline(), loaded(), ready(), done()]


STAYS = "the measured process was still running when this was recorded: SIGKILL did not end it"
LATE = "still running after 0.25 s, in phase 'read'"


LASTS, NO_ENGINE = StillRunning("process 5 does not end"), IsolationUnavailable("no engine")
STUCK: dict[str, tuple[list[Any], int, HarnessError, tuple[str, str], int]] = {
    "it does not die": (SCRIPT, 99, LASTS, ("ok", ""), 4),
    "it does not die when its time is over": ([fakes.begin("read"), TimeoutError], 99, LASTS, ("timeout", LATE), 4),
    "the engine is gone": (SCRIPT, 0, NO_ENGINE, ("ok", ""), 3),
}  # fmt: skip


@pytest.mark.parametrize("name", STUCK)
def test_a_worker_that_cannot_be_removed_has_its_result_and_then_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script, hangs, trouble, told, exit_code = STUCK[name]
    monkeypatch.setattr(page_cache, "drop", lambda _: 0)
    monkeypatch.setattr(watch, "_PATIENCE_S", 0.01)
    running: Any = FakeRunning(script, KILLED, hangs=hangs)
    running.close = Mock(side_effect=trouble)
    isolation = SimpleNamespace(name="process", limits=False, start=lambda *_: running)
    measured = take(isolation, JOB, [], None, {})
    assert (measured.result.outcome, measured.result.message) == told
    assert (STAYS in measured.result.warnings) == (hangs > 0)
    with pytest.raises(type(trouble)) as caught:
        measured.finish(tmp_path)
    assert caught.value.exit_code == exit_code


@pytest.fixture
def deathless(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Signals have no effect, as on a process in uninterruptible sleep; these groups are removed at the end."""
    groups: list[Path] = []
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def noting(*arguments: Any, **named: Any) -> Any:
        started.append(popen(*arguments, **named))
        return started[-1]

    with monkeypatch.context() as patch:
        for module, name in ((os, "kill"), (os, "killpg"), (cgroup, "kill_members")):
            patch.setattr(module, name, lambda *_: None)
        for module in (child_process, cgroup):
            patch.setattr(module, "PATIENCE_S", 0.1)
        patch.setattr(subprocess, "Popen", noting)
        yield groups
    for one in started:
        one.kill()
        one.wait()
    cgroup.remove(groups)


@pytest.mark.usefixtures("deathless")
def test_closing_a_worker_that_does_not_die_ends_and_says_so() -> None:
    running = Started(SLEEPING)
    assert refused(running.close) == (
        f"the measured process {running.pid} does not end, not even after SIGKILL\nthe process"
        " waits in the kernel, for example for a disk or a network share that does not answer:"
        " repair the disk or share, or restart the machine"
    )


@pytest.mark.cgroup
def test_a_cgroup_whose_worker_does_not_die_stays_and_a_later_run_is_not_stopped_by_it(
    deathless: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    deathless += (groups := cgroup.make())
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
