"""The worker's standard streams: events out, acknowledgements in, and an end when the parent ends."""

import ctypes
import os
import signal
import sys
import threading
from typing import Any

from weighin.protocol import encode_event

_PR_SET_PDEATHSIG = 1
_ORPHANED = 125


class Lifeline:
    """The connection to the parent.

    Keeps the original standard output for events and points descriptor 1 at standard error, so
    that a strategy which prints cannot garble them.
    """

    def __init__(self) -> None:
        # A strategy that hangs with the GIL held never sees the end of standard input; the
        # kernel's signal ends it all the same (not in a container: there the engine's side does).
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        self._events = os.dup(1)
        os.dup2(2, 1)
        self._input = os.fdopen(os.dup(0), "rb", buffering=0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        self._acknowledged = threading.Semaphore(0)

    def receive_job(self) -> bytes:
        """Return the first line; from here on, the end of standard input ends this process."""
        line = self._input.readline()
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()
        return line

    def send(self, event: str, **fields: Any) -> None:
        """Write one event, in one write."""
        os.write(self._events, encode_event({"event": event, **fields}))

    def send_and_wait(self, event: str, **fields: Any) -> None:
        """Write one event and wait until the parent has read the cgroup's marks."""
        self.send(event, **fields)
        self._acknowledged.acquire()

    def _listen(self) -> None:
        while self._input.readline():
            self._acknowledged.release()
        sys.stderr.flush()
        os._exit(_ORPHANED)
