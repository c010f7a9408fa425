"""A copy of the repository, whose code is changed, and whose tests are run."""

import json
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from os import pathsep, utime
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any, Final

from chosen_tests import tests_of
from fork_server import ForkServer
from operators import Mutant
from pytest import ExitCode

ROOT: Final = Path(__file__).resolve().parents[2]
_MARKERS: Final = "vm fresh nightly cgroup docker cuda ray browser fuse compiler index root slow"
_WITHOUT: Final = " and ".join(f"not {marker}" for marker in _MARKERS.split())
_OPTIONS: Final = (
    "-q", "--tb=no", "-p", "no:cacheprovider", "--hypothesis-seed=0", "-m", _WITHOUT,
    "-W", "ignore::pytest.PytestAssertRewriteWarning",  # of what was imported before
)  # fmt: skip
_IMPORTS: Final = "import gc, pytest, torch, transformers; torch.set_num_threads(1); gc.freeze()"
# A limit of processor time ends an endless loop, however busy the machine is. A mutant may also
# take all memory that it finds. Tests that fail run again: they may fail only now and then.
_RUN: Final = """
import json, os, sys, threading, time, pytest
from resource import *
limit_s = int(sys.argv[1])
setrlimit(RLIMIT_CPU, (limit_s,) * 2)
setrlimit(RLIMIT_DATA, (12 << 30,) * 2)

def processor_s():
    used = [getrusage(who) for who in (RUSAGE_SELF, RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)

def watch():  # the limit above is of each process
    while processor_s() < limit_s:
        time.sleep(1)
    os.kill(os.getpid(), 9)

threading.Thread(target=watch, daemon=True).start()

class Failed:
    def __init__(self):
        self.tests = {}
    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.tests[report.nodeid] = None

def run(failed, *arguments):
    try:
        return int(pytest.main([*arguments], plugins=[failed]))
    except (ExceptionGroup, Warning):  # of what a failed test left open
        return 1

*options, file = sys.argv[2:]
failed, again = Failed(), Failed()
status = run(failed, *options, file)
used_s = processor_s()
if failed.tests and run(again, *options, *failed.tests) and not again.tests:
    again = failed  # they cannot run again in this process
print()
print(json.dumps({"processor_s": used_s, "failed": [*failed.tests], "again": [*again.tests]}))
sys.exit(status)
"""
_LARGE: Final = (".git", ".venv", ".mypy", ".ruff", ".pytest", ".hypothesis", "results")


@dataclass(frozen=True, slots=True)
class Unchanged:
    """How a file of tests runs without a change."""

    processor_s: float
    wall_s: float
    failing: tuple[str, ...]

    @property
    def limits_s(self) -> tuple[float, float]:
        """The processor time and the time after which a run with a change does not end."""
        return 20 + 4 * self.processor_s, 60 + 10 * self.wall_s


class Known:
    """How all files of tests run without a change, each run once for all copies."""

    def __init__(self) -> None:
        self._found: dict[Path, Unchanged] = {}
        self._locks: dict[Path, Lock] = {}

    def get(self, file: Path, measure: Callable[[Path], Unchanged]) -> Unchanged:
        """Return how a file runs; the first call measures it."""
        with self._locks.setdefault(file, Lock()):
            if file not in self._found:
                self._found[file] = measure(file)
            return self._found[file]


@dataclass(frozen=True, slots=True)
class Trial:
    """What a mutant's tests did: the test or file that killed it, if any; and the tests left out."""

    killed_by: str
    left_out: tuple[str, ...]


