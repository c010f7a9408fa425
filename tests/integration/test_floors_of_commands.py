"""``weighin floor -- COMMAND``: the smallest limit of a command, against known answers."""

import json
import os
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from known_commands import PROGRAMS
from typed import CommandLine

from weighin.units import MIB

pytestmark = pytest.mark.cgroup

SPENT = 320 * MIB
"""What the C program ``spend 256 MS`` takes: a base of 64 MiB, and a spike of 256 MiB on it."""


@pytest.fixture
def weighin(tmp_path: Path) -> CommandLine:
    source = PROGRAMS / "spend.c"
    subprocess.run(
        ["cc", "-O1", "-static", "-o", tmp_path / "spend", source], check=True, cwd=PROGRAMS
    )
    return CommandLine(tmp_path, tmp_path / "cache")


def floor_of(weighin: CommandLine, *arguments: str) -> dict[str, Any]:
    ended = weighin.run("floor", "--json", "floor.json", *arguments)
    assert (ended.code, ended.left) == (0, []), ended.err
    (found,) = json.loads((weighin.folder / "floor.json").read_text())["floors"]
    return dict(found)


def limits(weighin: CommandLine, run: str) -> list[int | None]:
    return [one["cell"]["ram_limit_bytes"] for one in weighin.records(run)]


def test_the_floor_of_a_command_is_what_it_needs(weighin: CommandLine) -> None:
    found = floor_of(weighin, "--out", "r", "--", "./spend", "256", "50")
    assert SPENT <= found["floor_bytes"] <= SPENT + 8 * MIB
    assert found["step_bytes"] <= 4 * MIB
    assert len(limits(weighin, "r")) <= 12


def test_page_cache_is_no_reason_for_a_floor(weighin: CommandLine) -> None:
    """Its peak without a limit is the whole file; it lives in a small part of that."""
    file = weighin.folder / "file"
    file.write_bytes(bytes(128 * MIB))
    found = floor_of(
        weighin, "--cold", "file", "--out", "r", "--", "dd", "if=file", "of=/dev/null", "bs=1M"
    )
    unlimited = weighin.records("r")[0]
    assert unlimited["peaks"]["cgroup_bytes"] >= 128 * MIB
    assert (found["floor_bytes"] or 0) <= 16 * MIB


REREADING = """
import mmap, sys
with open("file", "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
    for _ in range(int(sys.argv[1])):
        for offset in range(0, len(mapped), mmap.PAGESIZE):
            mapped[offset]
"""


def test_a_command_that_reads_a_mapped_file_again_and_again_is_ended_and_survives_with_it_cached(
    weighin: CommandLine,
) -> None:
    """Its file has 96 MiB. It would read it 200 times under a smaller limit, to its end."""
    (weighin.folder / "file").write_bytes(os.urandom(96 * MIB))
    (weighin.folder / "reread.py").write_text(REREADING)
    command = (sys.executable, "reread.py", "200")
    found = floor_of(weighin, "--cold", "file", "--out", "r", "--", *command)
    assert found["aim"] == "survives"
    assert found["floor_bytes"] >= 80 * MIB
    assert found["below"] == "thrashes"
    records = weighin.records("r")
    ended = [one for one in records if one["outcome"] == "thrashing"]
    assert ended
    for one in ended:
        assert one["stopped"]["timeout_s"] is None
        assert one["stopped"]["reread_bytes"] > 3 * 96 * MIB
        assert (one["load_ns"], one["ready_ns"]) == (None, None)


def test_a_server_has_the_floor_of_its_start(weighin: CommandLine) -> None:
    script = (
        f"./spend 256 50 && echo ready && exec {sys.executable} -c 'import time; time.sleep(60)'"
    )
    found = floor_of(weighin, "--ready", "^ready", "--out", "r", "--", "sh", "-c", script)
    assert SPENT <= found["floor_bytes"] <= SPENT + 8 * MIB
    assert {one["outcome"] for one in weighin.records("r")} == {"ok", "oom_killed"}


