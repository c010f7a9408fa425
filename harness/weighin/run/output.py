"""Pass a command's output on unchanged, then search its lines, and learn when a server is ready."""

import os
import re
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from io import FileIO
from typing import Any, Final
from urllib.parse import urlsplit

from weighin.child_process import ready, write
from weighin.errors import ConfigError
from weighin.isolation.base import Streams
from weighin.result import Mark
from weighin.text import one_line

STANDARD: Final = (1, 2)
_SILENCE_S: Final = 0.2  # after the command's end, because another process may keep its output open
_PROMPT_S: Final = 0.05  # a line without a line end for this time is a prompt
_ESCAPES: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")


class _Channel:
    """A pipe to the descriptor ``target``; or a pseudo-terminal, as programs print differently to a pipe."""

    def __init__(self, target: int) -> None:
        is_terminal = os.isatty(target)
        source, command_end = os.openpty() if is_terminal else os.pipe()
        self.target, self.source = target, FileIO(source)
        self.command_end = FileIO(command_end, "w")
        if is_terminal:
            tty.setraw(command_end)  # the real terminal already converts line ends


class Relay:
    """Passes one command's output on to ``targets``, descriptors of standard output and error. A line that matches
    ``marks`` or ``ready`` becomes a ``Mark``, with the time of its last character. At the first line or
    prompt that matches ``ready``, a thread calls ``at_ready``. Without any pattern, the command writes to
    the targets directly.
    """

    def __init__(
        self,
        targets: Sequence[int],
        marks: Sequence[str] = (),
        ready: str = "",
        at_ready: Callable[[], None] = lambda: None,
    ) -> None:
        self._noted: deque[Mark] = deque(maxlen=1000)  # the newest ones, for the record
        self._patterns: list[Any] = []
        if patterns := [*marks, *([ready] if ready else [])]:
            import regex  # takes 0.02 s

            self._patterns = [*map(regex.compile, patterns)]
        self._ready, self._at_ready = self._patterns[-1] if ready else None, at_ready
        self._channels: list[_Channel] = []
        self._threads: list[threading.Thread] = []
        self._ends = threading.Event()
        ends = [
            self._open(target) if self._patterns else None if target == its_own else target
            for target, its_own in zip(targets, STANDARD, strict=True)
        ]
        self.streams = Streams(stdout=ends[0], stderr=ends[1])
        self.resize()

    def _open(self, target: int) -> int | None:
        """Return where the command writes for ``target``: one pipe for both if they are the same file."""
        for channel in self._channels:
            if os.path.sameopenfile(channel.target, target):
                return channel.command_end.fileno()
        try:
            os.fstat(target)
        except OSError:  # a closed descriptor of this process is closed for the command, too
            return None
        self._channels.append(_Channel(target))
        return self._channels[-1].command_end.fileno()

    def resize(self) -> bool:
        """Give pseudo-terminals the real terminal's size; return whether this changes the size of one."""
        is_changed = False
        for channel in self._channels:
            # A pipe has no size, and the channel's thread may just have closed the source.
            with suppress(termios.error, ValueError):
                size = termios.tcgetwinsize(channel.target)
                if size != termios.tcgetwinsize(channel.source):
                    termios.tcsetwinsize(channel.source, size)
                    is_changed = True
        return is_changed

    def start(self) -> None:
        """Start to pass the output on, in threads, after the command has started."""
        for channel in self._channels:
            channel.command_end.close()
            relaying = threading.Thread(target=self._relay, args=[channel], daemon=True)
            self._threads.append(relaying)
            relaying.start()

    def finish(self) -> None:
        """Pass on the rest of the output, after all processes of the command ended."""
        self._ends.set()
        for thread in self._threads:
            thread.join()  # waits until the reader of a target has read the rest

    def close(self) -> None:
        """Close all descriptors; output that ``finish`` has not passed on is lost."""
        for channel in self._channels:
            channel.source.close()
            channel.command_end.close()

    @property
    def marks(self) -> tuple[Mark, ...]:
        return tuple(sorted(self._noted, key=lambda mark: mark.t_ns))

    def _relay(self, channel: _Channel) -> None:
        """Pass the output on, and search its lines; a carriage return also ends a line, as of a progress bar."""
        begun, begun_ns = b"", 0  # a line that has not ended, and when its last character arrived
        source = channel.source.fileno()
        while True:
            if not ready([source], _PROMPT_S if begun else _SILENCE_S):
                self._look_if_ready(_plain(begun))
                if self._ends.is_set():
                    break
                continue
            data = b""
            with suppress(OSError):  # no process has the pseudo-terminal open any more
                data = os.read(source, 64 * 1024)  # the capacity of a pipe
            if not data or not write(channel.target, data):
                break  # if the target has no reader, the command's next write must fail as well
            now_ns = time.monotonic_ns()
            if (end := max(data.rfind(b"\n"), data.rfind(b"\r"))) < 0:
                begun = (begun + data)[: 64 * 1024]  # the rest of a longer line is not searched
            else:
                first_ns = begun_ns if data[:1] in (b"\n", b"\r") else now_ns
                self._note(_plain(begun + data[:end]), first_ns, now_ns)
                begun = data[end + 1 :]
            begun_ns = now_ns
        self._note(_plain(begun), begun_ns, begun_ns)
        channel.source.close()

    def _note(self, lines: str, first_ns: int, rest_ns: int) -> None:
        """Search complete lines, of which the first one ended at ``first_ns``, the others later."""
        for number, line in enumerate(lines.split("\n")):
            if line and any(self._finds(each, line) for each in self._patterns):
                self._noted.append(Mark(rest_ns if number else first_ns, one_line(line, 160)))
                self._look_if_ready(line)

    def _look_if_ready(self, line: str) -> None:
        if (pattern := self._ready) and self._finds(pattern, line):
            self._ready = None
            self._at_ready()

    def _finds(self, pattern: Any, line: str) -> bool:
        try:  # a repeat inside a repeat, such as (a+)+, can take forever
            return pattern.search(line, timeout=0.1) is not None
        except TimeoutError:
            return False


