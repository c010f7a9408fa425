"""Exchange lines of JSON with the process that started this one (``weighin.child_process``)."""

import ctypes
import os
import signal
from typing import Any

from weighin.pipes import LineReader, write
from weighin.protocol import encode_event

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37


is_program = False
"""Whether weighin is this process's program, and not a part of another one, such as pytest."""


class Parent(LineReader):
    """The connection to the parent process, which sends lines and receives events.

    Events go to the original standard output. Descriptor 1 becomes standard error, so that prints of
    a strategy or a model do not mix with the events.
    """

    def __init__(self) -> None:
        super().__init__(os.dup(0))
        self._events = os.dup(1)
        os.dup2(2, 1)
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)

    def send(self, event: str, **fields: Any) -> None:
        """Send one event; do nothing if the parent has ended."""
        write(self._events, encode_event({"event": event, **fields}))


def end_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started this process ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def adopt_orphans(*, adopt: bool = True) -> bool:
    """Make this process a child subreaper, which becomes the parent of its orphaned descendants.

    With ``adopt=False``, make it an ordinary process. Return whether this process was a subreaper
    before the call.
    """
    libc, before = ctypes.CDLL(None), ctypes.c_int()
    libc.prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before))
    libc.prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))
    return bool(before.value)
