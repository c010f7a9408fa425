"""Which code was measured: the commit of the folder that a run was started in."""

import subprocess
from pathlib import Path

import pytest

from harness import __version__, environment


def git(folder: Path, *arguments: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
    ended = subprocess.run(
        ["git", *who, *arguments], cwd=folder, check=True, capture_output=True, text=True
    )
    return ended.stdout.strip()


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "loader.py").write_text("first")
    git(tmp_path, "add", "loader.py")
    git(tmp_path, "commit", "--quiet", "--message", "first")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commit_of_the_folder_that_a_run_is_started_in(tree: Path) -> None:
    commit = git(tree, "rev-parse", "HEAD")
    assert environment.code() == {
        "weighin": __version__,
        "git_commit": commit,
        "git_dirty": False,
    }
    (tree / "results.csv").write_text("not tracked")
    assert environment.code()["git_dirty"] is False
    (tree / "loader.py").write_text("second")
    assert environment.code()["git_dirty"] is True


def test_a_folder_without_a_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    nothing = {"weighin": __version__, "git_commit": None, "git_dirty": None}
    assert environment.code() == nothing
    git(tmp_path, "init", "--quiet")
    assert environment.code() == nothing


def test_a_machine_without_git(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tree))
    assert environment.code()["git_commit"] is None
