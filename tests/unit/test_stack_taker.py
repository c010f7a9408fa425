"""When and how py-spy is run on a command's processes, and what is said where it cannot be."""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_trees import command
from leftovers import wait_until

from weighin.isolation import cgroup
from weighin.probes import stacks
from weighin.probes.cgroup import pids_in
from weighin.probes.stacks import StackTaker
from weighin.units import MIB

pytestmark = pytest.mark.cgroup


@pytest.fixture
def groups() -> Iterator[list[Path]]:
    made = cgroup._make_groups()
    try:
        yield made
    finally:
        cgroup._remove(made)


def test_py_spy_is_run_once_only_on_a_program_that_is_not_python(
    groups: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with command('step("started")') as one:
        one.reach("started")
        sleepers = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
        for group in groups:
            for pid in (one.pid, sleepers[0].pid):
                (group / "cgroup.procs").write_text(str(pid))
        asked: list[str] = []
        real = subprocess.Popen

        def popen(arguments: list[str], **options: object) -> object:
            asked.append(arguments[-1])
            return real(arguments, **options)  # type: ignore[call-overload]

        monkeypatch.setattr(subprocess, "Popen", popen)
        taker = StackTaker(lambda: pids_in(groups[0]), groups[0], share=1.0)
        for number in (1, 2, 3):
            taker.look(number, number * 100 * MIB)
            time.sleep(0.5)
            for group in groups:
                (group / "cgroup.procs").write_text(str(sleepers[1].pid))
        monkeypatch.undo()
        assert [asked.count(str(sleeping.pid)) for sleeping in sleepers] == [1, 0]
        assert asked.count(str(one.pid)) == 3
        assert [stack.t_ns for stack in taker.stacks] == [1, 2, 3]
        for sleeping in sleepers:
            sleeping.kill()
            sleeping.wait()


def test_a_process_that_ends_in_between_leaves_no_stack() -> None:
    with command('step("started")') as one:
        one.reach("started")
        taker = StackTaker(lambda: [one.pid, 2**22 - 1])
        one.go()
        one.process.wait(60)
        taker.look(1, 100 * MIB)
        assert taker.stacks == ()
        assert taker.why == "no Python process used more memory than before"


def test_a_process_goes_on_after_its_stack_was_read() -> None:
    with command('step("started")') as one:
        one.reach("started")
        taker = StackTaker(lambda: [one.pid])
        taker.look(7, 100 * MIB)
        (stack,) = taker.stacks
        assert (stack.t_ns, stack.pid, stack.usage_bytes) == (7, one.pid, 100 * MIB)
        assert stack.frames[0].startswith("step (<string>:")
        one.process.stdin.close()  # type: ignore[union-attr]
        wait_until(lambda: one.process.poll() == 0, "the program did not go on")


def test_a_py_spy_that_does_not_start_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_find_program", lambda: "/nonexistent/py-spy")
    with command('step("started")') as one:
        one.reach("started")
        taker = StackTaker(lambda: [one.pid])
        taker.look(1, 100 * MIB)
    assert taker.why == "py-spy does not start: No such file or directory"


def test_without_py_spy_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stacks, "_find_program", lambda: None)
    taker = StackTaker(list)
    taker.look(1, 100 * MIB)
    assert taker.stacks == ()
    assert taker.why.startswith("py-spy is not installed: pip install ")
    assert "stacks" in taker.why
