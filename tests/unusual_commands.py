"""Calls of programs whose memory is of an unusual kind, what each needs, and its smallest limit.

``tests/commands/test_unusual_programs.py`` finds the smallest limits without weighin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cells import MIB
from known_commands import FILE, FILE_BYTES

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True, slots=True)
class Unusual:
    """One call of a program.

    ``needed_bytes`` is the memory that the kernel cannot reclaim, which is also the smallest limit.
    ``peak_bytes`` is the most that is charged without a limit. ``kind`` is the word for most of the
    memory.
    """

    name: str
    arguments: tuple[str, ...]
    needed_bytes: int
    peak_bytes: int
    kind: str

    @property
    def id(self) -> str:
        return " ".join((self.name, *self.arguments))

    def command(self, programs: Path, file: Path) -> tuple[str, ...]:
        replaced = (str(file) if each == FILE else each for each in self.arguments)
        return (str(programs / self.name), *replaced)


UNUSUAL = (
    Unusual("pipes", ("150",), 151 * MIB, 151 * MIB, "kernel"),
    Unusual("sockets", ("100",), 102 * MIB, 102 * MIB, "kernel"),
    Unusual("tables", ("100",), 100 * MIB, 100 * MIB, "kernel"),
    Unusual("locks", (FILE,), FILE_BYTES, FILE_BYTES, "locked"),
    Unusual("returns", ("200", "200"), 200 * MIB, 400 * MIB, "anonymous"),
    Unusual("returns", ("100", "200"), 200 * MIB, 300 * MIB, "anonymous"),
    Unusual("writes", ("100",), 101 * MIB, 101 * MIB, "shared"),
)


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured command: its record, what weighin printed about it, and weighin's exit code."""

    record: dict[str, Any]
    said: str
    code: int

    @property
    def needed_bytes(self) -> int:
        return int(self.record["ran"]["needed_bytes"])


def weighin(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Call weighin in a process of its own."""
    return subprocess.run(
        (sys.executable, "-P", "-m", "weighin", *arguments),
        env=os.environ | {"PYTHONPATH": str(ROOT / "harness")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def measured(
    folder: Path, command: tuple[str, ...], *options: str, isolation: str = "cgroup"
) -> Measured:
    """Measure a command in the new folder ``folder``, and return its record."""
    ended = weighin(
        "run", "--no-stacks", "--isolation", isolation, "--out", str(folder), *options, "--", *command
    )  # fmt: skip
    (line,) = (folder / "records.jsonl").read_text().splitlines()
    return Measured(json.loads(line), ended.stderr, ended.returncode)
