"""A read that waits for its disk is found from outside, by the system call of its thread."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from contextlib import closing, suppress
from pathlib import Path

import leftovers
import pytest
from cells import MIB, Mount, Pace

from weighin.probes import stalled_reads

REQUEST_BYTES = 128 * 1024


@pytest.mark.fuse
def test_a_read_that_waits_is_found_from_outside(disk: Path) -> None:
    asked = 4 * MIB
    (source := disk / "stalled source").mkdir()
    (source / "known.bin").write_bytes(bytes(2 * asked))
    with closing(Mount(source, Pace(stall_from_bytes=MIB), disk / "mounts")) as mount:
        path = mount.folder / "known.bin"
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
        failed: list[OSError] = []

        def read() -> None:
            try:
                os.preadv(descriptor, [mmap.mmap(-1, REQUEST_BYTES)], asked)
            except OSError as error:
                failed.append(error)

        thread = threading.Thread(target=read)
        thread.start()
        leftovers.wait_until(
            lambda: stalled_reads.waiting([os.getpid()]) == [(str(path), asked)],
            "the read was not found",
        )
    thread.join()  # the unmounting made it fail
    with suppress(OSError):  # it is closed although its file system has gone
        os.close(descriptor)
    assert [error.errno for error in failed] == [errno.ECONNABORTED]
    assert stalled_reads.waiting([os.getpid()]) == []
