"""Connect the worker to its parent through standard input and output; end it with the parent."""

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
    """The worker's connection to its parent.

    ``Lifeline`` writes events to the original standard output, and redirects descriptor 1 to
    standard error, so that a strategy's prints do not mix with the events.
    """

    def __init__(self) -> None:
        # If a strategy hangs while it holds the GIL, no thread notices the end of standard input.
        # This signal then ends the process; in a container, the engine ends it.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        self._events = os.dup(1)
        os.dup2(2, 1)
        self._input = os.fdopen(os.dup(0), "rb", buffering=0)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        self._acknowledged = threading.Semaphore(0)

    def receive_job(self) -> bytes:
        """Return the first line of input. After this call, the end of input ends this process."""
        line = self._input.readline()
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()
        return line

    def send(self, event: str, **fields: Any) -> None:
        """Send one event with a single write call."""
        os.write(self._events, encode_event({"event": event, **fields}))

    def send_and_wait(self, event: str, **fields: Any) -> None:
        """Send one event and wait until the parent has read and reset the cgroup's high-water mark."""
        self.send(event, **fields)
        self._acknowledged.acquire()

    def _listen(self) -> None:
        while self._input.readline():
            self._acknowledged.release()
        sys.stderr.flush()
        os._exit(_ORPHANED)
