"""Wait until a server is ready; then the server's measurement ends, and weighin stops the server."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from weighin.errors import ConfigError
from weighin.settings.definition import Settings

_BETWEEN_S: Final = 0.05  # between two requests to --ready-url
_ANSWER_S: Final = 2.0
_NO_SERVER: Final = 500  # a server that is not ready answers with this HTTP status or a higher one


class Readiness:
    """Learns when one command, a server, is ready: prints a line (--ready) or answers (--ready-url).

    Any thread may call ``now`` when the server is ready. The first call notes the time, and reads the
    command's figures.
    """

    def __init__(self, settings: Settings) -> None:
        """Raise ConfigError if another server answers at --ready-url before the command starts."""
        self.ready_ns: int | None = None
        self._url = settings.ready_url
        self._at_ready: Callable[[], None] = lambda: None
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
            if self.ready_ns is None and not self._given_up.is_set():
                self.ready_ns = time.monotonic_ns()
                self._at_ready()

    def begin(self, at_ready: Callable[[], None]) -> None:
        """Begin to send requests to --ready-url, if the option was given; ``at_ready`` is called when
        the server is ready.
        """
        self._at_ready = at_ready
        if self._url:
            self._asking = threading.Thread(target=self._ask, name="ready", daemon=True)
            self._asking.start()

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
