"""Change the code in one small way at a time, and tell which changes no unit test notices.

    PYTHONPATH=harness:tests python tests/mutation [--sample N] [--seed N] [MODULE ...]     (make mutation)

A mutant is a module with one change of ``operators``. It is killed if one of its module's tests fails or
does not end. These are the files of tests that import the module or have a word of its name: up to eight
files, and a minute in all. All need neither root, nor cgroups, nor an engine. Without ``--sample``, every
mutant is tried, which takes a day.

A mutant may do anything, such as kill processes that it should not. As root, this program therefore
becomes the user nobody, in a pid namespace of its own; as another user, that user's processes are at risk.
"""

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from time import monotonic
from typing import Final
from xml.etree import ElementTree

from chosen_tests import in_time, tests_of
from fork_server import ForkServer
from operators import Mutant, mutants

ROOT: Final = Path(__file__).resolve().parents[2]
MODULES: Final = ("isolation", "gate", "records", "predict", "run")
_MARKERS: Final = "vm fresh nightly cgroup docker cuda ray browser fuse compiler index root slow"
_WITHOUT: Final = " and ".join(f"not {marker}" for marker in _MARKERS.split())
_IMPORTS: Final = "import pytest, torch"
_RUN: Final = "import sys, pytest; sys.exit(int(pytest.main(sys.argv[1:])))"
_OPTIONS: Final = ("-q", "-p", "no:cacheprovider", "-m", _WITHOUT)
# The environment may lie in root's home, so that nobody must be able to search it.
_SEARCH: Final = "-all,+dac_read_search"
_NOBODY: Final = (
    "--reuid=65534", "--regid=65534", "--clear-groups", f"--inh-caps={_SEARCH}",
    f"--ambient-caps={_SEARCH}",
)  # fmt: skip
_APART: Final = ("unshare", "--pid", "--mount-proc", "--fork", "--kill-child", "setpriv", *_NOBODY)


class Copy:
    """A copy of the code to change, and a process that runs tests of it."""

    def __init__(self, folder: Path) -> None:
        self._harness = folder / "harness"
        shutil.copytree(
            ROOT / "harness", self._harness, ignore=shutil.ignore_patterns("__pycache__")
        )
        for other in ROOT.iterdir():
            if other.name not in ("harness", ".git"):
                (folder / other.name).symlink_to(other)
        paths = [str(self._harness), str(ROOT / "tests")]
        os.environ |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONPYCACHEPREFIX": f"{folder}/pyc"}
        os.environ |= {"HOME": str(folder), "TMPDIR": str(folder)}
        self._report = folder / "report.xml"
        self._number = 0
        self._server = ForkServer(_IMPORTS)

    def close(self) -> None:
        self._server.close()

    def seconds(self, files: Iterable[Path]) -> dict[Path, float]:
        """Run tests of the code without a change; return the time of each file whose tests pass here."""
        options = (*_OPTIONS, f"--junitxml={self._report}", *files)
        done = self._server.run(_RUN, *options, folder=ROOT, timeout_s=3600)
        if not self._report.exists():
            sys.exit(done.stdout + done.stderr)
        cases = [(f".{case.get('classname')}.{case.get('name')}.", case)
                 for case in ElementTree.parse(self._report).iter("testcase")]  # fmt: skip
        of_file = {
            file: [case for name, case in cases if f".{file.stem}." in name] for file in files
        }
        return {
            file: sum(float(case.get("time", 0)) for case in found)
            for file, found in of_file.items()
            if not any(case.find(bad) is not None for case in found for bad in ("failure", "error"))
        }

    def survives(self, mutant: Mutant, files: Sequence[Path], timeout_s: float) -> bool:
        """Tell whether all tests in these files pass with this change, within this time."""
        path = self._harness / "weighin" / mutant.module
        source, before = path.read_text(), path.stat().st_mtime
        if not files:
            return True
        self._number += 1
        path.write_text(mutant.of(source))
        os.utime(path, (self._number, self._number))  # no cached bytecode has this time
        try:
            return (
                self._server.run(
                    _RUN, "-x", *_OPTIONS, *files, folder=ROOT, timeout_s=timeout_s
                ).returncode
                == 0
            )
        except (
            subprocess.TimeoutExpired,
            AssertionError,
            OSError,
        ):  # it hung, or killed its server
            self._server = ForkServer(_IMPORTS)
            return False
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
    parser.add_argument("--least", type=float, default=0, help="fail if fewer per cent are killed")
    asked = parser.parse_args()
    if os.geteuid() == 0:
        os.execvp(_APART[0], [*_APART, sys.executable, *sys.orig_argv[1:]])
    found = list(_all(asked.modules))
    drawn = random.Random(asked.seed).sample(
        range(len(found)), min(asked.sample or len(found), len(found))
    )
    tried = [found[index] for index in sorted(drawn)]
    files = {file for mutant in tried for file in tests_of(mutant.module)}
    print(f"{len(tried)} of {len(found)} mutants, {len(files)} files of tests", flush=True)
    with (
        tempfile.TemporaryDirectory(prefix="mutants-") as folder,
        closing(Copy(Path(folder))) as code,
    ):
        seconds = code.seconds(files)
        print(
            "left out, because they fail here:",
            *sorted(file.name for file in files - seconds.keys()),
        )
        alive = []
        for number, mutant in enumerate(tried, 1):
            start = monotonic()
            ours = in_time(tests_of(mutant.module), seconds)
            if survives := code.survives(
                mutant, ours, 60 + 5 * sum(seconds[each] for each in ours)
            ):
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
