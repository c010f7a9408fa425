"""For scripts that die for lack of memory, weighin names the limit, the cause and the line."""

import re
import subprocess
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cells import MIB, Outcome, Result, explained, new_group
from command_trees import seen_from_inside, variables, weighing
from dying_commands import DYING, Cause, Dying, empty, inputs
from nightly import by_day

pytestmark = [pytest.mark.cgroup, pytest.mark.slow]

__all__ = ["inputs"]  # a fixture

TRIES = 3
"""On a machine with other work, a script may die between two stacks: then the record names no cause, or no line."""


class Answer(NamedTuple):
    """What weighin says of a run. It is "right" if it names a right cause and a right line.

    It is "none" if it leaves one of them out; without a right cause, the line alone is right.
    """

    verdict: str
    text: str


def run(case: Dying, inputs: Mapping[str, Path], folder: Path) -> tuple[Path, Result]:
    """Run a script under its limit with weighin; return the run's folder and its record."""
    case.prepare(inputs)
    out = folder / "run"
    ram = f"--ram {case.limit_bytes}" if case.limit_bytes and not case.around_bytes else ""
    cold = f"--cold {inputs['file']}" if case.cold else ""
    command = (*weighing(out, f"{ram} {cold} --timeout 90"), *case.command(inputs))
    with new_group() if case.around_bytes else nullcontext() as group:
        if case.around_bytes and group:
            group.limit(case.around_bytes)
            command = (*seen_from_inside(group.path, folder), *command)
        how: dict[str, Any] = {"cwd": folder, "env": variables(), "timeout": 120}
        process = subprocess.run(command, capture_output=True, text=True, check=False, **how)
    empty(inputs)
    assert (out / "records.jsonl").exists(), process.stderr
    result, _, _ = explained(out)
    assert process.returncode == result.exit_code
    return out, result


def read(case: Dying, folder: Path) -> Answer:
    """Return what weighin says of a run, judged by the marks in the script."""
    _, cause, text = explained(folder)
    name = cause or ""
    places = tuple(dict.fromkeys(re.findall(r"[\w/]+\.py:\d+", text)))
    known = {line.place: line.causes for line in case.marked()}
    if not set(places) <= known.keys():
        return Answer("wrong", text)
    right = {name for place in places for name in known[place]}
    if case.cause in (Cause.OUTER_LIMIT, Cause.PAGE_CACHE):
        right.add(case.cause)
    is_right = name in right and (places or not known) if name else Cause.NONE in right
    is_wrong = name and not (right or {*case.all_causes()}) & {name}
    return Answer("wrong" if is_wrong else "right" if is_right else "none", text)


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
@pytest.mark.parametrize("share", [0, 0.5], ids=["no limit", "tight"])
@pytest.mark.parametrize("case", DYING, ids=lambda case: case.script)
def test_no_wrong_cause_or_line_is_said_of_a_script_that_dies_earlier_or_lives(
    case: Dying, share: float, inputs: dict[str, Path], tmp_path: Path
) -> None:
    limit_bytes = int(case.tightest_bytes * share)
    around_bytes = limit_bytes if case.around_bytes and share else None
    other = replace(case, limit_bytes=limit_bytes, around_bytes=around_bytes)
    folder, result = run(other, inputs, tmp_path)
    said = read(other, folder)
    assert said.verdict != "wrong", said.text
    assert share or result.outcome == Outcome.OK
