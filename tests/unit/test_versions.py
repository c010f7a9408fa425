"""`make test-versions`, with a Python that pretends: what it installs, and what its table says."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Plays python3.99, its environments, pip, torch and pytest; says in a file what was asked.
PYTHON = """#!/bin/sh
echo "$@" >>"$CALLS"
case "$*" in
    *ensurepip*) echo 3.99 ;;
    *"-m venv"*) mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
    *"-m pip"*) exit "${PIP_STATUS:-0}" ;;
    *platform*) echo 2.99.1 3.99.7 ;;
    *"-m pytest"*)
        echo '<testsuites><testsuite tests="9" failures="'$FAILED'" errors="0" skipped="2"/></testsuites>' \\
            >"${0%/bin/python}/report.xml"
        [ "$FAILED" = 0 ] ;;
esac
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree with the program, and a folder with programs."""
    shutil.copytree(ROOT / "tests/versions", tmp_path / "tests/versions")
    for name in ("pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "bin").mkdir()
    return tmp_path


def put_python(tree: Path, text: str = PYTHON) -> None:
    (tree / "bin/python3.99").write_text(text)
    (tree / "bin/python3.99").chmod(0o755)


def run(tree: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    places = {"PATH": f"{tree / 'bin'}:{os.environ['PATH']}", "CALLS": str(tree / "calls")}
    return subprocess.run(
        [sys.executable, tree / "tests/versions", *arguments],
        env={**os.environ, "PAIRS": "", "PYENV_ROOT": str(tree), **places, **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def table(done: subprocess.CompletedProcess[str]) -> list[list[str]]:
    return [line.split() for line in done.stdout.splitlines() if line]


def test_a_table_says_how_many_tests_passed_with_each_pair(tree: Path) -> None:
    put_python(tree)
    done = run(tree, "newest:3.99", FAILED="0")
    assert done.returncode == 0, done.stderr
    head, row = table(done)
    assert head == ["torch", "python", "passed", "failed", "errors", "skipped", "seconds"]
    assert row[:6] == ["2.99.1", "3.99.7", "7", "0", "0", "2"]


def test_a_test_that_fails_fails_the_run_and_the_other_pairs_are_tried(tree: Path) -> None:
    put_python(tree)
    done = run(tree, PAIRS="2.7.0:3.99 newest:3.99", FAILED="1")
    assert done.returncode == 1
    assert [row[2:5] for row in table(done)[1:]] == [["6", "1", "0"]] * 2


def test_the_oldest_torch_is_the_one_that_the_project_promises(tree: Path) -> None:
    put_python(tree)
    run(tree, "oldest:3.99", FAILED="0", PIP_ARGS="--index-url 'a b'")
    (pip,) = [one for one in (tree / "calls").read_text().splitlines() if "-m pip" in one]
    assert "--index-url a b torch==2.6 --constraint" in pip
    pinned = (tree / ".venv-versions/constraints.txt").read_text()
    assert "numpy==" in pinned
    assert not {"torch", "sympy"} & {line.partition("==")[0] for line in pinned.splitlines()}


def test_arguments_after_two_dashes_are_for_pytest(tree: Path) -> None:
    put_python(tree)
    run(tree, "newest:3.99", "--remove", "--", "-k", "a or b", FAILED="0")
    last = (tree / "calls").read_text().splitlines()[-1]
    assert last.endswith("tests/conformance -k a or b")
    assert [one.name for one in (tree / ".venv-versions").iterdir()] == ["constraints.txt"]


def test_every_file_that_is_named_is_there(tree: Path) -> None:
    put_python(tree)
    run(tree, "newest:3.99", FAILED="0")
    last = (tree / "calls").read_text().splitlines()[-1]
    named = [word for word in last.split() if word.startswith("tests/")]
    assert named
    assert [one for one in named if not (ROOT / one).exists()] == []


def test_half_an_environment_is_made_anew(tree: Path) -> None:
    put_python(tree)
    done = run(tree, "newest:3.99", FAILED="0", PIP_STATUS="1")
    assert done.returncode == 1
    assert "pip could not install torch: see above (status 1)" in done.stderr
    assert "pip could not install torch" in done.stdout
    for made in (2, 2):  # anew after the failure; kept after the success
        assert run(tree, "newest:3.99", FAILED="0").returncode == 0
        assert (tree / "calls").read_text().count("-m venv --clear") == made


def test_a_python_that_is_missing_is_named_with_where_it_was_looked_for(tree: Path) -> None:
    put_python(tree, "#!/bin/sh\necho 'pyenv: python3.99: command not found' >&2; exit 127\n")
    done = run(tree, "newest:3.99")
    assert done.returncode == 1
    assert done.stderr == (
        "versions: no Python 3.99 here: looked in PATH and among pyenv's versions\n"
        f"  {tree}/bin/python3.99: pyenv: python3.99: command not found\n"
        f"  {sys.executable}: is Python {sys.version_info[0]}.{sys.version_info[1]}\n"
        "  install one: pyenv install 3.99, or the packages python3.99 and python3.99-venv\n"
    )
    assert "no Python 3.99 here" in done.stdout


def test_what_is_no_pair_is_refused(tree: Path) -> None:
    done = run(tree, "2.6.0-3.11")
    assert done.returncode == 2
    assert "'2.6.0-3.11' is no pair: write it as 2.6.0:3.11, oldest:3.11 or" in done.stderr
