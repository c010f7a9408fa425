"""Find out from git whether a run was measured with the current code."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from pages import sources
from weighin.errors import HarnessError
from weighin.records.metrics import grouped
from weighin.result import Outcome, Result
from weighin.suite import registry

_NAMED: Final = 3


@dataclass(frozen=True, slots=True)
class Standing:
    """The changes of the code since a run was measured.

    Attributes:
        changed: maps each strategy whose code changed to the change ("reads.py changed").
        unknown: maps each strategy that cannot be compared to the reason.
    """

    changed: dict[str, str]
    unknown: dict[str, str]

    @property
    def is_stale(self) -> bool:
        return bool(self.changed)

    def __str__(self) -> str:
        parts = []
        if self.changed:
            parts.append(f"OLDER than the current code: {_listed(self.changed)}")
        if self.unknown:
            parts.append(f"cannot tell: {_listed(self.unknown)}")
        return "; ".join(parts) or "measured with the current code"


def standing(results: Sequence[Result], root: Path) -> Standing:
    """Compare the code that was measured with the current code in ``root``, a git work tree."""
    changed: dict[str, str] = {}
    unknown: dict[str, str] = {}
    compared: set[tuple[object, ...]] = set()
    for result in results:
        cell = result.cell
        commit = result.environment.get("git_commit")
        key = (cell.strategy, cell.operation, cell.model.builder, commit)
        if result.outcome is Outcome.SKIPPED or key in compared:
            continue
        compared.add(key)
        if result.ran:
            unknown[cell.strategy] = "weighin does not record the code of a command"
            continue
        try:
            path = registry.strategy(cell.strategy, cell.operation).path
        except HarnessError:
            changed[cell.strategy] = "strategy removed"
            continue
        # A removed import is noticed too, because the file that contained it has changed.
        if not commit:
            unknown[cell.strategy] = "its commit was not recorded"
        elif (changes := since(root, commit, sources.deciding(path, cell))) is None:
            unknown[cell.strategy] = f"git does not know commit {commit[:10]}"
        elif changes:
            changed[cell.strategy] = changes
    return Standing(changed, unknown)


def since(root: Path, commit: str, files: Sequence[Path]) -> str | None:
    """Name the files whose code has changed since a commit; None if git does not know the commit.

    Comments, docstrings and the texts of raised errors are no code here.
    """
    names = [str(path.relative_to(root)) for path in files]
    differing = _git(root, "diff", "--name-only", "--relative", commit, "--", *names)
    if differing is None:
        return None
    changed = [
        Path(name).name
        for name in differing.decode().split()
        if _digest_then(root, commit, name) != sources.digest_of_file(root / name)
    ]
    if not changed:
        return ""
    more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
    return f"{', '.join(changed[:_NAMED])}{more} changed"


@cache
def _digest_then(root: Path, commit: str, name: str) -> str | None:
    """Return the hash of a file's code at a commit; None if the file did not exist."""
    then = _git(root, "show", f"{commit}:./{name}")
    return None if then is None else sources.digest_of_code(then)


def _git(root: Path, *arguments: str) -> bytes | None:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else None


def _listed(texts: dict[str, str]) -> str:
    """Return strategies with their texts; strategies with the same text are grouped."""
    groups = grouped(texts, texts.__getitem__)
    return "; ".join(f"{', '.join(names)} ({text})" for text, names in groups.items())
