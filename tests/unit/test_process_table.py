"""The files of a command's process stay known when the kernel has killed it."""

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from weighin.probes.cgroup import is_exiting
from weighin.probes.process_table import ProcessTable, Shares
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
