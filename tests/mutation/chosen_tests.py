"""Which files of tests are to notice a change of a module."""

import ast
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

UNIT: Final = Path(__file__).resolve().parents[1] / "unit"
PACKAGE: Final = UNIT.parents[1] / "harness" / "weighin"
_MOST_FILES: Final = 5
_FAR: Final = 100
_MODULE: Final = re.compile(r"weighin(\.\w+)+")


@cache
def _imports(file: Path) -> frozenset[str]:
    """Return the modules of weighin that a file imports, in tests also by way of the tests' helpers.

    A module may also name another one in a text, to run it in a process of its own.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and _MODULE.fullmatch(text := str(node.value)):
            names |= {text, f"{text}.__main__"}
    helpers = {
        helper for name in names if (helper := UNIT / f"{name.partition('.')[0]}.py").exists()
    }
    inherited = [_imports(helper) for helper in helpers if not helper.name.startswith("test_")]
    return frozenset(n for n in names if n.startswith("weighin.")).union(*inherited)


def _name(module: str) -> str:
    return "weighin." + module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def _distances(name: str) -> Mapping[str, int]:
    """Return how many imports lead from each module to the module ``name``: 1 from those that import it."""
    files = {_name(str(file.relative_to(PACKAGE))): file for file in PACKAGE.rglob("*.py")}
    found, new = {name: 0}, {name}
    while new:
        new = {one for one, file in files.items() if one not in found and _imports(file) & new}
        found |= dict.fromkeys(new, max(found.values()) + 1)
    return found


@cache
def tests_of(module: str) -> tuple[Path, ...]:
    """Return the files of tests for a module, the fittest first.

    First come the files that import the module, then those whose name has a word of the module's name or of
    its folder's, and then those that import the module by way of the fewest other modules.
    """
    name = _name(module)
    distances = _distances(name)
    *folders, own = (set(part.split("_")) for part in name.split(".")[1:])

    def rank(file: Path) -> tuple[bool, int, int, int, int, int]:
        imported, words = _imports(file), {*file.stem.split("_")}
        far = min((distances.get(one, _FAR) for one in imported), default=_FAR)
        inside = len(words & set[str]().union(*folders))
        return name not in imported, -len(words & own), -inside, len(words), far, len(imported)

    return tuple(sorted(sorted(UNIT.glob("test_*.py")), key=rank)[:_MOST_FILES])
