"""Wait until a server is ready; then the server's measurement ends, and weighin stops the server."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from weighin.errors import ConfigError
from weighin.isolation.base import RunningCommand
from weighin.settings.definition import Settings

_BETWEEN_S: Final = 0.05  # between two requests to --ready-url
_ANSWER_S: Final = 2.0
_PAUSE_S: Final = 0.01
_BETWEEN_LOOKS_S: Final = 0.1  # between two tests whether the command thrashes
_AFTER_KILL_S: Final = 1.0
_AFTER_SIGKILL_S: Final = 10.0
_NO_SERVER: Final = 500  # a server that is not ready answers with this HTTP status or a higher one


class Readiness:
    """Waits until one command, a server, is ready: prints a line (--ready) or answers (--ready-url).

    Any thread may call ``now`` when the server is ready. The first call of ``now`` calls
    ``at_ready``, which reads the command's figures.
    """

    def __init__(self, settings: Settings, at_ready: Callable[[], None]) -> None:
        """Raise ConfigError if another server answers at --ready-url before the command starts."""
        self.is_expected = bool(settings.ready or settings.ready_url)
        self.ready_ns: int | None = None
        self._url = settings.ready_url
        self._at_ready = at_ready
        self._lock = threading.Lock()
        self._given_up = threading.Event()
        self._asking: threading.Thread | None = None
        if settings.ready_url and answers(settings.ready_url):
            raise ConfigError(
                f"a server answers at {settings.ready_url} before the command starts",
                "stop that server, or start the command on another port and write that port into"
                " --ready-url",
            )

    def now(self) -> None:
        with self._lock:
            if self.ready_ns is None:
                self.ready_ns = time.monotonic_ns()
                self._at_ready()

    def begin(self) -> None:
        """Start the thread that sends requests to --ready-url, if the option was given."""
        if self._url:
            self._asking = threading.Thread(target=self._ask, name="ready", daemon=True)
            self._asking.start()

    def wait(
        self,
        running: RunningCommand,
        timeout_s: float,
        oom_kills: Callable[[], int | None],
        is_over: Callable[[], bool] | None = None,
    ) -> bool:
        """Return whether the command was ready or ended within ``timeout_s``.

        The wait also ends when ``is_over`` returns True. When the kernel has killed a process of a
        server, the wait ends at most one second later, because the outcome is certain, and a server
        may restart a process again and again.
        """
        if not self.is_expected and not is_over:
            return running.wait(timeout_s)
        deadline = time.monotonic() + timeout_s
        is_doomed = False
        pause_s = _PAUSE_S if self.is_expected else _BETWEEN_LOOKS_S
        while self.ready_ns is None and not running.wait(pause_s):
            if time.monotonic() >= deadline or (is_over and is_over()):
                break
            if self.is_expected and not is_doomed and oom_kills():
                is_doomed = True
                deadline = min(deadline, time.monotonic() + _AFTER_KILL_S)
        self._given_up.set()
        return self.ready_ns is not None or running.wait(0)

    def end(self) -> None:
        """Stop the requests to --ready-url."""
        self._given_up.set()
        if self._asking:
            self._asking.join()

    def _ask(self) -> None:
        while not self._given_up.wait(_BETWEEN_S):
            if answers(self._url):
                self.now()
                return


def stop(running: RunningCommand, grace_s: float) -> None:
    """Send SIGTERM to a server; if the server still runs after ``grace_s``, kill all its processes."""
    running.send_signal(signal.SIGTERM)
    if not running.wait(grace_s):
        running.kill()
        running.wait(_AFTER_SIGKILL_S)


def answers(url: str) -> bool:
    """Return whether a server answers at a URL with an HTTP status below 500."""
    import http.client  # takes 0.02 s

    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_ANSWER_S)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    with contextlib.closing(connection):
        try:
            connection.request("GET", path)
            return connection.getresponse().status < _NO_SERVER
        except (OSError, http.client.HTTPException):
            return False
