"""Connect the worker to its parent process, and end the worker if the parent ends."""

import os
import sys
import threading
from typing import Any

from weighin.parent_process import Parent, end_with_parent

_ORPHANED = 125


class Lifeline(Parent):
    """The worker's connection to its parent (weighin), which acknowledges events with empty lines."""

    def __init__(self) -> None:
        # If a strategy hangs while it holds the GIL, no thread can notice the end of standard input.
        # The kernel then ends this process; in a container, the engine does.
        end_with_parent()
        super().__init__()
        self._acknowledged = threading.Semaphore(0)

    def receive_job(self) -> bytes:
        """Return the first line of stdin. From then on, the worker ends when its stdin ends."""
        if (line := self.receive()) is None:
            os._exit(_ORPHANED)
        threading.Thread(target=self._listen, name="lifeline", daemon=True).start()
        return line

    def send_and_wait(self, event: str, **fields: Any) -> None:
        """Send one event, and wait until weighin acknowledges it. At the end of a phase, weighin
        first reads and resets the cgroup's high-water mark.
        """
        self.send(event, **fields)
        self._acknowledged.acquire()

    def _listen(self) -> None:
        while self.receive() is not None:
            self._acknowledged.release()
        sys.stderr.flush()
        os._exit(_ORPHANED)
