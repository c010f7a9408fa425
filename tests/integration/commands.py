"""The command line as a user runs it: a process of its own, its whole text, and what it leaves."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import leftovers

ROOT = Path(__file__).parents[2]
NOT_LIMITED = "note: this run has no RAM limit: weighin measures peaks, but only a run with --ram shows whether a strategy fits\n"


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
        """The environment of the command."""
        return os.environ | {
            "PYTHONPATH": str(ROOT / "harness"),
            "WEIGHIN_CACHE": str(self.cache),
            "COLUMNS": "100",
            "NO_COLOR": "1",
            "TERM": "dumb",
        }

    def start(self, *arguments: str, before: tuple[str, ...] = (), **variables: str) -> Started:
        """Start ``weighin ARGUMENTS``; ``before`` is a command that starts it in its turn."""
        process = subprocess.Popen(
            [*before, sys.executable, "-P", "-m", "weighin", *arguments],
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

    def run(self, *arguments: str, patience_s: float = 120, **settings: Any) -> Ended:
        """Run ``weighin ARGUMENTS`` to its end."""
        return self.start(*arguments, **settings).end(patience_s=patience_s)

    def records(self, run: str) -> list[dict[str, Any]]:
        """Return the complete records of the folder ``run``, which may be written meanwhile."""
        path = self.folder / run / "records.jsonl"
        text = path.read_text() if path.exists() else ""
        *lines, _incomplete = text.split("\n")
        return [json.loads(line) for line in lines]


@dataclass(frozen=True, slots=True)
class Started:
    """A running command."""

    process: subprocess.Popen[str]
    mark: str

    def end(self, number: signal.Signals | None = None, patience_s: float = 120) -> Ended:
        """Wait for its end, after sending it a signal; Ctrl-C goes to all its group, as ever."""
        if number is signal.SIGINT:
            os.killpg(self.process.pid, number)
        elif number is not None:
            self.process.send_signal(number)
        out, err = self.process.communicate(timeout=patience_s)
        return Ended(self.process.returncode, out, err, self.left())

    def wait_for_handlers(self) -> None:
        """Return when the command takes signals; before, Python starts and imports weighin."""
        status = Path(f"/proc/{self.process.pid}/status")
        while self.process.poll() is None:
            caught = next(line for line in status.read_text().split("\n") if "SigCgt" in line)
            if int(caught.split()[1], 16) & 1 << signal.SIGTERM - 1:
                return
            time.sleep(0.005)

    def at_work(self) -> bool:
        """Tell whether a worker of it runs: then its cgroup is there, too."""
        workers = [one for one in leftovers.processes(self.mark) if "weighin.worker" in one]
        return bool(workers or leftovers.containers(self.process.pid))

    def left(self) -> list[str]:
        """Return what there is of it beside the process itself."""
        return leftovers.all_of(self.process.pid, self.mark)
