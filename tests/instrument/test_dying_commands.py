"""For scripts that die for lack of memory, weighin names the limit, the cause and the line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest
from cells import MIB, Outcome
from dying_commands import DYING, Cause, Dying, inputs
from nightly import by_day
from why import answers, read, run

pytestmark = [pytest.mark.cgroup, pytest.mark.slow]

__all__ = ["inputs"]  # a fixture

TRIES = 3
"""On a machine with other work, a script may die between two stacks: then the record names no cause, or no line."""
LEAST_RIGHT = 0.9


@pytest.mark.parametrize("case", by_day(DYING, *DYING[:12]), ids=lambda case: case.script)
def test_the_record_explains_why_a_script_died_and_where(
    case: Dying, inputs: dict[str, Path], tmp_path: Path
) -> None:
    for number in range(TRIES):
        (attempt := tmp_path / str(number)).mkdir()
        folder, result = run(case, inputs, attempt)
        said = read(case, folder)
        print(result.message, said.text, sep="\n")
        assert result.outcome == (Outcome.OOM_KILLED if case.dies else Outcome.OK)
        assert said.verdict != "wrong"  # never a wrong cause or line
        if said.verdict == "right":
            break
    assert said.verdict == "right"
    if case.cause is Cause.OUTER_LIMIT:
        assert result.ran and all(kill.limit_of for kill in result.ran.kills)
    elif case.dies:
        assert f"limit of {case.limit_bytes // MIB} MiB" in said.text


@pytest.mark.nightly
def test_each_script_is_explained_under_any_limit_and_without_one(
    inputs: Mapping[str, Path], tmp_path: Path
) -> None:
    """All that ``tests/why.py`` prints: a limit at each stage of a script, and none."""
    verdicts: Counter[str] = Counter()
    for case in DYING:
        for place, said in answers(case, inputs, tmp_path):
            print(case.script, place, said, sep=" | ")
            verdicts[said.verdict] += 1
    assert verdicts["wrong"] == 0
    assert verdicts["right"] >= LEAST_RIGHT * verdicts.total()
