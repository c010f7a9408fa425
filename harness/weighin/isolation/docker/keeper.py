"""Keep a command's container and cgroup after the command's end, even if the image has no shell.

The keeper is the container's first process, and the command is its child. The keeper is this
machine's own shell, which is mounted into the container with its libraries and its dynamic loader,
so that it runs in every image. Two named pipes connect the keeper with this process, because the
standard streams belong to the command.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Final

from weighin.child_process import open_process, ready
from weighin.errors import IsolationUnavailable
from weighin.isolation.base import Exit
from weighin.isolation.docker.mounts import Bind

SHELL: Final = Path("/bin/sh")
_PIPES: Final = "/weighin/keeper"
_SHELL: Final = "/weighin/shell"

_SCRIPT: Final = f"""\
exec 6<{_PIPES}/life 7>&2 8>{_PIPES}/told 9<{_PIPES}/hold 2>&8
trap : INT QUIT
( exec </dev/null >/dev/null 2>&1 7>&- 8>&- 9<&-; read -r _ <&6; kill -9 -1 ) &
(
  read -r pid _ </proc/self/stat
  echo "$pid" >&8
  read -r _ <&9
  unset PWD OLDPWD SHLVL
  while [ "$1" != -- ]; do export "$1"; shift; done
  shift
  exec 2>&7 6<&- 7>&- 8>&- 9<&-
  exec "$@"
)
code=$?
trap '' INT QUIT
echo "$code" >&8
exec 8>&- 2>/dev/null
read -r mark <&9
printf %s "$mark"
printf %s "$mark" >&7
exec </dev/null >/dev/null 7>&-
read -r _ <&9
exit "$code"
"""
"""The keeper's script. A child of the keeper writes its own pid into the named pipe ``told``, waits
for the first line from the pipe ``hold``, and becomes the command.

