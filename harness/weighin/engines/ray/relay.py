"""Define the functions that run as Ray tasks: ``relay`` runs an assignment, ``look`` reads settings.

Ray copies these functions by value to the nodes, with what they use of ``child_process``. They
import only the standard library, so that a node without weighin can report that weighin is missing.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from weighin.child_process import Child, last_line, module

_PAUSE_S = 0.5  # Ray can cancel a task only between two lines of Python
_PATIENCE_S = 30.0  # the measured processes of a stopped assignment need a moment to end


def relay(assignment: bytes) -> Iterator[bytes]:
    """Start the assignment in a process of its own, and yield each of its events as one line.

    The process of the assignment gets the environment with which the node was started. Ray's own
    workers have further variables, such as OMP_NUM_THREADS, that would change the measurement. The
    process of the assignment ends when the generator ``relay`` ends.
    """
    node = Child(module("weighin.engines.node"), raylet_environment())
    try:
        node.send(assignment + b"\n")  # input stays open: its end would stop the process
        while True:
            try:
                if (line := node.receive(_PAUSE_S)) is None:
                    break
            except TimeoutError:
                continue
            yield line
    finally:
        node.end_input()
        with contextlib.suppress(TimeoutError):
            node.wait(_PATIENCE_S)
        node.kill()
        code = node.wait()
        node.close()
    event = {"event": "ended", "code": code, "stderr": last_line(node.stderr_tail)}
    yield json.dumps(event).encode()


def look() -> dict[str, Any]:
    """Return the node's setting of Ray's memory monitor, and the node's time in ns since 1970."""
    t_ns = time.time_ns()
    return {"t_ns": t_ns, "refresh_ms": raylet_environment().get("RAY_memory_monitor_refresh_ms")}


def raylet_environment() -> dict[str, str]:
    """Return the environment of the raylet, the daemon of Ray on this node that started this process."""
    pid = os.getppid()
    while pid > 1:
        folder = Path(f"/proc/{pid}")
        name = os.fsdecode((folder / "cmdline").read_bytes().split(b"\0")[0])
        if Path(name).name == "raylet":
            entries = (folder / "environ").read_bytes().split(b"\0")
            pairs = [os.fsdecode(entry).partition("=") for entry in entries if entry]
            return {key: value for key, _, value in pairs}
        status = (folder / "stat").read_bytes()
        pid = int(status.rpartition(b")")[2].split()[1])
    raise RuntimeError(
        "this process was not started by Ray, because no raylet is among the parents of the process"
    )
