"""Type into a command on a pseudo-terminal, as a user does, and read the screen."""

import os
import pty
import select
import subprocess
import termios
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from typed import CommandLine

_PATIENCE_S = 60.0
Typed = Sequence[tuple[str, str | tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class Session:
    """What was on the screen at the end, and the exit code; negative if a signal ended it.

    ``restored`` tells whether the terminal was at the end as it was at the start: not raw.
    """

    screen: str
    code: int
    restored: bool


def talk(
    line: CommandLine, *words: str, typed: Typed = (), size: tuple[int, int] = (24, 80)
) -> Session:
    """Run any command, beside a command line of weighin, on a terminal of its own, of lines and columns.

    ``typed`` are pairs: a text to wait for, and the answer, or a new size of the terminal. The terminal
    is the command's controlling terminal: Ctrl-C ("\\x03") sends SIGINT.
    """
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(ours, size)
    before = termios.tcgetattr(theirs)
    process = subprocess.Popen(
        ("setsid", "--ctty", "--wait", *words),
        cwd=line.folder,
        env=line.environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    try:
        screen, seen = "", 0
        for awaited, answer in typed:
            while awaited not in screen[seen:]:
                screen += _read(ours, screen)
            seen = screen.index(awaited, seen) + len(awaited)
            if isinstance(answer, str):
                os.write(ours, answer.encode())
            else:
                termios.tcsetwinsize(ours, answer)
        with suppress(OSError):  # the terminal's other end is closed: the session is over
            while True:
                screen += _read(ours, screen)
        restored = termios.tcgetattr(ours) == before
        return Session(screen.replace("\r\n", "\n"), process.wait(_PATIENCE_S), restored)
    finally:
        os.close(ours)  # SIGHUP to whoever still runs on it
        if process.poll() is None:
            process.kill()
            process.wait()


def _read(terminal: int, screen: str) -> str:
    """Return the next output, a character for each byte; raise OSError at its end."""
    deadline = time.monotonic() + _PATIENCE_S
    while not select.select([terminal], [], [], 0.5)[0]:
        assert time.monotonic() < deadline, f"nothing more comes after: {screen!r}"
    if not (read := os.read(terminal, 65536)):
        raise OSError("the terminal is closed")
    return read.decode("latin-1")
