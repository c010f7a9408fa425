"""Which files of tests are to notice a change of a module."""

import chosen_tests
import pytest


@pytest.mark.parametrize(
    ("module", "file"),
    [
        ("run/listener.py", "test_messages.py"),
        ("predict/dispatch.py", "test_predict.py"),  # in a process of its own
        ("gate/baseline.py", "test_check.py"),  # by way of the command line
    ],
)
def test_a_module_is_tested_by_those_that_import_it_or_its_callers(module: str, file: str) -> None:
    found = [path.name for path in chosen_tests.tests_of(module)]
    assert file in found
    assert len(found) == 5


def test_the_file_of_a_modules_name_comes_first() -> None:
    for module, file in {
        "gate/compare.py": "test_compare.py",
        "run/judge.py": "test_judge.py",
        "records/explanation.py": "test_explanation.py",
    }.items():
        assert chosen_tests.tests_of(module)[0].name == file
