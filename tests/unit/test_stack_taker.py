"""When and how py-spy is run on a command's processes, and what is said where it cannot be."""

import contextlib
import ctypes
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from command_trees import command
from leftovers import wait_until

from weighin.probes.stacks import StackTaker
from weighin.units import MIB

pytestmark = pytest.mark.cgroup

# A parent that waits for the end of a vfork is in uninterruptible sleep. The child has its own memory.
_DISK_SLEEP = """
import ctypes, os, platform, time
call = ctypes.CDLL(None).syscall
number = {"x86_64": 56, "aarch64": 220}[platform.machine()]  # clone
def sleep_in_kernel():
    if call(number, 0x4000 | 17, 0, 0, 0, 0) == 0:  # CLONE_VFORK, SIGCHLD
        time.sleep(60)
        os._exit(0)
print("started", flush=True)
sleep_in_kernel()
"""
_PTRACE_SEIZE = 0x4206


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def look(taker: StackTaker, t_ns: int, usage_bytes: int) -> None:
    """Look, and wait for the end of the reading."""
    taker.look(t_ns, usage_bytes)
    taker.stacks  # noqa: B018


def test_a_process_goes_on_after_its_stack_was_read() -> None:
    with command('step("started")') as one:
        one.reach("started")
        taker = StackTaker(lambda: [one.pid])
        look(taker, 7, 100 * MIB)
        (stack,) = taker.stacks
        assert (stack.t_ns, stack.pid, stack.usage_bytes) == (7, one.pid, 100 * MIB)
        assert stack.frames[0].startswith("step (<string>:")
        one.process.stdin.close()  # type: ignore[union-attr]
        wait_until(lambda: one.process.poll() == 0, "the program did not go on")


def test_processes_in_uninterruptible_sleep_are_read_without_being_stopped() -> None:
    with contextlib.ExitStack() as ends:
        sleeping = [
            ends.enter_context(command(_DISK_SLEEP, start_new_session=True)) for _ in range(4)
        ]
        for one in sleeping:
            ends.callback(os.killpg, one.pid, signal.SIGKILL)  # its child, too
        for one in sleeping:
            one.reach("started")
            wait_until(lambda one=one: _state(one.pid) == "D", "no uninterruptible sleep")  # type: ignore[misc]
        taker = StackTaker(lambda: [one.pid for one in sleeping])
        start_s = time.monotonic()
        look(taker, 1, 100 * MIB)
        assert time.monotonic() - start_s < 2.9
        assert {stack.pid for stack in taker.stacks} == {one.pid for one in sleeping}
        assert all("sleep_in_kernel (<string>:" in stack.frames[0] for stack in taker.stacks)
        assert taker.why == ""


def test_a_process_that_another_program_traces_is_read_without_being_stopped() -> None:
    with command('step("started")') as one:
        one.reach("started")
        assert ctypes.CDLL(None).ptrace(_PTRACE_SEIZE, one.pid, None, None) == 0
        taker = StackTaker(lambda: [one.pid])
        look(taker, 1, 100 * MIB)
        (stack,) = taker.stacks
        assert stack.frames[0].startswith("step (<string>:")
        assert taker.why == ""


def test_without_py_spy_the_reason_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    taker = StackTaker(list)
    look(taker, 1, 100 * MIB)
    assert taker.stacks == ()
    assert taker.why.startswith("py-spy is not installed: pip install ")
    assert "stacks" in taker.why


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Put a script in the place of py-spy."""

    def place(script: str) -> None:
        program = tmp_path / "py-spy"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(shutil, "which", lambda *_, **__: str(program))

    return place


@pytest.mark.parametrize(
    ("script", "times"),
    [("echo no Python >&2", 1), ("echo Failed to suspend >&2", 2), ("exec sleep 9", 2)],
)
def test_only_a_process_that_does_not_stop_is_read_again(
    play: Callable[[str], None], tmp_path: Path, script: str, times: int
) -> None:
    play(f"echo $* >> {tmp_path}/asked; {script}")
    look(StackTaker(lambda: [os.getpid()]), 1, 100 * MIB)
    asked = (tmp_path / "asked").read_text().splitlines()
    assert ["--nonblocking" in each for each in asked] == [False, True][:times]


def test_an_answer_of_another_kind_ends_nothing(play: Callable[[str], None]) -> None:
    play("echo '{\"a\": 1}'")
    taker = StackTaker(lambda: [os.getpid()])
    look(taker, 1, 100 * MIB)
    assert taker.why.startswith("py-spy cannot read ")
    assert "TypeError" in taker.why
    assert taker.frozen_ns > 0
    look(taker, 2, 200 * MIB)
