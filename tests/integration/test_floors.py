"""``weighin floor``: the smallest limit of a strategy and of a command, against known answers."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import leftovers
import pytest
from typed import CommandLine, Started

from weighin.units import MIB

pytestmark = pytest.mark.cgroup

HELD = 200 * MIB
SPENT = 320 * MIB
"""What the C program ``spend 256 MS`` takes: a base of 64 MiB, and a spike of 256 MiB on it."""


def stop(command: CommandLine, started: Started, run: str) -> None:
    """Stop a search by Ctrl-C after two cells."""
    leftovers.wait_until(
        lambda: started.process.poll() is not None or len(command.records(run)) >= 2,
        "no cell was measured",
        patience_s=120,
    )
    stopped = started.end(signal.SIGINT)
    assert (stopped.code, stopped.out, stopped.left) == (130, "", [])
    assert stopped.err.splitlines()[-2:] == [
        "error: stopped; nothing is left running; 0 of 1 searches for a floor finished",
        f"resume it: weighin floor --resume {run}",
    ]


def cells(command: CommandLine, run: str) -> list[str]:
    return [json.dumps(one["cell"], sort_keys=True) for one in command.records(run)]


@pytest.mark.slow
def test_the_floor_of_a_strategy_is_what_it_holds_and_a_stopped_search_goes_on(
    command: CommandLine,
) -> None:
    command.strategy("overrun")
    held = json.dumps({"name": "./overrun.py", "options": {"mib": HELD // MIB}})
    search = f"floor gpt2-tiny --isolation cgroup --set 'strategies={held}' --out found --json -"
    stop(command, command.start(search), "found")
    refused = command.run("bench --resume found")
    assert (refused.code, "weighin floor --resume found" in refused.err) == (2, True)
    ended = command.run("floor --resume found --json -", patience_s=400)
    assert (ended.code, ended.left) == (0, [])
    (floor,) = json.loads(ended.out)["floors"]
    assert (floor["message"], floor["step_bytes"], floor["passed"]) == ("", 8 * MIB, 3)
    assert floor["failed"] >= 1
    assert floor["with_room"]["verdict"] in ("survives", "thrashes")
    unlimited = command.records("found")[0]["peaks"]["cgroup_bytes"]
    # Torch's own anonymous memory is more than 100 MiB.
    assert HELD + 100 * MIB <= floor["floor_bytes"] <= unlimited + 16 * MIB
    found = cells(command, "found")
    assert len(found) == len(set(found)) == floor["cells"]
    assert "floor of overrun: above " in ended.err


def test_a_load_that_is_wrong_under_a_limit_ends_the_search_and_is_named(
    command: CommandLine,
) -> None:
    command.strategy("spoiling")
    ended = command.run("floor gpt2-tiny --isolation cgroup -s ./spoiling.py --json -")
    assert (ended.code, ended.left) == (5, [])
    (floor,) = json.loads(ended.out)["floors"]
    assert (floor["floor_bytes"], floor["below"], floor["cells"]) == (None, "", 2)
    assert floor["message"].startswith("wrong_weights under ")
    assert f"no floor for spoiling: {floor['message']}" in ended.err
    assert ended.err.splitlines()[-1].startswith("error: spoiling under ")


Floor = Callable[..., dict[str, Any]]


@pytest.fixture
def floor_of(command: CommandLine, programs: Path) -> Floor:
    """Returns the floor of a command in the run ``r``; the C programs are in the folder."""
    (command.folder / "spend").symlink_to(programs / "spend")

    def found(options: str, *words: str) -> dict[str, Any]:
        ended = command.run(f"floor --json floor.json --out r {options}", *words)
        assert (ended.code, ended.left) == (0, []), ended.err
        (one,) = json.loads((command.folder / "floor.json").read_text())["floors"]
        return dict(one)

    return found


def limits(command: CommandLine) -> list[int | None]:
    return [one["cell"]["ram_limit_bytes"] for one in command.records("r")]


@pytest.mark.compiler
def test_the_floor_of_a_command_is_what_it_needs(command: CommandLine, floor_of: Floor) -> None:
    found = floor_of("-- ./spend 256 50")
    assert SPENT <= found["floor_bytes"] <= SPENT + 8 * MIB
    assert found["step_bytes"] <= 4 * MIB
    _, first, *others = limits(command)
    assert first and SPENT <= first <= SPENT + 20 * MIB
    assert len(others) <= 10 and {*others} != {first}


@pytest.mark.compiler
def test_page_cache_is_no_reason_for_a_floor(command: CommandLine, floor_of: Floor) -> None:
    """Its peak without a limit is the whole file; it lives in a small part of that."""
    (command.folder / "file").write_bytes(bytes(128 * MIB))
    found = floor_of("--cold file -- dd if=file of=/dev/null bs=1M")
    assert command.records("r")[0]["peaks"]["cgroup_bytes"] >= 128 * MIB
    assert (found["floor_bytes"] or 0) <= 16 * MIB


REREADING = """
import mmap, sys
with open("file", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
    for _ in range(200):
        for offset in range(0, len(mapped), mmap.PAGESIZE):
            mapped[offset]
"""


@pytest.mark.compiler
def test_a_command_that_reads_a_mapped_file_again_and_again_is_ended_and_survives_with_it_cached(
    command: CommandLine, floor_of: Floor
) -> None:
    """Its file has 96 MiB. It would read it 200 times under a smaller limit, to its end."""
    (command.folder / "file").write_bytes(os.urandom(96 * MIB))
    found = floor_of("--cold file --", sys.executable, "-c", REREADING)
    assert (found["aim"], found["below"]) == ("survives", "thrashes")
    assert found["floor_bytes"] >= 80 * MIB
    ended = [one for one in command.records("r") if one["outcome"] == "thrashing"]
    assert ended
    for one in ended:
        assert one["stopped"]["reread_bytes"] > 3 * 96 * MIB
        assert (one["stopped"]["timeout_s"], one["load_ns"], one["ready_ns"]) == (None,) * 3


@pytest.mark.compiler
def test_a_server_has_the_floor_of_its_start(command: CommandLine, floor_of: Floor) -> None:
    script = "./spend 256 50 && echo ready && exec sleep 60"
    found = floor_of("--ready ^ready -- sh -c", script)
    assert SPENT <= found["floor_bytes"] <= SPENT + 8 * MIB
    assert {one["outcome"] for one in command.records("r")} == {"ok", "oom_killed"}


def test_a_command_that_fails_without_a_limit_has_no_floor(command: CommandLine) -> None:
    ended = command.run("floor --out r -- sh -c 'echo why >&2; exit 3'")
    assert "why" in ended.err
    assert "command_failed without a limit: exit code 3" in " ".join(ended.out.split())
    assert limits(command) == [None]


@pytest.mark.compiler
def test_output_is_shown_once(command: CommandLine, floor_of: Floor) -> None:
    ended = command.run("floor --out r -- sh -c 'echo shown; echo told >&2; ./spend 16 1'")
    assert (ended.out.count("shown\n"), ended.err.count("told\n")) == (1, 1)
    assert len(limits(command)) > 3


@pytest.mark.compiler
def test_a_search_of_a_command_that_was_stopped_goes_on_where_it_was(
    command: CommandLine, floor_of: Floor
) -> None:
    stop(command, command.start("floor --out r -- ./spend 256 600"), "r")
    before = command.records("r")
    assert command.run("floor --resume r").code == 0
    after = cells(command, "r")
    assert command.records("r")[: len(before)] == before
    assert len(set(after)) == len(after)
