"""The net of tests reaches weighin by commands, public names and records, or through tests/cells.py."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import weighin

TESTS = Path(__file__).parents[1]
FOLDERS = ("instrument", "commands", "faults", "checkpoints", "conformance")
PUBLIC = {*weighin.__all__, "strategy"}
NET = sorted(
    path
    for path in (
        *TESTS.glob("*.py"),
        *(path for name in FOLDERS for path in (TESTS / name).rglob("*.py")),
    )
    if path.name not in ("cells.py", "typed_here.py")  # which is of unit and contract
)
MODULE = re.compile(r"\b(?:from|import)\s+(weighin\.[\w.]+)")
NAMES = re.compile(r"\bfrom\s+weighin\s+import\s+([\w, ]+)")


def test_only_the_file_of_adapters_imports_the_insides_of_weighin() -> None:
    assert len(NET) > 80
    found = {
        f"{path.relative_to(TESTS)}: {name}" for path in NET for name in insides(path.read_text())
    }
    assert found == set()


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("import weighin\nfrom weighin import Load\nfrom weighin.strategy import Load", []),
        ("def f():\n    import weighin.cli.app", ["weighin.cli.app"]),
        ("from weighin import strategy as s, units", ["weighin.units"]),
        ("from weighin.strategy_of import x", ["weighin.strategy_of"]),
        ("CODE = f'{1}import sys; from weighin import predict, phase'", ["weighin.predict"]),
    ],
)
def test_an_import_of_the_insides_is_found(code: str, found: list[str]) -> None:
    assert list(insides(code)) == found


def insides(code: str) -> Iterator[str]:
    """Yield the modules of weighin that a file imports, but public ones; also in texts that it runs."""
    for node in ast.walk(ast.parse(code)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "weighin":
            names = [f"weighin.{each.name}" for each in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            listed = ",".join(NAMES.findall(node.value)).split(",")
            names = MODULE.findall(node.value) + [
                f"weighin.{one.split()[0]}" for one in listed if one.strip()
            ]
        for name in names:
            if name.startswith("weighin.") and name.split(".")[1] not in PUBLIC:
                yield name