def test_a_command_that_fails_without_a_limit_has_no_floor(weighin: CommandLine) -> None:
    ended = weighin.run("floor", "--out", "r", "--", "sh", "-c", "echo why >&2; exit 3")
    assert "why" in ended.err
    assert "command_failed without a limit: exit code 3" in " ".join(ended.out.split())
    assert limits(weighin, "r") == [None]


def test_output_is_shown_once_and_input_is_empty(weighin: CommandLine) -> None:
    ended = weighin.run("floor", "--out", "r", "--", "sh", "-c", "cat; echo shown; ./spend 16 1")
    assert ended.out.count("shown\n") == 1
    assert len(limits(weighin, "r")) > 3


@pytest.mark.parametrize("into_s", [0, 0.4], ids=["between commands", "within a command"])
def test_a_search_that_was_stopped_goes_on_where_it_was(
    weighin: CommandLine, into_s: float
) -> None:
    started = weighin.start("floor", "--out", "r", "--", "./spend", "256", "600")
    while len(weighin.records("r")) < 2:
        assert started.process.poll() is None
        time.sleep(0.01)
    time.sleep(into_s)
    ended = started.end(signal.SIGINT)
    assert (ended.code, ended.left) == (130, [])
    before = weighin.records("r")
    again = weighin.run("floor", "--resume", "r")
    assert again.code == 0
    after = weighin.records("r")
    assert after[: len(before)] == before
    names = [json.dumps(one["cell"], sort_keys=True) for one in after]
    assert len(set(names)) == len(names)


def test_limits_are_tried_near_the_need(weighin: CommandLine) -> None:
    floor_of(weighin, "--out", "r", "--", "./spend", "256", "50")
    _, first, *others = limits(weighin, "r")
    assert first
    assert SPENT <= first <= SPENT + 20 * MIB
    assert any(one != other for one, other in pairwise([first, *others]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["-s", "baseline", "--", "true"],
            "--strategies: it has no effect on commands",
        ),
        (
            ["gpt2-tiny", "--ready", "x"],
            "--ready: it has no effect on a model",
        ),
        (["gpt2-tiny", "true"], "Got unexpected extra arguments (true)"),
        (["--"], "no command was given"),
    ],
)
def test_options_without_an_effect_are_refused(
    weighin: CommandLine, arguments: list[str], message: str
) -> None:
    ended = weighin.run("floor", *arguments)
    assert ended.code == 2
    assert message in ended.err


@pytest.mark.slow
@pytest.mark.nightly  # by day, commands whose need is known
def test_a_load_lives_16_mib_above_its_floor_and_not_16_mib_below(weighin: CommandLine) -> None:
    """A shell sets the limit; three starts out of three must succeed."""
    (weighin.folder / "save.py").write_text(
        "import torch; torch.save({str(n): torch.zeros(4 << 20) for n in range(12)}, 'w.pt')"
    )
    (weighin.folder / "load.py").write_text("import torch; torch.load('w.pt')")
    subprocess.run([sys.executable, "save.py"], check=True, cwd=weighin.folder)
    command = (sys.executable, "load.py")
    found = floor_of(weighin, "--out", "r", "--", *command)["floor_bytes"]
    assert [_under(found + 16 * MIB, weighin.folder, command) for _ in range(3)] == [0, 0, 0]
    assert any(_under(found - 16 * MIB, weighin.folder, command) for _ in range(3))


def _under(limit: int, folder: Path, command: tuple[str, ...]) -> int:
    from weighin.isolation import cgroup

    with cgroup.temporary_group() as group:
        cgroup.limit(group, limit)
        line = f'echo $$ > {group}/cgroup.procs && exec "$@"'
        return subprocess.run(
            ["sh", "-c", line, "sh", *command], cwd=folder, capture_output=True, check=False
        ).returncode
