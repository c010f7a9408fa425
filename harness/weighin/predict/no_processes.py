"""Prevent a strategy from starting processes in a prediction, and kill those that start anyway.

Python reports most ways to start a process as an audit event. ``multiprocessing`` and C code start
processes without an event; ``check`` finds such processes afterwards.
"""

import os
import resource
import signal
import sys
from typing import Final

import psutil

from weighin.predict.dispatch import CannotFollow

_STARTS: Final = (
    "subprocess.Popen",
    "os.exec",
    "os.fork",
    "os.forkpty",
    "os.posix_spawn",
    "os.system",
)
REFUSED: Final = "the strategy starts a process, whose memory a prediction cannot compute"
_refused: list[str] = []


def refuse() -> None:
    """Raise CannotFollow for each later attempt to start a process."""
    sys.addaudithook(_hook)


def check() -> None:
    """Raise CannotFollow if the strategy started a process, or tried to and caught the exception."""
    of_children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    if _refused or of_children or children():
        raise CannotFollow(REFUSED)


def children() -> list[int]:
    return [child.pid for child in psutil.Process().children()]


def end_children() -> bool:
    """Kill all children of this process and their descendants; return whether there were any."""
    found = False
    while pids := children():  # the children of a killed process become children of this one
        found = True
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return found


def _hook(event: str, _arguments: object) -> None:
    if event in _STARTS:
        _refused.append(event)
        raise CannotFollow(REFUSED)
