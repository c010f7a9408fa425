"""The end of ``weighin run``: the words on standard error, and the same in the JSON."""

from __future__ import annotations

import json
import re
import sys

import pytest
from typed import CommandLine

TAKES = "taken = bytes(10) * 40 * 1024**2; print(len(taken))"
"""Takes 400 MiB at once."""


@pytest.mark.cgroup
def test_a_kill_is_said_in_words_on_standard_error(command: CommandLine) -> None:
    limited = ("--isolation", "cgroup", "--ram", "200m", "--no-stacks", "--out", "kill")
    ended = command.run("run", *limited, "--json", "kill.json", "--", sys.executable, "-c", TAKES)
    assert (ended.code, ended.out) == (137, "")
    killed, held, path = ended.err.splitlines()
    assert killed.startswith("weighin: The kernel killed python")
    assert killed.endswith("the command reached its RAM limit of 200 MiB.")
    assert re.fullmatch(
        r"weighin: The command had (19\d|200) MiB of anonymous memory, not counting page cache,"
        r" and tried to allocate more\.",
        held,
    )
    assert path == "weighin: weighin report kill"
    answer = json.loads((command.folder / "kill.json").read_text())["answer"]
    assert [f"weighin: {line}" for line in answer] == [killed, held]


@pytest.mark.cgroup
def test_the_output_of_a_command_that_lives_is_its_own(command: CommandLine) -> None:
    ended = command.run("run", "--isolation", "cgroup", "--out", "lives", "--", "echo", "hello")
    assert (ended.code, ended.out) == (0, "hello\n")
    first, *_, last = ended.err.splitlines()
    assert (first, last) == ("weighin: The command ended well.", "weighin: weighin report lives")
