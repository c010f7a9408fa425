"""Which files of tests are to notice a change of a module."""

import ast
import re
from functools import cache
from pathlib import Path
from typing import Final

UNIT: Final = Path(__file__).resolve().parents[1] / "unit"
_FEW: Final = 2
_MOST_FILES: Final = 5


@cache
def _imports(file: Path) -> frozenset[str]:
    """Return the modules of weighin that a file of tests imports, also by way of the tests' helpers."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    helpers = {
        helper for name in names if (helper := UNIT / f"{name.partition('.')[0]}.py").exists()
    }
    inherited = [_imports(helper) for helper in helpers if not helper.name.startswith("test_")]
    return frozenset(n for n in names if n.startswith("weighin.")).union(*inherited)


@cache
def tests_of(module: str) -> tuple[Path, ...]:
    """Return the files of tests for a module, the fittest first."""
    name = "weighin." + module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    words = set(re.split(r"\W|_", name)) - {"weighin", ""}

    def rank(file: Path) -> tuple[bool, int, int]:
        return (
            name not in _imports(file),
            -len(words & {*file.stem.split("_")}),
            len(_imports(file)),
        )

    found = sorted(sorted(UNIT.glob("test_*.py")), key=rank)
    ours = [file for file in found if name in _imports(file)]
    if len(ours) < _FEW:  # others may call it by way of another module
        ours = [file for file in found if rank(file)[:2] < (True, 0)]
    return tuple(ours[:_MOST_FILES])
