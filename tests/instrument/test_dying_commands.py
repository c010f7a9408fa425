"""For scripts that die for lack of memory, weighin names the limit, the cause and the line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
from dying_commands import DYING, Cause, Dying, empty, inputs

from weighin.isolation.cgroup import limit, temporary_group
from weighin.records import run_folder
from weighin.records.explanation import answer, cause_of
from weighin.records.samples import read_samples
from weighin.result import Outcome, Result
from weighin.units import MIB

pytestmark = [pytest.mark.cgroup, pytest.mark.slow]

__all__ = ["inputs"]  # a fixture

ROOT = Path(__file__).parents[2]

INSIDE = """
set -e
echo $$ > "$1/cgroup.procs"
mount --bind "$1" "$2"
umount -l "$3"
mount --bind "$2" "$3"
shift 3
exec "$@"
"""
"""Enter a group, and see it as the root of the hierarchy, as in a container (in a mount namespace)."""


def run(case: Dying, inputs: Mapping[str, Path], folder: Path) -> tuple[Path, Result]:
    """Run a script under its limit with weighin; return the run's folder and its record."""
    case.prepare(inputs)
    out = folder / "run"
    own: tuple[str, ...] = () if case.around_bytes else ("--ram", str(case.limit_bytes))
    if case.cold:
        own += ("--cold", str(inputs["file"]))
    weighin = (sys.executable, "-P", "-m", "weighin", "run", "--isolation", "cgroup", *own)
    command = (*weighin, "--out", str(out), "--", *case.command(inputs))
    with temporary_group() if case.around_bytes else nullcontext() as group:
        if case.around_bytes and group:
            limit(group, case.around_bytes)
            (view := folder / "view").mkdir()
            paths = (str(group), str(view), str(group.parent))
            command = ("unshare", "--mount", "sh", "-c", INSIDE, "sh", *paths, *command)
        process = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(ROOT / "harness")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    empty(inputs)
    assert (out / "records.jsonl").exists(), process.stderr
    (result,) = run_folder.read(out).results
    assert process.returncode == result.exit_code
    return out, result


TRIES = 3
"""On a machine with other work, a script may die between two stacks: then the record names no cause, or no line."""


@pytest.mark.parametrize("case", DYING, ids=lambda case: case.script)
def test_the_record_explains_why_a_script_died_and_where(
    case: Dying, inputs: dict[str, Path], tmp_path: Path
) -> None:
    for number in range(TRIES):
        (attempt := tmp_path / str(number)).mkdir()
        folder, result = run(case, inputs, attempt)
        text = "\n".join(answer(folder, result))
        print(result.message, text, sep="\n")
        cause = cause_of(result, read_samples(folder, result.samples_path))
        assert result.outcome == (Outcome.OOM_KILLED if case.dies else Outcome.OK)
        assert cause is None or cause.name == case.cause  # never a wrong one
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
