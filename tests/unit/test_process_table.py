"""What is known of a command's processes: their files after a kill, their growth and their copies."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from weighin.probes import process_table
from weighin.probes.cgroup import is_exiting
from weighin.probes.process import Shares
from weighin.probes.process_table import ProcessTable
from weighin.units import MIB

READER = (
    "python3",
    "-c",
    "import sys, time; f = open(sys.argv[1], 'rb'); print(1, flush=True); time.sleep(60)",
)


def _keep(table: ProcessTable, pid: int) -> None:
    table.keep({pid: Shares(MIB, 0, 0)})


def _look(table: ProcessTable, pid: int) -> None:
    table.look([pid], time.monotonic_ns())


@pytest.mark.parametrize("read_again", [_keep, _look])
def test_a_killed_process_that_nobody_waited_for_keeps_its_open_files(
    read_again: Callable[[ProcessTable, int], None], tmp_path: Path
) -> None:
    (file := tmp_path / "weights.bin").write_bytes(bytes(2 * MIB))
    table = ProcessTable()
    with subprocess.Popen([*READER, str(file)], stdout=subprocess.PIPE) as process:
        assert process.stdout and process.stdout.readline()
        assert not is_exiting(process.pid)
        table.look([process.pid], time.monotonic_ns())
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie
        assert is_exiting(process.pid)
        read_again(table, process.pid)
        time.sleep(0.1)  # the table reads files again after a pause
        read_again(table, process.pid)
    (seen,) = table.processes()
    assert [(one.path, one.is_open) for one in seen.files] == [(str(file), True)]


@pytest.fixture
def anon(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """The anonymous memory of each process, in MiB, as the table reads it."""
    sizes: dict[int, int] = {}
    monkeypatch.setattr(
        process_table, "read_status", lambda pid: {"RssAnon": sizes[pid] * MIB, "VmHWM": 0}
    )
    monkeypatch.setattr(process_table, "parent_of", {1001: 1000, 1002: 1000}.get)
    monkeypatch.setattr(process_table, "command_of", lambda pid, _source="": str(pid))
    monkeypatch.setattr(process_table, "SHARE", 1e9)  # without a pause
    return sizes


def test_a_process_grew_by_what_it_got_since_all_had_three_quarters(anon: dict[int, int]) -> None:
    """The server had all its memory before; the indexer grew."""
    table = ProcessTable()
    for number, sizes in enumerate([(100, 0), (200, 1), (200, 50), (200, 100), (200, 200)]):
        anon |= {1000: sizes[0], 1001: sizes[1]}
        table.look([1000, 1001], number)
    table.keep({1000: Shares(200 * MIB, 0, 0), 1001: Shares(200 * MIB, 0, 0)})
    grown = {one.pid: one.grown_bytes for one in table.processes()}
    assert grown == {1000: 0, 1001: 100 * MIB}


def test_copies_that_were_seen_remain_when_the_parent_is_killed(anon: dict[int, int]) -> None:
    table = ProcessTable()
    anon |= {1000: 100}
    table.look([1000], 0)
    anon |= {1001: 100}
    table.look([1000, 1001], 1)
    child = Shares(60 * MIB, 0, 0, private=40 * MIB)
    table.keep({1000: Shares(60 * MIB, 0, 0), 1001: child})
    assert [one.copied_bytes for one in table.processes()][1] == 40 * MIB
    table.look([1001], 2)
    table.keep({1001: Shares(90 * MIB, 0, 0, private=90 * MIB)})
    assert [one.copied_bytes for one in table.processes() if one.pid == 1001] == [40 * MIB]