class Copy:
    """A copy of the repository in ``folder``, and a process that runs its tests."""

    def __init__(self, folder: Path, most_s: float, known: Known) -> None:
        self._most_s, self._known, self._number = most_s, known, 0
        self._folder = folder / ROOT.name
        self._package = self._folder / "harness" / "weighin"
        self._folder.mkdir(parents=True)
        for path in ROOT.iterdir():
            copied = self._folder / path.name
            if path.name == ".git":
                continue
            if path.name.startswith(_LARGE):
                copied.symlink_to(path)
            elif path.is_dir():
                shutil.copytree(path, copied, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(path, copied)
        writable = ("HOME", "TMPDIR", "HYPOTHESIS_STORAGE_DIRECTORY")
        self._environment = dict.fromkeys(writable, str(folder)) | {
            "PYTHONPATH": pathsep.join(str(self._folder / name) for name in ("harness", "tests")),
            "PYTHONPYCACHEPREFIX": f"{folder.parent}/pyc",  # of libraries, for all copies
            "PYTHONDONTWRITEBYTECODE": "",  # each fork would compile everything
            "PYTHONHASHSEED": "0",
        }
        self._server = self._started()

    def _started(self) -> ForkServer:
        return ForkServer(_IMPORTS, environment=self._environment)

    def close(self) -> None:
        self._server.close()

    def tried(self, mutant: Mutant) -> Trial:
        """Run the tests of a mutant's module, which take up to ``most_s`` in all, until one fails."""
        left_s, left_out = self._most_s, list[str]()
        for file in tests_of(mutant.module):
            known = self._known.get(file, self._measured)
            left_out += known.failing
            if known.processor_s >= left_s:
                left_out.append(file.name)
                continue
            left_s -= known.processor_s
            doubtful: list[str] = []
            killer = self._killer(file, mutant, known, doubtful)
            left_out += doubtful
            if killer:
                return Trial(killer, tuple(left_out))
        return Trial("", tuple(left_out))

    def _measured(self, file: Path) -> Unchanged:
        """Run a file without a change. Tests that fail twice are left out."""
        start = monotonic()
        done = self._run(self._most_s + 1, 20 * self._most_s, file)
        wall_s, processor_s, failing = monotonic() - start, inf, list[str]()
        if done and (report := _report(done)) and (done.returncode == 0 or report["failed"]):
            processor_s, failing = report["processor_s"], report["again"]
        if processor_s == inf or failing:
            why = ", ".join(failing) or "does not end here"
            print(f"     left out: {file.name}: {why}", flush=True)
        return Unchanged(processor_s, wall_s, tuple(failing))

    def _killer(self, file: Path, mutant: Mutant, known: Unchanged, doubtful: list[str]) -> str:
        """Return the first test of a file that fails twice because of a change, or how the file ended.

        Tests that fail once become ``doubtful``, and the others run again without them.
        """
        while True:
            options = [f"--deselect={name}" for name in (*known.failing, *doubtful)]
            done = self._changed(mutant, known.limits_s, file, "-x", *options)
            if done is None or done.returncode == -signal.SIGKILL:
                return f"{file.name} does not end"
            if done.returncode in (ExitCode.OK, ExitCode.NO_TESTS_COLLECTED):
                return ""  # without tests: all fail here without a change
            report = _report(done)
            if not report.get("failed"):
                return f"{file.name} ends with {done.returncode}"
            if report["again"]:
                return str(report["again"][0])
            doubtful += report["failed"]

    def _changed(
        self, mutant: Mutant, limits_s: tuple[float, float], file: Path, *options: str
    ) -> "subprocess.CompletedProcess[str] | None":
        path = self._package / mutant.module
        source, before = path.read_text(), path.stat().st_mtime
        self._number += 1
        path.write_text(mutant.of(source))
        utime(path, (self._number, self._number))  # no cached bytecode has this time
        try:
            return self._run(*limits_s, file, *options)
        finally:
            path.write_text(source)
            utime(path, (before, before))

    def _run(
        self, processor_s: float, wall_s: float, file: Path, *options: str
    ) -> "subprocess.CompletedProcess[str] | None":
        """Run a file of tests; return None if it does not end."""
        path = self._folder / file.relative_to(ROOT)
        arguments = (int(processor_s), *_OPTIONS, *options, path)
        try:
            return self._server.run(_RUN, *arguments, folder=self._folder, timeout_s=wall_s)
        except (subprocess.TimeoutExpired, AssertionError, OSError):
            self._server.close()
            self._server = self._started()  # it hung, or killed its server
            return None


def _report(done: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    """Return what ``_RUN`` prints at its end, or nothing if it did not come so far."""
    *_, last = done.stdout.splitlines() or [""]
    report: dict[str, Any] = json.loads(last) if last.startswith('{"processor_s"') else {}
    return report
