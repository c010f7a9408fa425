"""Which files of tests are to notice a change of a module."""

import ast
import re
from collections.abc import Mapping
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Final

import seldom

PACKAGE: Final = seldom.ROOT / "harness" / "weighin"
UNIT: Final = seldom.TESTS / "unit"
CONTRACT: Final = seldom.TESTS / "contract"
_MOST_FILES: Final = 5
_OF_ALL_VERBS: Final = tuple(CONTRACT / f"test_{name}.py" for name in ("wrong_inputs", "verbs"))
_FAR: Final = 100
_MODULE: Final = re.compile(r"weighin(\.\w+)+")


@cache
def _imports(file: Path) -> frozenset[str]:
    """Return the modules of weighin that a file imports, in tests also by way of the tests' helpers.

    A module may also name another one in a text, to run it in a process of its own.
    """
    texts = (
        one.value for one in ast.walk(ast.parse(file.read_text())) if isinstance(one, ast.Constant)
    )
    run = {str(text) for text in texts if _MODULE.fullmatch(str(text))}
    names = seldom.imported(file) | run | {f"{text}.__main__" for text in run}
    # What cells.py imports says nothing about a test: it reaches all of weighin.
    helpers = seldom.helpers(file, without=("cells",)) if seldom.TESTS in file.parents else set()
    inherited = [_imports(helper) for helper in helpers - {file}]
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

    First come five of unit: files that import the module, then those whose name has a word of the module's
    name or of its folder's, and then those that import the module by way of the fewest other modules.
    The files of contract type verbs, and so reach every module: those that try all verbs follow, and
    the first whose name has a word that begins as one of the module's.
    """
    name = _name(module)
    distances = _distances(name)
    *folders, own = (set(part.split("_")) for part in name.split(".")[1:])
    around = set[str]().union(*folders)

    def rank(file: Path) -> tuple[bool, int, int, int, int, int]:
        imported, words = _imports(file), {*file.stem.split("_")}
        far = min((distances.get(one, _FAR) for one in imported), default=_FAR)
        inside = len(words & around)
        return name not in imported, -len(words & own), -inside, len(words), far, len(imported)

    unit = sorted(sorted(UNIT.glob("test_*.py")), key=rank)[:_MOST_FILES]
    beginnings = tuple(own | around)
    named = (
        file
        for file in sorted(CONTRACT.glob("test_*.py"))
        if any(word.startswith(beginnings) for word in file.stem.split("_")[1:])
    )
    return tuple(dict.fromkeys([*unit, *_OF_ALL_VERBS, *islice(named, 1)]))