def _plain(output: bytes) -> str:
    """Decode output, without the escape sequences of terminals."""
    text = output.decode(errors="replace").replace("\r", "\n")
    return _ESCAPES.sub("", text) if "\x1b" in text else text


class Readiness:
    """Learns when a server is ready: when any thread calls ``now``, or an HTTP server answers at ``url``."""

    def __init__(self, url: str) -> None:
        self.ready_ns: int | None = None
        self._url = url
        self._at_ready: Callable[[], None] = lambda: None
        self._lock, self._is_over = threading.Lock(), threading.Event()
        self._asking: threading.Thread | None = None
        if url and answers(url):
            raise ConfigError(
                f"--ready-url {url}: a server answers there before the command starts",
                "stop that server, or start the command on another port, and give that port",
            )

    def now(self) -> None:
        with self._lock:
            if self.ready_ns is None and not self._is_over.is_set():
                self.ready_ns = time.monotonic_ns()
                self._at_ready()

    def begin(self, at_ready: Callable[[], None]) -> None:
        """Send requests to the URL, if given; ``at_ready`` is called when the server is ready."""
        self._at_ready = at_ready
        if self._url:
            self._asking = threading.Thread(target=self._ask, daemon=True)
            self._asking.start()

    def end(self) -> None:
        self._is_over.set()
        if self._asking:
            self._asking.join()

    def _ask(self) -> None:
        while not self._is_over.wait(0.05):  # between two requests
            if answers(self._url):
                self.now()
                return


def answers(url: str) -> bool:
    """Return whether a server answers at a URL with an HTTP status below 500."""
    import http.client  # takes 0.02 s

    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=2.0)
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    with closing(connection):
        try:
            connection.request("GET", path)
            return connection.getresponse().status < 500
        except (OSError, http.client.HTTPException):
            return False
