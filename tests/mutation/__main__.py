"""Change the code in one small way at a time, and tell which changes no unit test notices.

    PYTHONPATH=harness:tests python tests/mutation [--sample N] [--seed N] [--minutes N] [MODULE ...]     (make mutation)

A mutant is a module with one change of ``operators``. It is killed if one of its module's tests fails or
does not end. ``chosen_tests`` names five files of these tests, which run one after the other until one fails. All
need neither root, nor cgroups, nor an engine; those that fail here without a change, or exceed ``--minutes`` in all, are left out. Without ``--sample``, every
mutant is tried, which takes a day.

A mutant may do anything, such as kill processes that it should not. As root, this program therefore
becomes the user nobody, in a pid namespace of its own; as another user, that user's processes are at risk.
"""

import argparse
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from math import inf
from pathlib import Path
from time import monotonic
from typing import Final

import pytest
from chosen_tests import tests_of
from fork_server import ForkServer
from operators import Mutant, mutants

ROOT: Final = Path(__file__).resolve().parents[2]
MODULES: Final = ("isolation", "gate", "records", "predict", "run")
_MARKERS: Final = "vm fresh nightly cgroup docker cuda ray browser fuse compiler index root slow"
_WITHOUT: Final = " and ".join(f"not {marker}" for marker in _MARKERS.split())
_IMPORTS: Final = "import pytest, torch"
_RUN: Final = "import sys, pytest; sys.exit(int(pytest.main(sys.argv[1:])))"
_FAILED: Final = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", re.MULTILINE)
_LARGE: Final = (
    ".git",
    ".venv",
    ".mypy",
    ".ruff",
    ".pytest",
    ".hypothesis",
    "results",
)  # not copied
_OPTIONS: Final = ("-q", "-p", "no:cacheprovider", "-m", _WITHOUT)
# The environment may lie in root's home, so that nobody must be able to search it.
_SEARCH: Final = "-all,+dac_read_search"
_NOBODY: Final = (
    "--reuid=65534", "--regid=65534", "--clear-groups", f"--inh-caps={_SEARCH}",
    f"--ambient-caps={_SEARCH}",
)  # fmt: skip
_APART: Final = (
    "unshare", "--pid", "--mount-proc", "--fork", "--kill-child",
    "sh", "-c", '"$@"; exit "$?"', "sh",  # the first process of a namespace reaps orphans
    "setpriv", *_NOBODY,
)  # fmt: skip


class Copy:
    """A copy of the repository, whose code is changed, and a process that runs its tests."""

    def __init__(self, folder: Path, most_s: float) -> None:
        self._most_s = most_s
        self._folder = folder / ROOT.name
        self._package = self._folder / "harness" / "weighin"
        self._folder.mkdir()
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
        paths = [str(self._folder / name) for name in ("harness", "tests")]
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONPYCACHEPREFIX": f"{folder}/pyc"}
        writable = ("HOME", "TMPDIR", "HYPOTHESIS_STORAGE_DIRECTORY")
        os.environ |= dict.fromkeys(writable, str(folder))
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each fork would compile everything
        self._known: dict[Path, float] = {}
        self._failing: dict[Path, list[str]] = {}
        self._number = 0
        self._server = ForkServer(_IMPORTS)

    def close(self) -> None:
        self._server.close()

    def tests(self, module: str) -> Iterator[Path]:
        """Yield the files of tests for a module that end without a change, in ``most_s`` in all."""
        left_s = self._most_s
        for file in tests_of(module):
            if (seconds := self._seconds(file)) < left_s:
                left_s -= seconds
                yield file

    def _seconds(self, file: Path) -> float:
        """Return the time that a file of tests takes; infinite if it takes longer than all may.

        Tests that fail without a change are left out from then on.
        """
        if file not in self._known:
            start = monotonic()
            done = self._run(file, self._most_s, "-rfE", "--tb=no")
            self._known[file], why = inf, "does not end here"
            if done:
                failing = [found[1] for found in _FAILED.finditer(done.stdout)]
                self._failing[file], why = failing, ", ".join(failing)
                if done.returncode in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
                    self._known[file] = monotonic() - start
            if why:
                print(f"     left out: {file.name}: {why}", flush=True)
        return self._known[file]

    def _run(
        self, file: Path, timeout_s: float, *options: str
    ) -> "subprocess.CompletedProcess[str] | None":
        """Run a file of tests; return None if it does not end."""
        options += tuple(f"--deselect={name}" for name in self._failing.get(file, ()))
        path = self._folder / file.relative_to(ROOT)
        try:
            return self._server.run(
                _RUN, *_OPTIONS, *options, path, folder=self._folder, timeout_s=timeout_s
            )
        except (
            subprocess.TimeoutExpired,
            AssertionError,
            OSError,
        ):  # it hung, or killed its server
            self._server = ForkServer(_IMPORTS)
            return None

    def survives(self, mutant: Mutant) -> bool:
        """Tell whether all tests of its module pass with this change."""
        return all(self._passes(file, mutant) for file in self.tests(mutant.module))

    def _passes(self, file: Path, mutant: Mutant) -> bool:
        path = self._package / mutant.module
        source, before = path.read_text(), path.stat().st_mtime
        self._number += 1
        path.write_text(mutant.of(source))
        os.utime(path, (self._number, self._number))  # no cached bytecode has this time
        try:
            done = self._run(file, self._most_s + 5 * self._seconds(file), "-x")
            none_left = pytest.ExitCode.NO_TESTS_COLLECTED  # all fail here without a change
            return done is not None and done.returncode in (pytest.ExitCode.OK, none_left)
        finally:
            path.write_text(source)
            os.utime(path, (before, before))


def _all(names: Sequence[str]) -> Iterator[Mutant]:
    package = ROOT / "harness" / "weighin"
    for name in names:
        given = package / name
        for file in sorted(given.rglob("*.py")) if given.is_dir() else [given]:
            yield from mutants(str(file.relative_to(package)), file.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument(
        "modules", nargs="*", default=MODULES, help="files or folders in harness/weighin"
    )
    parser.add_argument("--sample", type=int, help="try so many mutants, drawn at random")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the draw: the same seed, the same mutants"
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=1,
        help="leave out tests of a module that take longer in all: more on a busy machine",
    )
    parser.add_argument("--least", type=float, default=0, help="fail if fewer per cent are killed")
    asked = parser.parse_args()
    if os.geteuid() == 0:
        os.execvp(_APART[0], [*_APART, sys.executable, *sys.orig_argv[1:]])
    found = list(_all(asked.modules))
    drawn = random.Random(asked.seed).sample(
        range(len(found)), min(asked.sample or len(found), len(found))
    )
    tried = [found[index] for index in sorted(drawn)]
    print(f"{len(tried)} of {len(found)} mutants", flush=True)
    alive = []
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        closing(Copy(Path(folder), 60 * asked.minutes)) as code,
    ):
        for number, mutant in enumerate(tried, 1):
            start = monotonic()
            if survives := code.survives(mutant):
                alive.append(mutant)
            word = "survives" if survives else "killed"
            print(f"{number:4} {word:8} {monotonic() - start:5.1f} s  {mutant}", flush=True)
    score = 100 * (len(tried) - len(alive)) / max(len(tried), 1)
    print(f"\n{score:.1f} % killed: {len(tried) - len(alive)} of {len(tried)}. Survivors:")
    print(
        *(mutant.shown((ROOT / "harness/weighin" / mutant.module).read_text()) for mutant in alive),
        sep="\n",
    )
    return int(score < asked.least)


if __name__ == "__main__":
    sys.exit(main())
