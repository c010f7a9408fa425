"""How a command ended, judged from what the kernel tells of it."""

from pathlib import Path
from typing import Any

import pytest
from ran_commands import make_command

from weighin.isolation.base import Exit
from weighin.result import Kill
from weighin.run.judge import Evidence, judge
from weighin.units import MIB

OUTER = (800 * MIB, Path("/sys/fs/cgroup/user.slice/run.scope"))
AROUND = "/user.slice/run.scope"


def facts(**changes: Any) -> Evidence:
    """A command under 600 MiB in a scope of 800 MiB, whose first process was killed."""
    known: dict[str, Any] = {
        "cell": make_command(ram_limit_bytes=600 * MIB),
        "ended": Exit(None, signal=9),
        "oom_kills": 1,
        "machine_oom_kills": 1,
        "kills": None,
        "peak_bytes": 600 * MIB,
        "limits": [OUTER],
    }
    return Evidence(**(known | changes))


def test_a_command_of_which_a_part_left_is_not_measured() -> None:
    outcome, message = judge(facts(ended=Exit(0), oom_kills=0, escape="x (pid 1) left the cgroup"))
    assert outcome == "measurement_failed"
    assert message == (
        "x (pid 1) left the cgroup, so the figures are of a part of it and its limit is not valid"
        " (--isolation process measures all processes); it ended with ok"
    )


@pytest.mark.parametrize(
    ("limit_of", "limit_bytes", "words"),
    [
        (
            AROUND,
            800 * MIB,
            f"the command reached the limit of 800.000 MiB of the outer cgroup {AROUND}",
        ),
        ("/user.slice", None, "the command reached the limit of the outer cgroup /user.slice"),
        ("unknown", None, "the command reached its RAM limit of 600 MiB"),  # by the peak
        ("machine", None, "the machine had no memory left"),
    ],
)
def test_the_message_names_the_limit_that_was_met(
    limit_of: str, limit_bytes: int | None, words: str
) -> None:
    place = "around" if limit_of.startswith("/") else ""
    kill = Kill(1, "python", True, limit_of, limit_bytes=limit_bytes, limit_is=place)
    _, message = judge(facts(kills=[kill]))
    assert message == f"the kernel killed python (pid 1) for lack of memory: {words}"
