"""weighin as a user types it: a process of its own, its whole text, its records, and what it leaves.

    command = CommandLine(folder, cache)
    ended = command.run("bench gpt2-tiny -s baseline --isolation process --out 'my run'")
    ended = command.run("run --isolation cgroup --out run --", *program, MODE="fast")
    command.record("run")["outcome"]

The first text is split as a shell does; words that follow it are taken as they are.
"""

from __future__ import annotations

import csv
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from shlex import split
from typing import Any

import leftovers

ROOT = Path(__file__).parents[1]
STRATEGIES = ROOT / "tests" / "instrument" / "strategies"


def words(text: str, *more: str) -> tuple[str, ...]:
    """Return the words of ``weighin TEXT`` in a process of its own."""
    return (sys.executable, "-P", "-m", "weighin", *split(text), *more)


def free_port() -> int:
    """Return a port of this machine that Linux gives to no program that asks for any port."""
    while True:
        port = secrets.randbelow(12_000) + 20_000
        with socket.socket() as found, suppress(OSError):
            found.bind(("127.0.0.1", port))
            return port


@dataclass(frozen=True, slots=True)
class Ended:
    """How a command ended. ``left`` is what was left of it: nothing, it should be."""

    code: int
    out: str
    err: str
    left: list[str]


@dataclass(frozen=True, slots=True)
class CommandLine:
    """``weighin`` in a folder and with a cache of its own, at a fixed width."""

    folder: Path
    cache: Path
    _processes: list[subprocess.Popen[str]] = field(default_factory=list, compare=False)

    def close(self) -> None:
        """End what a test that failed left running, and close its pipes, lest a later test fail of it."""
        for process in self._processes:
            with process:
                if process.poll() is None:
                    process.kill()

    @property
    def environment(self) -> dict[str, str]:
        return os.environ | {
            "PYTHONPATH": str(ROOT / "harness"),
            "WEIGHIN_CACHE": str(self.cache),
            "COLUMNS": "100",
            "NO_COLOR": "1",
            "TERM": "dumb",
        }

    def start(
        self, text: str, *more: str, before: tuple[str, ...] = (), **variables: str
    ) -> Started:
        """Start ``weighin TEXT``; ``before`` is a command that starts it in its turn."""
        process = subprocess.Popen(
            [*before, *words(text, *more)],
            cwd=self.folder,
            env=self.environment | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._processes.append(process)
        return Started(process, str(self.cache))

    def run(self, text: str, *more: str, patience_s: float = 120, **settings: Any) -> Ended:
        """Run ``weighin TEXT`` to its end."""
        return self.start(text, *more, **settings).end(patience_s=patience_s)

    def records(self, run: str) -> list[dict[str, Any]]:
        """Return the complete records of the folder ``run``, which may be written meanwhile."""
        path = self.folder / run / "records.jsonl"
        text = path.read_text() if path.exists() else ""
        *lines, _incomplete = text.split("\n")
        return [json.loads(line) for line in lines]

    def record(self, run: str) -> dict[str, Any]:
        """Return the only record of a run."""
        (one,) = self.records(run)
        return one

    def samples(self, run: str) -> list[dict[str, int]]:
        """Return the samples of the only record of a run, the oldest first."""
        with (self.folder / run / self.record(run)["samples_path"]).open() as file:
            rows = [*csv.DictReader(file)]
        return [{name: int(value) for name, value in row.items() if value} for row in rows]

    def strategy(self, name: str) -> Path:
        """Put a strategy of ``tests/instrument/strategies`` into the folder, and return its path."""
        (path := self.folder / f"{name}.py").write_text((STRATEGIES / f"{name}.py").read_text())
        return path

    def hold(
        self,
        text: str,
        *more: str,
        records: int = 0,
        at_work: Callable[[Started], object] | None = None,
        **settings: Any,
    ) -> Started:
        """Start a run with the strategy ``./pausing.py``, and return when it is in its midst.

        Then it has so many records, and its next cells are ``at_work``: they wait for ``let_go``.
        """
        self.strategy("pausing").chmod(0o755)
        started = self.start(text, *more, **settings)
        began = at_work or Started.workers
        leftovers.wait_until(
            lambda: (
                started.process.poll() is not None
                or (len(self.records(_folder(text))) == records and began(started))
            ),
            "the cells that wait did not begin",
            patience_s=300,
        )
        assert started.process.poll() is None, started.process.communicate()
        return started

    def let_go(self) -> None:
        """Let the cells go on that wait, and wait no more."""
        (self.folder / "pausing.py").chmod(0o644)


def _folder(text: str) -> str:
    """Return the folder that a command names with --out."""
    arguments = split(text)
    return arguments[arguments.index("--out") + 1]


@dataclass(frozen=True, slots=True)
class Started:
    """A running command."""

    process: subprocess.Popen[str]
    mark: str

    def end(self, number: signal.Signals | None = None, patience_s: float = 120) -> Ended:
        """Wait for its end, after sending it a signal; Ctrl-C goes to all its group, as ever."""
        if number is signal.SIGINT:
            with suppress(ProcessLookupError):  # it has ended, as its test then says
                os.killpg(self.process.pid, number)
        elif number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=patience_s)
        return Ended(self.process.returncode, out, err, self.left())

    def wait_for_handlers(self) -> None:
        """Return when the command takes signals; before, Python starts and imports weighin."""
        status = Path(f"/proc/{self.process.pid}/status")

        def takes() -> bool:
            caught = next(line for line in status.read_text().split("\n") if "SigCgt" in line)
            return bool(int(caught.split()[1], 16) & 1 << signal.SIGTERM - 1)

        leftovers.wait_until(
            lambda: self.process.poll() is not None or takes(), "the command takes no signal"
        )

    def workers(self) -> list[str]:
        """Return the workers that run for it, or its containers."""
        found = [one for one in leftovers.processes(self.mark) if "weighin.worker" in one]
        return found or leftovers.containers(self.process.pid)

    def left(self) -> list[str]:
        """Return what there is of it beside the process itself."""
        return leftovers.all_of(self.process.pid, self.mark)


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured command: its record, what weighin printed about it, and weighin's exit code."""

    record: dict[str, Any]
    said: str
    code: int

    @property
    def needed_bytes(self) -> int:
        return int(self.record["ran"]["needed_bytes"])


def measured(
    run: Path,
    command: tuple[str, ...],
    options: str = "--isolation cgroup",
    cwd: Path | None = None,
) -> Measured:
    """Measure a command, by default in a cgroup and started beside the new folder ``run``."""
    line = CommandLine(cwd or run.parent, run.parent / "cache")
    ended = line.run(f"run --no-stacks {options} --out", str(run), "--", *command)
    assert ended.out == "", ended.out
    return Measured(line.record(str(run)), ended.err, ended.code)
