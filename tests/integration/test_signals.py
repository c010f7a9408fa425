"""Signals at random moments: the right exit code, nothing left, and the work can go on.

``make test-nightly`` runs this. ``WEIGHIN_SIGNALS=20`` sends each signal 20 times to each verb.
"""

import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import leftovers
import pytest
import torch
from commands import CommandLine, Started

TIMES = int(os.environ.get("WEIGHIN_SIGNALS", "1"))
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
STOPPED = 130
TORCHS_OWN = "torchinductor_"  # torch makes this folder, and keeps it

Prepare = Callable[[CommandLine], None]


@dataclass(frozen=True)
class Verb:
    """A command, how it goes on after a stop, and the file or folder that it writes."""

    arguments: tuple[str, ...]
    resume: tuple[str, ...] = ()
    out: str = "nothing"
    prepare: Prepare = lambda _: None


def _checkpoint(command: CommandLine) -> None:
    state = {f"weight{n}": torch.zeros(8 * 1024**2) for n in range(8)}
    torch.save(state, command.folder / "model.pt")


def _run(command: CommandLine) -> None:
    ended = command.run("bench", "tied-tiny", "-s", "baseline", *PLAIN, "--out", "run")
    assert ended.code == 0, ended.err


PLAIN = ("--isolation", "process")
LIMITED = ("--isolation", "cgroup")
VERBS = {
    "bench": Verb(
        ("bench", "gpt2-tiny", "-s", "baseline,streaming", *LIMITED, "--out", "out"),
        ("bench", "--resume", "out"),
        "out",
    ),
    "floor": Verb(
        ("floor", "gpt2-tiny", "-s", "streaming", *LIMITED, "--out", "out"),
        ("floor", "--resume", "out"),
        "out",
    ),
    "convert": Verb(("convert", "model.pt", "out.safetensors"), (), "out.safetensors", _checkpoint),
    "report": Verb(("report", "run"), prepare=_run),
    "recommend": Verb(("recommend", "gpt2-tiny", "--ram", "2g")),
}


def _stop(started: Started, number: signal.Signals, after_s: float) -> int:
    """Send a signal ``after_s`` after the command can take it; return the exit code."""
    started.wait_for_handlers()
    time.sleep(after_s)
    started.process.send_signal(number)
    started.process.communicate(timeout=120)
    return started.process.returncode


def _left_in(temporary: Path) -> list[str]:
    return [path.name for path in temporary.iterdir() if not path.name.startswith(TORCHS_OWN)]


def _is_alone(mark: str) -> bool:
    return leftovers.processes(mark) == []


def _files(folder: Path) -> set[str]:
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    return {name for name in found if not name.endswith((".lock", ".json", ".yaml"))}


@pytest.mark.nightly
@pytest.mark.cgroup
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
@pytest.mark.parametrize("name", VERBS)
def test_a_signal_at_any_moment_leaves_nothing_and_the_work_goes_on(
    command: CommandLine, name: str, number: signal.Signals
) -> None:
    verb, moments = VERBS[name], random.Random(f"{name}{number}")
    temporary = command.folder / "tmp"
    temporary.mkdir()
    verb.prepare(command)
    ours = {path.name for path in command.folder.iterdir()}

    def whole(*arguments: str) -> float:
        """Run to the end, and return the seconds."""
        start = time.monotonic()
        ended = command.run(*arguments, TMPDIR=str(temporary), patience_s=400)
        assert (ended.code, ended.left) == (0, []), ended.err
        assert _left_in(temporary) == []
        assert {path.name for path in command.folder.iterdir()} - ours <= {verb.out}
        return time.monotonic() - start

    whole(*verb.arguments)  # fills the cache
    _remove(command.folder / verb.out)
    length_s = whole(*verb.arguments)
    complete = _files(command.folder)
    codes = []
    for _ in range(TIMES):
        _remove(command.folder / verb.out)
        started = command.start(*verb.arguments, TMPDIR=str(temporary))
        code = _stop(started, number, moments.uniform(0, length_s * 0.8))
        codes.append(code)
        killed = number is signal.SIGKILL
        assert code in (0, -signal.SIGKILL if killed else STOPPED)
        leftovers.wait_until(partial(_is_alone, started.mark), "a process goes on")
        if not killed:
            assert started.left() == []
            assert _left_in(temporary) == []
            assert {path.name for path in command.folder.iterdir()} - ours <= {verb.out}
        if code and verb.resume and (command.folder / verb.out / "plan.json").exists():
            whole(*verb.resume)
        elif code and not (killed and (command.folder / verb.out).is_file()):  # else complete
            whole(*verb.arguments)
        assert leftovers.groups(started.process.pid) == []
        assert (
            name == "floor" or _files(command.folder) == complete
        )  # a search may try other limits
    print(f"{name} {number.name}: exit codes {codes}")


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_IGNORES = "import os, signal, sys; signal.signal(signal.SIGCHLD, signal.SIG_IGN); os.execv(sys.argv[1], sys.argv[1:])"


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--use", "fork"), ("--ranks", "2", "--use", "none")])
def test_a_parent_that_ignores_the_end_of_its_children_stops_no_run(
    command: CommandLine, options: tuple[str, ...]
) -> None:
    words = ("bench", "gpt2-tiny", "-s", "baseline", *PLAIN, *options, "--out", "out")
    ended = command.run(*words, before=(sys.executable, "-c", _IGNORES))
    assert (ended.code, ended.left) == (0, []), ended.err
    assert [one["outcome"] for one in command.records("out")] == ["ok"]
