"""Find the code that affects a cell's figures, and hash it, without importing the code.

The hash leaves out comments, docstrings and the texts of raised errors, which affect no figure. The
files are the strategy's file and, from weighin's folders ``_DECIDING``, the worker, the model's
builder and all modules that these files import. Modules directly in the folder weighin, such as
``result.py``, are left out, because they affect no figure, and so is the code that observes a cell
from outside.
"""

import ast
import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

import weighin
from weighin.cell import Cell, Operation
from weighin.strategy import HELPERS

_PACKAGE: Final = Path(weighin.__file__).resolve().parent
_WORKER: Final = "weighin.worker.__main__"
_DECIDING: Final = (
    "worker",
    "checkpoint",
    "formats",
    "stream",
    "models",
)  # folders here
# A test's body is not a strategy, and the code of saves takes no part in a load.
_NOT_FOLLOWED: Final[dict[Operation, tuple[str, ...]]] = {
    "load": ("weighin.worker.pytest_body", "weighin.worker.saving"),
    "save": ("weighin.worker.pytest_body",),
}


def deciding(strategy: Path, cell: Cell) -> list[Path]:
    """Return the files of code, sorted, that affect what ``cell`` measures.

    ``strategy`` is the file of the cell's strategy, the only included file of a user's own code.
    """
    roots = (_WORKER, cell.model.builder.partition(":")[0])
    todo = [strategy.resolve(), *(path for name in roots for path in _files(name, cell.operation))]
    reached: set[Path] = set()
    while todo:
        path = todo.pop()
        if path not in reached:
            reached.add(path)
            for name in _read(path, path.stat().st_mtime_ns)[0]:
                todo += _files(name, cell.operation)
    folders = [_PACKAGE / name for name in _DECIDING]
    ours = (path for path in reached if any(path.is_relative_to(folder) for folder in folders))
    return sorted({strategy.resolve(), *ours})


def digest_of_file(path: Path) -> str:
    """Return ``digest_of_code`` of the code in the file ``path``."""
    return _read(path, path.stat().st_mtime_ns)[1]


def digest_of_code(source: bytes) -> str:
    """Return a hash of a file's code, without comments, docstrings and the texts of raised errors.

    Raises:
        SyntaxError, ValueError: the file is not Python.
    """
    return _digest_of_tree(ast.parse(source))


@cache
def _read(path: Path, _changed_ns: int) -> tuple[frozenset[str], str]:
    """Return the names of all modules and objects that a file imports, and the hash of its code."""
    tree = ast.parse(path.read_bytes(), filename=str(path))
    return frozenset(_names(tree)), _digest_of_tree(tree)


def _digest_of_tree(tree: ast.Module) -> str:
    parts: list[str] = []
    _write(tree, parts)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def _write(node: object, parts: list[str], *, is_raised: bool = False) -> None:
    """Append a syntax tree to ``parts``, as text that is the same in every version of Python.

    Empty fields are left out, because only some versions of Python have them.
    """
    if is_raised and _is_text(node):
        parts.append("text")
    elif isinstance(node, ast.AST):
        is_raised |= isinstance(node, ast.Raise)
        parts.append(f"{type(node).__name__}(")
        for name in node._fields:
            if (value := getattr(node, name, None)) not in (None, []):
                parts.append(f"{name}=")
                _write(value, parts, is_raised=is_raised)
        parts.append(")")
    elif isinstance(node, list):
        for each in node:
            if not (isinstance(each, ast.Expr) and _is_text(each.value)):  # a docstring
                _write(each, parts, is_raised=is_raised)
        parts.append("]")
    else:
        parts.append(repr(node))


def _is_text(node: object) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


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


def _files(name: str, operation: Operation) -> list[Path]:
    """Return the files that run when the module ``name`` of weighin is imported.

    ``name`` may end with the name of an object in the module. The result is empty for modules of
    other packages, and for those in ``_NOT_FOLLOWED``.
    """
    top, *rest = name.split(".")
    if top != _PACKAGE.name or name.startswith(_NOT_FOLLOWED[operation]):
        return []
    files, folder = [_PACKAGE / "__init__.py"], _PACKAGE
    for part in rest:
        spec = PathFinder.find_spec(part, [str(folder)])
        if spec is None or spec.origin is None:
            break
        files.append(Path(spec.origin))
        folder = folder / part
    return files
