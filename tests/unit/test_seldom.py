"""Tests of parts that have not changed are left to the night, and no others."""

from pathlib import Path

import pytest
import seldom
from factories import git


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with two commits, of which the second changed the page."""
    monkeypatch.delenv("WEIGHIN_CI_BASE", raising=False)
    git(tmp_path, "init", "-q")
    for name in ("README.md", "page.md"):
        (tmp_path / name).write_text("a")
        git(tmp_path, "add", ".")
        git(tmp_path, "commit", "-qm", name)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "runs"),
    [
        ("docs/index.md", {"browser"}),
        ("mkdocs.yml", {"browser"}),
        ("mkdocs.yml.bak", set()),
        ("harness/weighin/stream/load_streaming.py", {"zoo", "types"}),
        ("harness/weighin/plan/start.py", {"fleet"}),
        ("tests/zoo/entries.py", {"zoo"}),
        ("tests/model_differences.py", {"zoo", "judges"}),  # which the zoo imports
        ("tests/conftest.py", {"fleet", "installed", "browser", "zoo", "types"}),
    ],
)
def test_a_part_runs_if_its_paths_its_tests_or_their_helpers_changed(
    repository: Path, changed: str, runs: set[str]
) -> None:
    (repository / changed).parent.mkdir(parents=True, exist_ok=True)
    (repository / changed).write_text("b")  # not committed
    assert {*seldom.PARTS} - {*seldom.unchanged(repository)} == runs
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "b")
    assert {*seldom.PARTS} - {*seldom.unchanged(repository)} == runs


def test_a_branch_is_compared_with_where_it_began(repository: Path) -> None:
    git(repository, "update-ref", "refs/remotes/origin/main", "HEAD~1")
    assert seldom.base(repository) == git(repository, "rev-parse", "HEAD~1")
    git(repository, "update-ref", "refs/remotes/origin/main", "HEAD")
    assert seldom.base(repository) == git(repository, "rev-parse", "HEAD~1")


def test_everything_runs_where_nothing_can_be_compared(
    repository: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seldom.unchanged(repository) == [*seldom.PARTS]
    shallow, plain = tmp_path_factory.mktemp("shallow"), tmp_path_factory.mktemp("plain")
    git(shallow, "clone", "-q", "--depth=1", f"file://{repository}", "clone")
    assert seldom.unchanged(shallow / "clone") == []
    assert seldom.unchanged(plain) == []
    for given in ("", "no-such-commit"):
        monkeypatch.setenv("WEIGHIN_CI_BASE", given)
        assert seldom.unchanged(repository) == []
    monkeypatch.delenv("WEIGHIN_CI_BASE")
    git(repository, "reset", "-q", "--hard", "HEAD~1")  # the first commit
    assert seldom.unchanged(repository) == []


def test_every_part_has_tests_and_paths() -> None:
    for part, (names, paths) in seldom.PARTS.items():
        known = {path.name for path in seldom.TESTS.rglob("*")}
        functions = "".join(path.read_text() for path in seldom.TESTS.rglob("test_*.py"))
        assert any(name in known or f"def {name}(" in functions for name in names.split()), part
        assert [path for path in paths.split() if not (seldom.ROOT / path).exists()] == []
