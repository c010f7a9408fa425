"""Each script dies under its limit, for lack of memory and at its line, without weighin."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
from again import READ_LATE, tried_again
from cells import GIB, MIB, Group, new_group
from dying_commands import DYING, Cause, Dying, empty, inputs
from nightly import by_day

pytestmark = pytest.mark.cgroup

__all__ = ["inputs"]  # a fixture

PATIENCE_S = 300  # the longest script computes for some ten seconds, and this machine may be busy

QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}

ALARM = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR1)
"""
"""A sitecustomize.py: Python then prints its stack on a signal, without running Python code."""


@pytest.fixture
def group() -> Iterator[Group]:
    with new_group() as made:
        yield made


def run(case: Dying, inputs: Mapping[str, Path], group: Group) -> tuple[int, str, int]:
    """Return the script's exit code and errors, and how many processes the kernel has killed."""
    case.prepare(inputs)
    with group.start(case.command(inputs), **QUIET) as process:
        errors = process.communicate(timeout=PATIENCE_S)[1].decode()
    empty(inputs)
    return process.returncode, errors, group.oom_kills()


def wait_at_limit(process: subprocess.Popen[bytes], group: Group, near_bytes: int) -> None:
    """Return when a process of the group waits for memory, or the group has ``near_bytes``."""
    deadline, control = monotonic() + PATIENCE_S, group.path / "memory.oom_control"
    while process.poll() is None and "under_oom 1" not in control.read_text():
        assert monotonic() < deadline, "the script does not meet its limit"
        if group.stat()["rss"] > near_bytes:
            return
        sleep(0.002)


@pytest.mark.parametrize("case", by_day(DYING, *DYING[::4]), ids=lambda case: case.script)
def test_a_script_dies_under_its_limit_and_only_there(
    case: Dying, inputs: Mapping[str, Path], group: Group
) -> None:
    group.limit(2 * GIB)
    assert run(case, inputs, group) == (0, "", 0)
    group.limit(case.tightest_bytes)
    code, _, oom_kills = run(case, inputs, group)
    assert bool(oom_kills) == case.dies
    if case.cause is not Cause.COPY_ON_WRITE:  # the kernel kills the parent or a worker
        assert bool(code) == case.dies


WAITING = [case for case in DYING if case.dies and case.cause is not Cause.SHARED]
"""Scripts that wait at their limit: a write to a tmpfs gets an error there, and ends the script."""


@pytest.mark.parametrize("case", by_day(WAITING, *WAITING[1::4]), ids=lambda case: case.script)
@tried_again(READ_LATE)
def test_a_script_meets_its_limit_at_its_line(
    case: Dying, inputs: Mapping[str, Path], group: Group, tmp_path: Path
) -> None:
    control = group.path / "memory.oom_control"
    if not control.exists():
        pytest.skip("only cgroup v1 can let a process wait at its limit (memory.oom_control)")
    (tmp_path / "sitecustomize.py").write_text(ALARM)
    group.limit(case.tightest_bytes)
    case.prepare(inputs)
    control.write_text("1")  # whoever meets the limit waits, or gets an error from a system call
    variables = os.environ | {"PYTHONPATH": str(tmp_path)}
    process = group.start(case.command(inputs), env=variables, **QUIET)
    with ExitStack() as stack:
        stack.enter_context(process)
        stack.callback(process.kill)  # one that waits at its limit would never end
        # A system call does not wait at the limit, but fails: one long call is met before it.
        margin_bytes = 64 * MIB if case.cause is Cause.READ else 0
        wait_at_limit(process, group, case.tightest_bytes - margin_bytes)
        for pid in (group.path / "cgroup.procs").read_text().split():
            os.kill(int(pid), signal.SIGUSR1)
            sleep(0.2)  # their stacks must not mix
        group.lift()
        errors = process.communicate(timeout=PATIENCE_S)[1].decode()
    empty(inputs)
    stacks = {f"{name}:{line}" for name, line in re.findall(r'([^/"]+\.py)", line (\d+)', errors)}
    called = {line.place for line in case.marked() if line.calls}
    assert stacks & ({line.place for line in case.marked()} - called), errors
    assert not called or stacks & called, errors
