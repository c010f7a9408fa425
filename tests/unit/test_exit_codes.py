"""The exit code of a run, and what is said of the strategies that broke it."""

import re
from pathlib import Path

import pytest
from factories import make_cell, make_result
from test_cli_help import shown

from weighin import errors
from weighin.cli.measure import broken, exit_code_of
from weighin.result import Outcome
from weighin.units import GIB

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        (
            [
                Outcome.OK,
                Outcome.OOM_KILLED,
                Outcome.CHILD_KILLED,
                Outcome.TIMEOUT,
                Outcome.THRASHING,
                Outcome.CUDA_OOM,
                Outcome.SKIPPED,
            ],
            0,
        ),
        ([Outcome.OK, Outcome.MEASUREMENT_FAILED], 4),
        ([Outcome.OK, Outcome.WRONG_WEIGHTS], 5),
        ([Outcome.OOM_KILLED, Outcome.STRATEGY_FAILED], 5),
        ([Outcome.OK, Outcome.COMMAND_FAILED], 5),
        ([Outcome.WRONG_WEIGHTS, Outcome.MEASUREMENT_FAILED], 5),
    ],
)
def test_the_exit_code_of_a_run(outcomes: list[Outcome], code: int) -> None:
    results = [make_result(make_cell(f"s{n}"), outcome=one) for n, one in enumerate(outcomes)]
    assert exit_code_of(results) == code


def test_each_broken_strategy_is_named_once_with_its_limit_and_why() -> None:
    lossy = [
        make_result(
            make_cell("lossy", repeat=repeat, ram_limit_bytes=limit),
            outcome=Outcome.WRONG_WEIGHTS,
            message="1 tensor differs",
        )
        for repeat in range(2)
        for limit in (None, GIB)
    ]
    failed = make_result(make_cell("broken"), outcome=Outcome.STRATEGY_FAILED, message="")
    killed = make_result(make_cell("baseline"), outcome=Outcome.OOM_KILLED)
    assert broken([*lossy, failed, killed]) == [
        "lossy: wrong_weights: 1 tensor differs",
        "lossy under 1GiB: wrong_weights: 1 tensor differs",
        "broken under 8GiB: strategy_failed",
    ]


@pytest.mark.parametrize("verb", [(), ("bench",), ("floor",), ("check",), ("doctor",)])
def test_the_help_says_what_each_exit_code_means(verb: tuple[str, ...]) -> None:
    assert errors.EXPLAINED in " ".join(shown(*verb, "--help")[1].split())


def test_the_page_of_the_command_line_has_them_all() -> None:
    text = (ROOT / "docs" / "suites.md").read_text()
    codes = re.findall(r"^\| (\d+) \|", text, re.MULTILINE)
    assert list(map(int, codes)) == list(errors.MEANINGS)


def test_every_error_has_an_exit_code_that_is_explained() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    used = {kind.exit_code for kind in kinds if issubclass(kind, errors.HarnessError)}
    assert used == {2, 3, 4, 130}
    assert used < set(errors.MEANINGS)
