"""The Ray tasks: one starts ``weighin.engines.node`` on its node and passes the events on.

Ray copies these functions to the nodes by value, so that they import nothing but the standard
library: a node without weighin can then say so.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_PART_BYTES = 1 << 20
_PAUSE_S = 0.5  # Ray delivers a cancellation between two lines of Python
_PATIENCE_S = 30.0  # the measured processes of a stopped assignment need a moment to end


def relay(assignment: bytes) -> Iterator[bytes]:
    """Start the assignment in a process of its own, and yield each of its events as one line.

    The process has the environment with which the node was started: Ray sets variables such as
    OMP_NUM_THREADS in its own workers, and these would change the figures. When this generator
    ends, so does the process.
    """
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "weighin.engines.node"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=raylet_environment(),
        start_new_session=True,
    )
    assert process.stdin and process.stdout and process.stderr
    streams, rest, last_words = [process.stdout, process.stderr], b"", b""
    try:
        process.stdin.write(assignment + b"\n")
        process.stdin.flush()  # and open: its end would stop the process
        while streams:
            ready, _, _ = select.select(streams, [], [], _PAUSE_S)
            for stream in ready:
                part = os.read(stream.fileno(), _PART_BYTES)
                if not part:
                    streams.remove(stream)
                elif stream is process.stderr:
                    last_words = (last_words + part)[-4096:]
                else:
                    *lines, rest = (rest + part).split(b"\n")
                    for line in lines:  # noqa: UP028 (Ray sends values into its generators)
                        yield line
    except BrokenPipeError:  # it ended before it read the assignment; its last words say why
        last_words += process.stderr.read()
    finally:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            code = process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    yield _ending(code, last_words)


def look() -> dict[str, Any]:
    """Return the facts about this node that only Ray's own processes know, and its clock's time."""
    variables = raylet_environment()
    return {
        "refresh_ms": variables.get("RAY_memory_monitor_refresh_ms"),
        "hostname": os.uname().nodename,
        "t_ns": time.time_ns(),
    }


def clock() -> int:
    """Return the time of this node's clock, in nanoseconds since 1970."""
    return time.time_ns()


def raylet_environment() -> dict[str, str]:
    """Return the environment of this node's raylet, which started this process."""
    pid = os.getppid()
    while pid > 1:
        folder = Path(f"/proc/{pid}")
        name = os.fsdecode((folder / "cmdline").read_bytes().split(b"\0")[0])
        if Path(name).name == "raylet":
            entries = (folder / "environ").read_bytes().split(b"\0")
            pairs = [os.fsdecode(entry).partition("=") for entry in entries if entry]
            return {key: value for key, _, value in pairs}
        status = (folder / "stat").read_text()
        pid = int(status.rpartition(")")[2].split()[1])
    raise RuntimeError("no raylet is among the parents of this process")


def _ending(code: int, last_words: bytes) -> bytes:
    """Return the last event: how the process ended."""
    lines = last_words.decode(errors="replace").strip().splitlines()
    event = {"event": "ended", "code": code, "stderr": lines[-1] if lines else ""}
    return json.dumps(event).encode()
