"""``weighin list``: every word whole, as data too, and at once."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli_help import shown

from weighin.cell import USES
from weighin.isolation import select
from weighin.suite import registry

KINDS = ("strategies", "models", "uses", "suites", "isolations")


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_no_word_is_cut(columns: int) -> None:
    code, narrow = shown("list", columns=columns)
    _, wide = shown("list", columns=1000)
    assert code == 0
    assert narrow.split() == wide.split()
    longest = max(map(len, wide.split()))
    assert max(map(len, narrow.splitlines())) <= max(columns, 20 + longest)


def test_every_strategy_model_suite_and_isolation_is_there() -> None:
    _, text = shown("list")
    names = set(re.findall(r"^  (\S+)  ", text, re.MULTILINE))
    expected = {*registry.strategies(), *registry.strategies("save"), *registry.models()}
    assert names == expected | {*registry.suites(), *select.NAMES, *USES}


@pytest.mark.parametrize("kind", KINDS)
def test_one_kind_as_data(kind: str) -> None:
    code, text = shown("list", kind, "--json", "-")
    document = json.loads(text)
    assert code == 0
    assert document.pop("schema") == 1
    assert set(document) == ({"strategies", "saving"} if kind == "strategies" else {kind})
    assert all(entry["name"] and entry["summary"] for found in document.values() for entry in found)


LOADED = """
import sys
from weighin.cli.app import app
app(["list", *sys.argv[1:]], standalone_mode=False)
heavy = {"torch", "numpy", "pandas", "pydantic", "msgspec", "rich", "docker", "requests", "psutil", "typing_extensions"}
print("heavy:", *sorted(heavy & set(sys.modules)))
"""


@pytest.mark.parametrize("kind", ["all", "strategies", "models", "suites"])
def test_nothing_that_takes_time_is_imported(kind: str) -> None:
    command = [sys.executable, "-c", LOADED, kind]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "heavy:"


def test_a_file_gets_the_data_and_the_terminal_the_text(tmp_path: Path) -> None:
    _, text = shown("list", "models", "--json", str(tmp_path / "new" / "models.json"))
    assert text.startswith("models\n")
    assert json.loads((tmp_path / "new" / "models.json").read_text())["models"]
