"""Each threat on the page of threats has a test that exists; and our code loads no code of a file."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "security.md"
TEST = re.compile(r"`(test_\w+)`")
TESTS = {
    found
    for path in (ROOT / "tests").rglob("test_*.py")
    for found in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
}


def lines() -> list[list[str]]:
    """Return the cells of each threat: the threat, what is done, what is not, and the tests."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    return [
        [cell.strip() for cell in row.strip("| ").split(" | ")]
        for row in rows
        if not row.startswith("| threat")
    ]


@pytest.mark.parametrize("line", lines(), ids=lambda line: line[0][:60])
def test_each_threat_has_tests_that_exist(line: list[str]) -> None:
    *_, tests = line
    found = TEST.findall(tests)
    assert len(line) == 4
    assert found
    assert TEST.sub("", tests).strip(", ") == ""
    assert set(found) <= TESTS


def test_the_page_has_many_threats_and_is_found() -> None:
    assert len(lines()) > 20
    assert "docs/security.md" in (ROOT / "SECURITY.md").read_text()


def calls_of_torch_load() -> Iterator[tuple[str, ast.Call]]:
    for folder in ("harness", "strategies"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                    yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_our_code_asks_torch_for_weights_only() -> None:
    calls = list(calls_of_torch_load())
    assert len(calls) > 5
    for place, call in calls:
        named = {each.arg: ast.unparse(each.value) for each in call.keywords}
        assert named.get("weights_only") == "True", place
