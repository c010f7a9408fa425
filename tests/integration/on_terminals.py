"""Type into a command on a pseudo-terminal, as a user does, and read the screen."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Session:
    """What was on the screen at the end, and the exit code; negative if a signal ended it."""

    screen: str
    code: int


def converse(
    command: Sequence[str],
    typed: Sequence[tuple[str, str]],
    folder: Path,
    environment: Mapping[str, str],
) -> Session:
    """Run a command on a terminal of its own. ``typed`` are pairs: a text to wait for, and the answer.

    The terminal is the command's controlling terminal: Ctrl-C ("\\x03") sends SIGINT.
    """
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        ("setsid", "--ctty", "--wait", *command),
        cwd=folder,
        env=environment,
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
            os.write(ours, answer.encode())
        with suppress(OSError):  # the terminal's other end is closed: the session is over
            while True:
                screen += _read(ours, screen)
        return Session(screen.replace("\r\n", "\n"), process.wait(_PATIENCE_S))
    finally:
        os.close(ours)  # SIGHUP to whoever still runs on it
        if process.poll() is None:
            process.kill()
            process.wait()


def _read(terminal: int, screen: str) -> str:
    """Return the next output; raise OSError at its end."""
    deadline = time.monotonic() + _PATIENCE_S
    while not select.select([terminal], [], [], 0.5)[0]:
        assert time.monotonic() < deadline, f"nothing more comes after: {screen!r}"
    if not (read := os.read(terminal, 65536)):
        raise OSError("the terminal is closed")
    return read.decode(errors="replace")
