"""For scripts that die for lack of memory, weighin names the limit, the cause and the line."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
from cells import MIB, Outcome, Result, explained, new_group
from command_trees import seen_from_inside, variables, weighing
from dying_commands import DYING, Cause, Dying, empty, inputs

pytestmark = [pytest.mark.cgroup, pytest.mark.slow]

__all__ = ["inputs"]  # a fixture


def run(case: Dying, inputs: Mapping[str, Path], folder: Path) -> tuple[Result, str | None, str]:
    """Run a script under its limit with weighin; return its record, its cause and what weighin says."""
    case.prepare(inputs)
    out = folder / "run"
    own: tuple[str, ...] = () if case.around_bytes else ("--ram", str(case.limit_bytes))
    if case.cold:
        own += ("--cold", str(inputs["file"]))
    command = (*weighing(out, *own), *case.command(inputs))
    with new_group() if case.around_bytes else nullcontext() as group:
        if case.around_bytes and group:
            group.limit(case.around_bytes)
            command = (*seen_from_inside(group.path, folder), *command)
        process = subprocess.run(
            command,
            cwd=folder,
            env=variables(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    empty(inputs)
    assert (out / "records.jsonl").exists(), process.stderr
    result, cause, text = explained(out)
    assert process.returncode == result.exit_code
    return result, cause, text


TRIES = 3
"""On a machine with other work, a script may die between two stacks: then the record names no cause, or no line."""


@pytest.mark.parametrize("case", DYING, ids=lambda case: case.script)
def test_the_record_explains_why_a_script_died_and_where(
    case: Dying, inputs: dict[str, Path], tmp_path: Path
) -> None:
    for number in range(TRIES):
        (attempt := tmp_path / str(number)).mkdir()
        result, cause, text = run(case, inputs, attempt)
        print(result.message, text, sep="\n")
        assert result.outcome == (Outcome.OOM_KILLED if case.dies else Outcome.OK)
        assert cause in (None, case.cause)  # never a wrong one
        named = set(re.findall(r"\w+\.py:\d+", text))
        assert named <= set(case.lines())  # never a wrong line
        if cause and bool(named) == case.dies:
            break
    assert cause
    assert bool(named) == case.dies
    if case.cause is Cause.OUTER_LIMIT:
        assert result.ran and all(kill.limit_of for kill in result.ran.kills)
    elif case.dies:
        assert f"limit of {case.limit_bytes // MIB} MiB" in text
