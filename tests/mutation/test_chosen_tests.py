"""Which files of tests are to notice a change of a module."""

import chosen_tests
import pytest

OF_ALL = ["test_wrong_inputs.py", "test_verbs.py"]


@pytest.mark.parametrize(
    ("module", "file", "of_contract"),
    [
        ("run/listener.py", "test_messages.py", [*OF_ALL, "test_gated_runs.py"]),
        ("predict/dispatch.py", "test_predict.py", [*OF_ALL, "test_predicted_loads.py"]),  # in a process of its own
        ("gate/baseline.py", "test_check.py", [*OF_ALL, "test_gated_runs.py"]),  # by way of the command line
        ("isolation/docker.py", "test_docker_isolation.py", OF_ALL),
    ],
)  # fmt: skip
def test_a_module_is_tested_by_those_that_import_it_or_its_callers_and_by_all_verbs(
    module: str, file: str, of_contract: list[str]
) -> None:
    found = [path.name for path in chosen_tests.tests_of(module)]
    assert file in found[:5]
    assert found[5:] == of_contract


@pytest.mark.parametrize(
    ("module", "file"),
    [
        ("gate/baseline.py", "test_gate_baseline.py"),
        ("run/judge.py", "test_judge.py"),
        ("records/explanation.py", "test_explanation.py"),
    ],
)
def test_the_file_of_a_modules_name_comes_first(module: str, file: str) -> None:
    assert chosen_tests.tests_of(module)[0].name == file
