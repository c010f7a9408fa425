"""The programs of ``unusual_commands`` need what it says: below that limit, the kernel kills them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from cells import MIB, new_group, page_cache
from known_commands import FILE_BYTES
from unusual_commands import UNUSUAL, Unusual

pytestmark = [pytest.mark.cgroup, pytest.mark.compiler]


@pytest.fixture(scope="module")
def file(disk: Path) -> Path:
    path = disk / "unusual-file"
    path.write_bytes(os.urandom(FILE_BYTES))
    return path


def ended(command: tuple[str, ...], limit_bytes: int) -> tuple[int, int]:
    """Run a command in a group with a limit; return its exit code and the peak of the group."""
    with new_group() as group:
        group.limit(limit_bytes)
        script = 'echo $$ > "$1" && shift && exec "$@"'
        process = subprocess.run(
            ("/bin/sh", "-c", script, "sh", str(group.path / "cgroup.procs"), *command), check=False
        )
        return process.returncode, group.peak_bytes()


@pytest.mark.parametrize("known", UNUSUAL, ids=lambda known: known.id)
def test_a_program_lives_under_its_limit_and_not_below(
    known: Unusual, programs: Path, file: Path
) -> None:
    command = (*known.command(programs, file),)
    slack = 4 * MIB + known.needed_bytes // 50
    page_cache.drop([file])
    code, peak = ended(command, known.peak_bytes + 64 * MIB)
    assert code == 0
    assert abs(peak - known.peak_bytes) <= slack
    page_cache.drop([file])
    assert ended(command, known.needed_bytes + slack)[0] == 0
    page_cache.drop([file])
    code, _ = ended(command, known.needed_bytes - slack)
    assert code != 0
