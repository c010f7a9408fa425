"""Which files of tests are to notice a change of a module."""

import ast
import re
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Final

UNIT: Final = Path(__file__).resolve().parents[1] / "unit"
_MOST_FILES: Final = 8
_MOST_S: Final = 60


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
    return tuple(file for file in found if rank(file)[:2] < (True, 0))[:_MOST_FILES]


def in_time(files: Sequence[Path], seconds: Mapping[Path, float]) -> list[Path]:
    """Return the first of these files that take a minute in all, without those that fail here."""
    known = [file for file in files if file in seconds]
    sums = list(accumulate(seconds[file] for file in known))
    return [
        file for file, total in zip(known, sums, strict=True) if total < _MOST_S or file is known[0]
    ]