After the command's end, the keeper writes the command's exit code into ``told``. If a signal killed
the command, the shell writes a word such as "Killed" before the code. The word tells a signal from
an exit code. The second line from ``hold`` is a mark. The keeper writes the mark after the last
output, because the engine does not report the end of output while a container runs. The keeper ends
when ``hold`` is closed. Another child of the keeper kills all processes when the pipe ``life`` is
closed, at the latest when weighin ends. The keeper ignores Ctrl-C, which a terminal also sends to
the keeper.
"""

NOT_FOR_KEEPER: Final = frozenset(
    {"LD_PRELOAD", "LD_AUDIT", "LD_BIND_NOW", "GLIBC_TUNABLES", "PWD", "OLDPWD", "SHLVL"}
)
"""Variables that the keeper sets for the command only. The keeper's own dynamic loader would obey
variables such as LD_PRELOAD, whose libraries may not fit that loader. A shell sets PWD, OLDPWD and
SHLVL itself.
"""

# Signals for which some shells write no word.
_SILENT: Final = {signal.SIGINT, signal.SIGPIPE, signal.SIGTERM}


class Keeper:
    """The keeper of one container, and this process's ends of its pipes."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="weighin-keeper-")
        hold, life, told = (f"{self._folder}/{name}" for name in ("hold", "life", "told"))
        self._open: set[int] = set()
        self._said = b""
        try:
            # The script is a file, because "bash -c" does not report the signal that killed a child.
            Path(self._folder, "start").write_text(_SCRIPT)
            for path in (hold, life, told):
                os.mkfifo(path, 0o600)
            # A named pipe can be opened for writing only while a process has it open for reading.
            self._places = [
                self._opened(path, os.O_RDONLY | os.O_NONBLOCK) for path in (hold, life)
            ]
            self._hold = self._opened(hold, os.O_WRONLY)
            self._opened(life, os.O_WRONLY)
            self._told = self._opened(told, os.O_RDONLY | os.O_NONBLOCK)
        except BaseException:
            self.close()
            raise

    def binds(self) -> list[Bind]:
        """Return what a container must mount for its keeper: pipes and the shell's files."""
        pipes = Bind(Path(self._folder), _PIPES, writable=True)
        return [pipes, *(Bind(path, f"{_SHELL}/{name}") for name, path in _files(SHELL).items())]

    def command(self, command: Sequence[str], variables: Mapping[str, str]) -> list[str]:
        """Return the container's command; the keeper sets ``variables`` only for ``command``."""
        loader, *others = (f"{_SHELL}/{name}" for name in _files(SHELL))
        start = [loader, "--library-path", _SHELL, others[0]] if others else [loader]
        settings = [f"{name}={value}" for name, value in variables.items()]
        return [*start, f"{_PIPES}/start", *settings, "--", *command]

    def wait_for_child(self, keeper: int, timeout_s: float) -> int | None:
        """Wait for the keeper's child to start; return the child's pid in the container, or None.

        The child then waits for ``go``. ``keeper`` is the keeper's pid on this machine.
        """
        process = open_process(keeper)
        try:
            while b"\n" not in self._said:
                watched = [self._told, *([] if process is None else [process])]
                if self._told not in ready(watched, timeout_s) or not self._read():
                    return None
        finally:
            if process is not None:
                os.close(process)
        pid, _, self._said = self._said.partition(b"\n")
        for place in self._places:
            self._close(place)
        shutil.rmtree(self._folder, ignore_errors=True)  # the open pipes need no names
        return int(pid) if pid.isdigit() else None

    def go(self) -> None:
        os.write(self._hold, b"\n")

    def exit(self, timeout_s: float) -> Exit | None:
        """Return how the command ended; None if the keeper was killed, or did not answer in time."""
        deadline = monotonic() + timeout_s
        while self._told in self._open and ready([self._told], deadline - monotonic()):
            if not self._read():
                break
        return parse(self._said)

    def end_output(self, mark: bytes) -> None:
        """Let the keeper write ``mark`` after the command's output; the command must have ended."""
        with contextlib.suppress(OSError):  # the keeper was killed
            os.write(self._hold, mark + b"\n")

    def close(self) -> None:
        """End the keeper, and with it the container; a second call has no effect."""
        for descriptor in tuple(self._open):
            self._close(descriptor)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self) -> bool:
        data = os.read(self._told, 4096)
        self._said += data
        return bool(data)

    def _opened(self, path: str, flags: int) -> int:
        descriptor = os.open(path, flags)
        self._open.add(descriptor)
        return descriptor

    def _close(self, descriptor: int) -> None:
        if descriptor in self._open:
            self._open.discard(descriptor)
            os.close(descriptor)


def parse(said: bytes) -> Exit | None:
    """Return the exit from a keeper's report, whose last word is the exit code; None without it."""
    *words, code = said.split() or [b""]
    if not code.isdigit():
        return None
    number = int(code) - 128
    if number > 0 and (words or number in _SILENT):
        return Exit(None, signal=number)
    return Exit(int(code))


@cache
def _files(shell: Path) -> dict[str, Path]:
    """Return a shell's loader, the shell and its libraries by name; a static shell has only itself.

    Raises:
        IsolationUnavailable: ``ldd`` is not installed.
    """
    shell = shell.resolve()
    try:
        listed = subprocess.run(["ldd", shell], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise IsolationUnavailable(
            f"cannot find the libraries of {shell}: ldd: {error.strerror}",
            "install ldd (on Debian: sudo apt install libc-bin), or use --isolation cgroup",
        ) from None
    return parse_ldd(listed, shell)


def parse_ldd(listed: str, shell: Path) -> dict[str, Path]:
    """Return the files in the output of ``ldd`` by name: the loader, then ``shell``, then libraries."""
    loaders: dict[str, Path] = {}
    libraries: dict[str, Path] = {}
    for line in listed.splitlines():
        name, _, target = line.strip().rpartition(" => ")
        path = Path(target.partition(" (")[0])
        if path.is_absolute():
            (libraries if name else loaders)[name or path.name] = path.resolve()
    return {**loaders, "sh": shell, **libraries}
