"""``wait`` of bench and floor: a run that waits for another one's end, and one that does not."""

import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from weighin.cli import app
from weighin.errors import HarnessError
from weighin.isolation.process import CgroupIsolation
from weighin.probes.cgroup import LOCK_VARIABLE, lock_suffix
from weighin.run import loads, runner


class LockIsFree(Exception):
    """The run has the lock, and would measure now."""


VERBS = {
    "bench": ("bench", "gpt2-tiny", "--isolation", "process", "--out", "run"),
    "floor": ("floor", "gpt2-tiny", "--isolation", "cgroup", "--out", "run"),
}


@pytest.fixture(autouse=True)
def _short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop() -> None:
        raise LockIsFree

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "lock"))
    monkeypatch.setattr(loads, "compile_code", stop)
    monkeypatch.setattr(CgroupIsolation, "check", lambda _: None)


def typed(verb: str, *more: str) -> Any:
    return CliRunner().invoke(app.app, [*VERBS[verb], *more])


@pytest.mark.parametrize("verb", VERBS)
def test_a_second_run_ends_at_once_with_exit_code_4(verb: str) -> None:
    with runner.only_run():
        result = typed(verb)
    assert isinstance(result.exception, HarnessError)
    assert result.exception.exit_code == 4
    assert not Path("run").exists()


@pytest.mark.parametrize("verb", ["bench", pytest.param("floor", marks=pytest.mark.cgroup)])
def test_with_wait_it_starts_when_the_first_has_ended(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_held, may_end, tries = threading.Event(), threading.Event(), list[int]()

    def end_first_after_a_try() -> str:
        if is_held.is_set():
            tries.append(1)
        if len(tries) > 1:
            may_end.set()  # not after a time, which a busy machine may need to come here
        return lock_suffix()

    monkeypatch.setattr(runner, "lock_suffix", end_first_after_a_try)

    def first() -> None:
        with runner.only_run():
            is_held.set()
            may_end.wait(30)

    thread = threading.Thread(target=first)
    thread.start()
    is_held.wait(30)
    result = typed(verb, "--set", "wait=true")
    thread.join(30)
    assert isinstance(result.exception, LockIsFree)
    assert "waiting for another run on this machine to end" in result.stderr.splitlines()


def test_a_run_that_is_resumed_can_wait_too() -> None:
    assert isinstance(typed("bench").exception, LockIsFree)
    with runner.only_run():
        result = CliRunner().invoke(app.app, ["bench", "--resume", "run"])
    assert isinstance(result.exception, HarnessError)
    result = CliRunner().invoke(app.app, ["bench", "--resume", "run", "--set", "wait=true"])
    assert isinstance(result.exception, LockIsFree)
