"""When and how py-spy is run on a command's processes, what is said where it cannot be, and the code of a frame."""

import ctypes
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from command_trees import command
from leftovers import wait_until

from weighin.probes.stacks import StackTaker
from weighin.run.commands import code_of
from weighin.units import MIB

_PTRACE_SEIZE = 0x4206


# A parent that waits for the end of a vfork is in uninterruptible sleep. The child has its own memory.
_DISK_SLEEP = """
import ctypes, platform, time
number = {"x86_64": 56, "aarch64": 220}[platform.machine()]  # clone
def sleep_in_kernel():
    if ctypes.CDLL(None).syscall(number, 0x4000 | 17, 0, 0, 0, 0) == 0:  # CLONE_VFORK, SIGCHLD
        time.sleep(600)
print("started", flush=True)
sleep_in_kernel()
"""


def look(taker: StackTaker, t_ns: int, usage_bytes: int) -> None:
    """Look, and wait for the end of the reading."""
    taker.look(t_ns, usage_bytes)
    taker.stacks  # noqa: B018


@pytest.mark.cgroup
def test_a_process_that_another_program_traces_is_read_without_being_stopped() -> None:
    with command('step("started")') as one:
        one.reach("started")
        assert ctypes.CDLL(None).ptrace(_PTRACE_SEIZE, one.pid, None, None) == 0
        taker = StackTaker(lambda: [one.pid])
        look(taker, 1, 100 * MIB)
        (stack,) = taker.stacks
        assert stack.frames[0].startswith("step (<string>:")
        assert taker.why == ""


@pytest.mark.cgroup
def test_a_process_in_uninterruptible_sleep_is_read_without_being_stopped() -> None:
    with command(_DISK_SLEEP, start_new_session=True) as one, ExitStack() as ends:
        ends.callback(os.killpg, one.pid, signal.SIGKILL)  # its child, too
        one.reach("started")
        stat = Path(f"/proc/{one.pid}/stat")
        wait_until(lambda: ") D " in stat.read_text(), "no uninterruptible sleep")
        taker = StackTaker(lambda: [one.pid])
        look(taker, 1, 100 * MIB)
        assert ["sleep_in_kernel (" in stack.frames[0] for stack in taker.stacks] == [True]
        assert (taker.why, ") D " in stat.read_text()) == ("", True)


@pytest.mark.cgroup
def test_a_process_goes_on_after_its_stack_was_read() -> None:
    with command('step("started")') as one:
        one.reach("started")
        look(StackTaker(lambda: [one.pid]), 1, 100 * MIB)
        one.process.stdin.close()  # type: ignore[union-attr]
        wait_until(lambda: one.process.poll() == 0, "the program did not go on")


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
    [("echo no Python >&2", 1), ("echo Failed to suspend >&2", 2), ("exec sleep 600", 2)],
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


SOURCE = "import torch\nstate = torch.load(path)  # slow\n    model.load_state_dict(state)\n"


@pytest.mark.parametrize(
    ("frames", "code"),
    [
        (["load (HERE/site-packages/a.py:1)", "run (a.py:3)", "<module> (a.py:1)"], "model.load_state_dict(state)"),
        (["run (a.py:2)"], "state = torch.load(path)"),  # without its comment
        (["run (HERE/a.py:1)"], "import torch"),
        (["run (b.py:1)"], ""),
        (["run (a.py:99)"], ""),
        (["no frame"], ""),
        (["load (HERE/site-packages/a.py:1)"], ""),
        ([f"run ({'x' * 5000}:1)"], ""),  # no path can be so long
        (["run (.:1)"], ""),
    ],
)  # fmt: skip
def test_the_code_is_that_of_the_programs_own_innermost_line(
    tmp_path: Path, frames: list[str], code: str
) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    found = [frame.replace("HERE", str(tmp_path)) for frame in frames]
    assert code_of(found, str(tmp_path), time.time() + 60) == code


def test_a_file_that_was_written_after_the_start_may_be_another_version(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(SOURCE)
    os.utime(tmp_path / "a.py", (100, 100))
    codes = [code_of(["run (a.py:1)"], str(tmp_path), started_s) for started_s in (100.0, 99.9)]
    assert codes == ["import torch", ""]
