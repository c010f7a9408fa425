"""The line of a program at which its command used most memory, read from outside."""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cells import MIB, new_group
from command_trees import record, seen_from_inside, variables, weighing

pytestmark = pytest.mark.cgroup

KEPT = 8  # readings whose stacks a record keeps
SHARE = 0.05  # of the time, for which a command may be stopped to be read

GROWING = """
import threading, time
import mmap
def load(mib):
    held = []
    for _ in range(mib):
        piece = mmap.mmap(-1, 1 << 20)
        piece.write(b"1" * (1 << 20))  # the line
        held.append(piece)
        time.sleep(0.01)
    return held
def main():
    threading.Thread(target=time.sleep, args=(100,), name="waiting", daemon=True).start()
    time.sleep(0.5)
    held = load(MIB)
    print("done", flush=True)
    time.sleep(0.5)
main()
"""


def run(folder: Path, mib: int, options: str = "", before: tuple[str, ...] = ()) -> dict[str, Any]:
    """Run the growing program, which is not the command's first process, and return the record."""
    (folder / "script.py").write_text(GROWING.replace("MIB", str(mib)))
    script = ("sh", "-c", f"{sys.executable} script.py | cat")
    command = (*before, *weighing(folder / "run", options), *script)
    how: dict[str, Any] = {"cwd": folder, "env": variables(), "timeout": 120}
    subprocess.run(command, capture_output=True, check=False, **how)
    return record(folder / "run")


def is_in_load(stack: dict[str, Any]) -> bool:
    return any(frame.startswith("load (script.py:") for frame in stack["frames"])


def test_a_killed_program_leaves_the_line_that_took_too_much(tmp_path: Path) -> None:
    found = run(tmp_path, 400, "--ram 200m")
    assert found["oom_kills"] == 1
    stacks = found["ran"]["stacks"]
    first, *others = [stack for stack in stacks if stack["t_ns"] == stacks[-1]["t_ns"]]
    assert first["thread"] == "MainThread"
    assert is_in_load(first)
    assert first["frames"][-2].startswith("main (script.py:")
    assert first["frames"][-1].startswith("<module> (script.py:")
    assert [other["thread"] for other in others] == ["waiting"]
    assert first["usage_bytes"] > (200 - 32) * MIB
    assert found["ran"]["frozen_ns"] > 0


@pytest.mark.root
def test_a_limit_around_the_cell_is_near_too(tmp_path: Path) -> None:
    with new_group() as group:
        group.limit(200 * MIB)
        found = run(tmp_path, 400, before=seen_from_inside(group.path, tmp_path))
    last = found["ran"]["stacks"][-1]
    assert is_in_load(last) or last["thread"] == "waiting"
    # The limit holds weighin itself, too: its memory is none of the command's.
    assert last["usage_bytes"] > (200 - 32 - 80) * MIB


def test_a_program_that_grows_is_seen_at_its_maxima(tmp_path: Path) -> None:
    start = time.monotonic_ns()
    found = run(tmp_path, 300)
    took = time.monotonic_ns() - start
    seen = [stack for stack in found["ran"]["stacks"] if stack["thread"] == "MainThread"]
    assert 2 <= len({stack["t_ns"] for stack in seen}) <= KEPT
    usages = [stack["usage_bytes"] for stack in seen]
    assert usages == sorted(usages)
    assert any(map(is_in_load, seen))  # a late look sees the program after its load
    frozen_ns = found["ran"]["frozen_ns"]
    assert frozen_ns < SHARE * took + 3 * frozen_ns / len(usages)  # one look more than allowed
