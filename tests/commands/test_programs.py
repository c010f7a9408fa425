"""The programs take the amounts that ``known_commands`` says, as the kernel counts them without weighin."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from time import sleep

import leftovers
import pytest
from again import EVICTED, tried_again
from cells import MIB, Group, new_group, page_cache
from known_commands import KNOWN, UNUSUAL, VISIBLE_MS, Known, within

pytestmark = [pytest.mark.cgroup, pytest.mark.compiler]


@dataclass(frozen=True, slots=True)
class Counted:
    """What the kernel counted: its mark of the group's charge, and the largest samples of its parts."""

    code: int
    peak_bytes: int
    anon_bytes: int
    shmem_bytes: int
    file_bytes: int


def _parts(group: Group) -> tuple[int, int, int]:
    """Return the anonymous, shared and file memory of a group."""
    stat = group.stat()
    names = ("anon", "shmem", "file") if group.version == 2 else ("rss", "shmem", "cache")
    anon, shmem, file = (stat.get(name, 0) for name in names)
    return anon, shmem, file - shmem


def count(command: tuple[str, ...]) -> Counted:
    """Run a command in a group of its own, and look at the group every 2 ms."""
    with new_group() as group:
        process = group.start(command)
        seen = [(0, 0, 0)]
        while process.poll() is None:
            seen.append(_parts(group))
            sleep(0.002)
        largest = (max(column) for column in zip(*seen, strict=True))
        return Counted(process.returncode, group.peak_bytes(), *largest)


@pytest.mark.parametrize("known", KNOWN, ids=lambda known: known.id)
def test_a_program_takes_what_is_known_of_it(
    known: Known, programs: Path, known_file: Path
) -> None:
    page_cache.drop([known_file])
    counted = count(known.command(programs, known_file))
    print(known.id, counted)
    assert counted.code == 0
    assert within(counted.shmem_bytes, known.shmem_bytes)
    assert within(counted.file_bytes, known.file_bytes)
    if known.peak_ms >= VISIBLE_MS:
        assert within(counted.anon_bytes, known.anon_bytes)
    total = known.needed_bytes + known.file_bytes
    assert within(counted.peak_bytes, total)


@tried_again(EVICTED)
def test_the_page_cache_of_a_file_is_charged_to_its_first_reader(
    programs: Path, known_file: Path
) -> None:
    known = next(known for known in KNOWN if known.name == "maps")
    known_file.read_bytes()
    warm = count(known.command(programs, known_file))
    page_cache.drop([known_file])
    cold = count(known.command(programs, known_file))
    assert within(warm.peak_bytes, known.needed_bytes)
    assert within(cold.peak_bytes, known.needed_bytes + known.file_bytes)


def test_the_daemon_goes_on_without_its_parent(programs: Path) -> None:
    command = (str(programs / "daemon"), "16", "600")
    variables = os.environ | {"WEIGHIN_TEST_DAEMON": str(programs)}
    ended = subprocess.run(command, capture_output=True, check=False, env=variables, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")  # its streams are closed
    (left,) = leftovers.processes(f"WEIGHIN_TEST_DAEMON={programs}")
    pid = int(left.split()[0])
    assert os.getsid(pid) not in (os.getsid(0), pid)
    os.kill(pid, signal.SIGKILL)


def ended(command: tuple[str, ...], limit_bytes: int) -> tuple[int, int]:
    """Run a command in a group with a limit; return its exit code and the peak of the group."""
    with new_group() as group:
        group.limit(limit_bytes)
        return group.start(command).wait(), group.peak_bytes()


@pytest.mark.parametrize("known", UNUSUAL, ids=lambda known: known.id)
def test_a_program_lives_under_its_limit_and_not_below(
    known: Known, programs: Path, known_file: Path
) -> None:
    command = known.command(programs, known_file)
    slack = 4 * MIB + known.needed_bytes // 50
    page_cache.drop([known_file])
    code, peak = ended(command, known.peak_bytes + 64 * MIB)
    assert code == 0
    assert abs(peak - known.peak_bytes) <= slack
    for limit, lives in ((known.needed_bytes + slack, True), (known.needed_bytes - slack, False)):
        page_cache.drop([known_file])
        assert (ended(command, limit)[0] == 0) is lives
