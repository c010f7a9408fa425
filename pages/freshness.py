"""Find out from git whether a run was measured with the current code.

The code that affects a cell's figures is the strategy's file and, from weighin's folders ``_DECIDING``, the
worker, the model's builder and all modules that these files import. Modules directly in the folder weighin, such as
``result.py``, affect no figure, nor does the code that observes a cell from outside. No module is imported for it.
Comments, docstrings and the texts of raised errors are no code here.
"""

import ast
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import weighin
from weighin.cell import Cell, Operation
from weighin.errors import HarnessError
from weighin.records.metrics import grouped
from weighin.result import Outcome, Result
from weighin.strategy import HELPERS
from weighin.suite import registry
from weighin.text import few

_PACKAGE: Final = Path(weighin.__file__).resolve().parent
_DECIDING: Final = ("worker", "checkpoint", "formats", "stream", "models")
# A test's body is not a strategy, and the code of saves takes no part in a load.
_NOT_FOLLOWED: Final[dict[Operation, tuple[str, ...]]] = {
    "load": ("weighin.worker.pytest_body", "weighin.worker.saving"),
    "save": ("weighin.worker.pytest_body",),
}


@dataclass(frozen=True, slots=True)
class Standing:
    """The changes of the code since a run was measured.

    Attributes:
        changed: maps each strategy whose code changed to the change ("reads.py changed").
        unknown: maps each strategy that cannot be compared to the reason.
    """

    changed: dict[str, str]
    unknown: dict[str, str]

    def __str__(self) -> str:
        parts = []
        for words, of in (
            ("OLDER than the current code", self.changed),
            ("cannot tell", self.unknown),
        ):
            groups = grouped(of, of.__getitem__)
            texts = (f"{', '.join(names)} ({text})" for text, names in groups.items())
            parts += [f"{words}: {'; '.join(texts)}"] if of else []
        return "; ".join(parts) or "measured with the current code"


def standing(results: Sequence[Result], root: Path) -> Standing:
    """Compare the code that was measured with the current code in ``root``, a git work tree."""
    found = Standing({}, {})
    measured = {
        (one.cell.strategy, one.cell.operation, one.cell.model.builder, one.environment.get("git_commit")): one
        for one in reversed(results)
        if one.outcome is not Outcome.SKIPPED
    }  # fmt: skip
    for result in reversed(measured.values()):
        cell, commit = result.cell, result.environment.get("git_commit")
        if result.ran:
            found.unknown[cell.strategy] = "weighin does not record the code of a command"
            continue
        try:
            path = registry.strategy(cell.strategy, cell.operation).path
        except HarnessError:
            found.changed[cell.strategy] = "strategy removed"
            continue
        # A removed import is noticed too, because the file that contained it has changed.
        if not commit:
            found.unknown[cell.strategy] = "its commit was not recorded"
        elif (changes := since(root, commit, deciding(path, cell))) is None:
            found.unknown[cell.strategy] = f"git does not know commit {commit[:10]}"
        elif changes:
            found.changed[cell.strategy] = changes
    return found


def since(root: Path, commit: str, files: Iterable[Path]) -> str | None:
    """Name the files whose code has changed since a commit; None if git does not know the commit."""
    names = sorted(str(path.relative_to(root)) for path in files)
    differing = _git(root, "diff", "--name-only", "--relative", commit, "--", *names)
    if differing is None:
        return None
    changed = [
        Path(name).name
        for name in differing.decode().split()
        if _code_then(root, commit, name) != code_of((root / name).read_bytes())
    ]
    return f"{few(changed)} changed" if changed else ""


@cache
def _code_then(root: Path, commit: str, name: str) -> str | None:
    """Return a file's code at a commit; None if the file did not exist."""
    then = _git(root, "show", f"{commit}:./{name}")
    return None if then is None else code_of(then)


def _git(root: Path, *arguments: str) -> bytes | None:
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    done = subprocess.run(command, capture_output=True, check=False)
    return done.stdout if done.returncode == 0 else None


def deciding(strategy: Path, cell: Cell) -> set[Path]:
    """Return the files of code that affect what ``cell`` measures.

    ``strategy`` is the file of the cell's strategy, the only included file of a user's own code.
    """
    names = ["weighin.worker.__main__", cell.model.builder.partition(":")[0]]
    todo = [strategy.resolve(), *(path for name in names for path in _files(name, cell.operation))]
    reached: set[Path] = set()
    while todo:
        path = todo.pop()
        if path not in reached:
            reached.add(path)
            for name in _imports(path, path.stat().st_mtime_ns):
                todo += _files(name, cell.operation)
    folders = [_PACKAGE / name for name in _DECIDING]
    ours = (path for path in reached if any(path.is_relative_to(folder) for folder in folders))
    return {strategy.resolve(), *ours}


def _files(name: str, operation: Operation) -> Iterator[Path]:
    """Yield the files that run when a module of weighin, or an object in it, is imported by its name."""
    parts = name.split(".")
    if parts[0] != _PACKAGE.name or name.startswith(_NOT_FOLLOWED[operation]):
        return
    path = _PACKAGE.parent
    for part in parts:
        path = path / part
        for file in (path / "__init__.py", path.with_suffix(".py")):
            if file.exists():
                yield file


@cache
def _imports(path: Path, _changed_ns: int) -> frozenset[str]:
    """Return the names of all modules and objects that a file imports."""
    return frozenset(_names(ast.parse(path.read_bytes(), filename=str(path))))


def _names(node: ast.AST) -> Iterator[str]:
    """Yield the names that a syntax tree imports, except in a block of ``if TYPE_CHECKING``."""
    if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
        children: Iterable[ast.AST] = node.orelse
    else:
        children = ast.iter_child_nodes(node)
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
        for alias in node.names:
            source = HELPERS.get(alias.name) if node.module == "weighin.strategy" else None
            yield f"{source or node.module}.{alias.name}"
    for child in children:
        yield from _names(child)


def code_of(source: bytes) -> str:
    """Return a file's code, to be compared.

    Raises:
        SyntaxError, ValueError: the file is not Python.
    """
    return ast.dump(_WithoutTexts().visit(ast.parse(source)))


class _WithoutTexts(ast.NodeTransformer):
    """Removes docstrings and the texts of raised errors from a syntax tree."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if _is_text(node.value) else self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> ast.AST:
        for inner in ast.walk(node):
            if isinstance(inner, ast.Constant) and _is_text(inner):
                inner.value = ""
        return node


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
