"""The line of a program at which its command used most memory, read from outside."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_trees import command
from leftovers import wait_until

from weighin.isolation import cgroup
from weighin.probes import stacks
from weighin.probes.cgroup import MemoryCgroup
from weighin.probes.command_sampler import CommandSampler
from weighin.probes.stacks import StackTaker
from weighin.result import Stack
from weighin.units import MIB

pytestmark = pytest.mark.cgroup

GROWING = """
import threading, sys, time
import mmap
def load(mib):
    held = []
    for _ in range(mib):
        piece = mmap.mmap(-1, 1 << 20)
        piece.write(b"1" * (1 << 20))  # the line
        held.append(piece)
        time.sleep(PAUSE_S)
    return held
def main():
    threading.Thread(target=time.sleep, args=(100,), name="waiting", daemon=True).start()
    print("started", flush=True)
    sys.stdin.readline()
    held = load(MIB)
    print("done", flush=True)
    sys.stdin.readline()
main()
"""
LINE = 1 + GROWING.splitlines().index('        piece.write(b"1" * (1 << 20))  # the line')


@pytest.fixture
def groups() -> Iterator[list[Path]]:
    made = cgroup._make_groups()
    try:
        yield made
    finally:
        cgroup._remove(made)


def run(
    groups: list[Path], folder: Path, mib: int, pause_s: float, python: str = sys.executable
) -> tuple[StackTaker, CommandSampler, int]:
    """Run the growing program in a group until it ends; return also its exit code."""
    (folder / "script.py").write_text(
        GROWING.replace("PAUSE_S", str(pause_s)).replace("MIB", str(mib))
    )
    enter = "".join(f"echo $$ > {group}/cgroup.procs; " for group in groups)
    process = subprocess.Popen(
        ["/bin/sh", "-c", f"{enter} {python} script.py | cat"],
        cwd=folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        assert process.stdin and process.stdout
        assert process.stdout.readline() == b"started\n"
        taker = StackTaker(groups)
        sampler = CommandSampler(
            process.pid, MemoryCgroup(groups[0]), interval_s=0.005, at_maximum=taker.look
        )
        sampler.start()
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        sampler.stop()
    return taker, sampler, process.returncode


def is_in_load(stack: Stack) -> bool:
    return any(frame.startswith("load (script.py:") for frame in stack.frames)


def test_a_killed_program_leaves_the_line_that_took_too_much(
    groups: list[Path], tmp_path: Path
) -> None:
    cgroup.limit(groups[0], 200 * MIB)
    taker, sampler, _ = run(groups, tmp_path, mib=400, pause_s=0.01)
    assert sampler.oom_kills == 1
    assert taker.why == ""
    last = taker.stacks[-1].t_ns
    first, *others = [stack for stack in taker.stacks if stack.t_ns == last]
    assert first.thread == "MainThread"
    assert is_in_load(first)
    assert first.frames[-2].startswith("main (script.py:")
    assert first.frames[-1].startswith("<module> (script.py:")
    assert [other.thread for other in others] == ["waiting"]
    assert first.usage_bytes > (200 - 32) * MIB
    assert taker.frozen_ns > 0


def test_a_limit_around_the_cell_is_near_too(groups: list[Path], tmp_path: Path) -> None:
    cgroup.limit(groups[0], 200 * MIB)
    cells = [group / "cell" for group in groups]
    for cell in cells:
        cell.mkdir()
    taker, _, _ = run(cells, tmp_path, mib=400, pause_s=0.01)
    assert is_in_load(taker.stacks[-1]) or taker.stacks[-1].thread == "waiting"
    assert taker.stacks[-1].usage_bytes > (200 - 32) * MIB


def test_a_program_that_grows_is_seen_at_its_maxima(groups: list[Path], tmp_path: Path) -> None:
    start = time.monotonic_ns()
    taker, _, _ = run(groups, tmp_path, mib=300, pause_s=0.01)
    took = time.monotonic_ns() - start
    found = [stack for stack in taker.stacks if stack.thread == "MainThread"]
    assert 2 <= len({stack.t_ns for stack in found}) <= stacks.KEPT
    usages = [stack.usage_bytes for stack in found]
    assert usages == sorted(usages)
    assert any(map(is_in_load, found))  # a late look sees the program after its load
    longest = 3 * taker.frozen_ns / max(len(usages), 1)  # one look more than the share allows
    assert taker.frozen_ns < stacks.SHARE * took + longest


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
        taker = StackTaker(groups, share=1.0)
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


def test_a_process_that_ends_in_between_leaves_no_stack(groups: list[Path]) -> None:
    with command('step("started")') as one:
        one.reach("started")
        taker = StackTaker([], pids=lambda: [one.pid, 2**22 - 1])
        one.go()
        one.process.wait(60)
        taker.look(1, 100 * MIB)
        assert taker.stacks == ()
        assert taker.why == "no Python process used more memory than before"


def test_without_a_group_py_spy_stops_the_process_itself() -> None:
    with command('step("started")') as one:
        one.reach("started")
        taker = StackTaker([], pids=lambda: [one.pid])
        taker.look(7, 100 * MIB)
        (stack,) = taker.stacks
        assert (stack.t_ns, stack.pid, stack.usage_bytes) == (7, one.pid, 100 * MIB)
        assert stack.frames[0].startswith("step (<string>:")
        one.process.stdin.close()  # type: ignore[union-attr]
        wait_until(lambda: one.process.poll() == 0, "the program did not go on")


def test_a_py_spy_that_does_not_start_is_a_reason(
    groups: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_find_program", lambda: "/nonexistent/py-spy")
    with command('step("started")') as one:
        one.reach("started")
        taker = StackTaker(groups, pids=lambda: [one.pid])
        taker.look(1, 100 * MIB)
    assert taker.why == "py-spy does not start: No such file or directory"


def test_without_py_spy_the_reason_says_what_to_install(
    groups: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_find_program", lambda: None)
    taker = StackTaker(groups)
    taker.look(1, 100 * MIB)
    assert taker.stacks == ()
    assert taker.why.startswith("py-spy is not installed: pip install ")
    assert "stacks" in taker.why
