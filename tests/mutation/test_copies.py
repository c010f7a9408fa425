"""What the tests of a mutant do in a copy of a small repository."""

from collections.abc import Iterator
from contextlib import closing
from math import inf
from pathlib import Path

import copies
import pytest
from copies import Copy, Known, Trial, Unchanged
from operators import Mutant

MODULE = "def least(a, b):\n    while a > b:\n        a -= 1\n    return a\n"
ADDS = Mutant("m.py", 3, 3, "        a += 1\n", "arithmetic")  # never ends
OTHER = Mutant("m.py", 4, 4, "    return a + 1\n", "return")
TEST = "from weighin.m import least\ndef test_least():\n    assert least(2, 1) == 1\n"
BROKEN = "\ndef test_broken():\n    assert False\n"
LATER = """
from pathlib import Path
def test_now_and_then(ran=Path(__file__).with_name("ran")):
    ran.write_text(text := ran.read_text() + "x" if ran.exists() else "x")
    assert text != "xx"  # as if the machine had been busy at the second time
"""


@pytest.fixture(name="test_file")
def _test_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of tests of a repository with one module."""
    root = tmp_path / "repository"
    (package := root / "harness" / "weighin").mkdir(parents=True)
    (unit := root / "tests" / "unit").mkdir(parents=True)
    (root / "pytest.ini").write_text("[pytest]\n")
    (package / "testing").mkdir()
    for name in ("__init__.py", "testing/__init__.py", "testing/plugin.py"):  # which pytest loads
        (package / name).touch()
    (package / "m.py").write_text(MODULE)
    monkeypatch.setattr(copies, "ROOT", root)
    monkeypatch.setattr(copies, "_IMPORTS", "import pytest")
    monkeypatch.setattr(copies, "tests_of", lambda module: (unit / "test_m.py",))
    monkeypatch.setattr(Unchanged, "limits_s", property(lambda self: (2, 60)))
    return unit / "test_m.py"


@pytest.fixture(name="code")
def _code(test_file: Path, tmp_path: Path) -> Iterator[Copy]:
    with closing(Copy(tmp_path / "copy", 60, Known())) as code:
        yield code


def put(code: Copy, test_file: Path, text: str) -> None:
    """Write the file of tests, of which the copy was made before."""
    (code._folder / test_file.relative_to(copies.ROOT)).write_text(text)


def test_a_failing_test_kills(code: Copy, test_file: Path) -> None:
    put(code, test_file, TEST)
    assert code.tried(OTHER) == Trial("tests/unit/test_m.py::test_least", ())
    assert (code._package / "m.py").read_text() == MODULE


def test_an_endless_loop_is_killed_by_its_processor_time(code: Copy, test_file: Path) -> None:
    put(code, test_file, TEST)
    assert code.tried(ADDS) == Trial("test_m.py does not end", ())


def test_a_mutant_that_nothing_notices_survives(code: Copy, test_file: Path) -> None:
    put(code, test_file, TEST.replace("== 1", "is not None"))
    assert code.tried(OTHER) == Trial("", ())


def test_a_test_that_fails_without_the_change_is_left_out(code: Copy, test_file: Path) -> None:
    put(code, test_file, TEST.replace("== 1", "is not None") + BROKEN)
    assert code.tried(OTHER) == Trial("", ("tests/unit/test_m.py::test_broken",))


def test_a_test_that_fails_now_and_then_does_not_kill(code: Copy, test_file: Path) -> None:
    put(code, test_file, LATER)
    assert code.tried(OTHER) == Trial("", ("tests/unit/test_m.py::test_now_and_then",))


def test_tests_that_take_too_long_are_left_out(test_file: Path, tmp_path: Path) -> None:
    test_file.write_text(TEST)
    known = Known()
    known.get(test_file, lambda _: Unchanged(2, 2, ()))
    with closing(Copy(tmp_path / "copy", 1, known)) as code:
        assert code.tried(OTHER) == Trial("", ("test_m.py",))


def test_each_file_is_measured_once_for_all_copies() -> None:
    known, file = Known(), Path("test_m.py")
    assert known.get(file, lambda _: Unchanged(1, 1, ())) == Unchanged(1, 1, ())
    assert known.get(file, lambda _: Unchanged(inf, 9, ())) == Unchanged(1, 1, ())
