"""Whether a run's figures are of the code as it is, or of older code: by hash, else by git."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from weighin.errors import HarnessError
from weighin.record import Outcome, Result
from weighin.records import sources
from weighin.suite import registry


@dataclass(frozen=True, slots=True)
class Standing:
    """What became of the code since a run was measured.

    Attributes:
        changed: by strategy whose code differs: how, in words ("3 commits since").
        unknown: by strategy of which it cannot be told: why.
    """

    changed: dict[str, str]
    unknown: dict[str, str]

    @property
    def is_stale(self) -> bool:
        return bool(self.changed)

    def __str__(self) -> str:
        parts = []
        if self.changed:
            parts.append(f"OLDER than its code: {_listed(self.changed)}")
        if self.unknown:
            parts.append(f"cannot tell: {_listed(self.unknown)}")
        return "; ".join(parts) or "of its code as it is"


def standing(results: Sequence[Result], root: Path) -> Standing:
    """Compare the code that was measured with what ``root``, a git work tree, holds now."""
    changed: dict[str, str] = {}
    unknown: dict[str, str] = {}
    asked: set[tuple[object, ...]] = set()
    for one in results:
        cell = one.cell
        commit = one.environment.get("git_commit")
        key = (cell.strategy, cell.operation, cell.model.builder, one.sources_hash, commit)
        if one.outcome is Outcome.SKIPPED or key in asked:
            continue
        asked.add(key)
        try:
            path = registry.strategy(cell.strategy, cell.operation).path
        except HarnessError:
            changed[cell.strategy] = "gone"
            continue
        if one.sources_hash:
            if one.sources_hash != sources.hashed(path, cell):
                changed[cell.strategy] = "other sources"
        else:
            _ask_git(root, commit, sources.deciding(path, cell), cell.strategy, changed, unknown)
    return Standing(changed, unknown)


def _ask_git(
    root: Path,
    commit: str | None,
    files: Sequence[Path],
    strategy: str,
    changed: dict[str, str],
    unknown: dict[str, str],
) -> None:
    """Note what git knows of the files since the commit, for records without a hash.

    What was imported then and is no longer shows in the file that imported it.
    """
    if not commit:
        unknown[strategy] = "its commit is not known"
    elif (said := since(root, commit, files)) is None:
        unknown[strategy] = f"git does not know {commit[:10]}"
    elif said:
        changed[strategy] = said


def since(root: Path, commit: str, files: Sequence[Path]) -> str | None:
    """Return what became of files since a commit, in words: empty: nothing; None: git does not know."""
    names = [str(path) for path in files]
    commits = _git(root, "log", "--format=%h", f"{commit}..HEAD", "--", *names)
    edited = _git(root, "status", "--porcelain", "--", *names)
    if commits is None or edited is None:
        return None
    number = len(commits.split())
    words = [f"{number} {'commit' if number == 1 else 'commits'} since"] if number else []
    words += ["edited"] if edited.strip() else []
    return " and ".join(words)


def _git(root: Path, *arguments: str) -> str | None:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _listed(said: dict[str, str]) -> str:
    """Return who and what, those of whom the same is said together."""
    together: dict[str, list[str]] = {}
    for who, what in said.items():
        together.setdefault(what, []).append(who)
    return "; ".join(f"{', '.join(names)} ({what})" for what, names in together.items())
