"""Tests that take minutes, of parts that few changes touch: by day they run only if their part has changed.

A part has changed if a file is another one than in the commit ``WEIGHIN_CI_BASE`` (by default that in which
this branch left origin/main, else the one before): a file below its paths, one of its tests, or what these
import of tests/. Files that are not committed count. Without git or that commit, and with an empty
``WEIGHIN_CI_BASE``, everything runs; so does a test whose file or folder is named on the command line.
``make test-nightly`` always runs them.
"""

import ast
import os
import subprocess
from collections.abc import Container, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
TESTS: Final = ROOT / "tests"
PARTS: Final = {
    "fleet": ("fleet", "harness/weighin/fleet harness/weighin/plan harness/weighin/run/runner.py configs/fleet"),
    "installed": (
        "installed",
        "pyproject.toml action.yml docs/ci.md" " harness/weighin/__init__.py harness/weighin/__main__.py harness/weighin/testing",
    ),
    "browser": ("browser", "docs mkdocs.yml pages harness/weighin/show"),
    "zoo": ("test_zoo.py", "tests/zoo harness/weighin/stream"),
    "types": ("test_model_types.py", "benchmarks/model_types.py harness/weighin/models harness/weighin/stream"),
    "judges": (
        "test_the_judge_finds_what_is_wrong_lost_and_left test_values_that_differ_are_called_wrong"
        " test_a_plain_load_passes_the_check test_a_plain_load_passes_every_known_case",
        "tests/faults tests/checkpoints tests/conformance tests/model_differences.py tests/cells.py",
    ),
}  # fmt: skip
"""Of each part the names of its tests' folders, files or functions, and the paths that are tested."""


def part_of(path: Path, function: str = "") -> str:
    """Return the part to which a test belongs; empty if it always runs."""
    names = {*path.relative_to(TESTS).parts, function} if path.is_relative_to(TESTS) else set()
    return next((part for part, (tests, _) in PARTS.items() if names & {*tests.split()}), "")


def unchanged(root: Path = ROOT) -> list[str]:
    changed = _changed(root)
    return [] if changed is None else [part for part in PARTS if not _is_in(part, changed)]


def base(root: Path = ROOT) -> str:
    """Return the commit with which the files are compared; empty if there is none."""
    if (given := os.environ.get("WEIGHIN_CI_BASE")) is not None:
        return given
    if _git(root, "rev-parse", "--is-shallow-repository") != ["false"]:
        return ""
    (head,) = _git(root, "rev-parse", "HEAD") or [""]
    (left,) = _git(root, "merge-base", "HEAD", "origin/main") or [head]
    return left if left != head else "".join(_git(root, "rev-parse", "--verify", "HEAD~1") or [])


def _changed(root: Path) -> set[str] | None:
    """Return the files that are others than in the base, or None if nothing can be compared."""
    compared = _git(root, "diff", "--name-only", commit) if (commit := base(root)) else None
    new = _git(root, "ls-files", "--others", "--exclude-standard")
    return None if compared is None or new is None else {*compared, *new}


def _git(root: Path, *words: str) -> list[str] | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return done.stdout.splitlines() if done.returncode == 0 else None


def _is_in(part: str, changed: Iterable[str]) -> bool:
    own = {f"{path.relative_to(ROOT)}" for test in _tests(part) for path in with_helpers(test)}
    below = tuple(f"{path}/" for path in PARTS[part][1].split())
    return any(f"{one}/".startswith(below) or one in own for one in changed)


def _tests(part: str) -> Iterator[Path]:
    return (path for path in TESTS.rglob("test_*.py") if part_of(path) == part)


@cache
def imported(file: Path) -> frozenset[str]:
    """Return the names of the modules that a file imports, and of what it takes of them."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(names)


def helpers(file: Path, without: Container[str] = ()) -> set[Path]:
    folders = {file.parent, TESTS, *(TESTS / name for name in ("unit", "contract", "integration"))}
    stems = {name.partition(".")[0] for name in imported(file)}
    found = {folder / f"{stem}.py" for folder in folders for stem in stems if stem not in without}
    return {path for path in found if path.exists() and not path.name.startswith("test_")}


def with_helpers(file: Path) -> set[Path]:
    """Return a file, its conftest.py, and all modules of the tests that it needs."""
    found, new = set[Path](), {file, *(folder / "conftest.py" for folder in file.parents)}
    new = {path for path in new if path.exists() and TESTS in path.parents}
    while new:
        found |= new
        new = {helper for path in new for helper in helpers(path)} - found
    return found
