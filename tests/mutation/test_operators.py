"""Which changes of a module are tried, and that each of them is Python."""

import ast

import pytest
from operators import mutants


def changed(source: str) -> list[str]:
    return [mutant.text for mutant in mutants("m.py", source)]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("x = a < b", ["x = (a <= b)"]),
        ("x = a is b", ["x = (a is not b)"]),
        ("x = a in b", ["x = (a not in b)"]),
        ("x = a + b", ["x = (a - b)"]),
        ("x = a and b", ["x = (a or b)"]),
        ("x = not a", ["x = (a)"]),
        ("x = True", ["x = (False)"]),
        ("x = 1", ["x = (2)"]),
        ("x = 2 * a", ["x = (2 // a)", "x = (3) * a", "x = (1) * a"]),
        ("x = min(a, b)", ["x = (max(a, b))"]),
        ("x = a.b if c else a", ["x = (a.b)", "x = (a)"]),
        ("x = a, b", ["x = ((b,))", "x = ((a,))"]),
        ("x = {'a': b, 'c': d}", ["x = ({'c': d})", "x = ({'a': b})"]),
        ("x.y = a", ["pass"]),
        ("x += a", ["x -= a", "pass"]),
        ("f(a)", ["pass"]),
        ("raise a", ["pass"]),
        ("if f(a): pass", ["if (not f(a)): pass"]),
        ("def f(): return a.b", ["def f(): return None"]),
        ("def f(): return None", []),
    ],
)
def test_each_kind_of_change(line: str, expected: list[str]) -> None:
    assert changed(line) == expected


@pytest.mark.parametrize(
    "source",
    [
        '"""A text."""',
        "x: int | None",
        "def f(a: list[int]) -> int | None: ...",
        "@dataclass(frozen=True)\nclass A: ...",
        "assert a < b",
        "x = f'{a + b}'",
        "Kind = Literal[1, 2]",
        "_PATIENCE_S: Final = 10.0",
        "import a",
        "x = a | b",
    ],
)
def test_what_is_not_changed(source: str) -> None:
    assert changed(source) == []


def test_a_change_keeps_the_rest_of_its_lines() -> None:
    source = "x = (\n    é, a <\n    b, c)\n"
    texts = [one.of(source) for one in mutants("m.py", source) if one.kind == "comparison"]
    assert texts == ["x = (\n    é, (a <= b), c)\n"]
    for mutant in mutants("m.py", source):
        ast.parse(mutant.of(source))


def test_a_mutant_is_shown_as_a_difference() -> None:
    [mutant] = mutants("gate/m.py", "y = a\nx = a < b\n")
    assert mutant.shown("y = a\nx = a < b\n") == (
        "gate/m.py:2 comparison\n-x = a < b\n+x = (a <= b)"
    )
