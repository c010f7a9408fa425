"""Children of weighin without the seconds that their imports take: forks of a process that imported torch.

The command of such a child is a small program in the place of ``python -m MODULE``. A fork runs
the module with the program's standard streams, environment and folder. The program ends as the fork
ends, and the fork is killed when the program is.
"""

from __future__ import annotations

import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Final

from weighin import child_process

_PRELOADED: Final = (
    "torch",
    "transformers.modeling_utils",
    "weighin.checkpoint.convert",
    "weighin.checkpoint.truth",
)
"""What most of the children import; a package that is not installed is left out."""

_PROGRAM: Final = """
import _socket, os, sys
path, *arguments = sys.argv[1:]
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
server.connect(path)
streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)]
server.sendmsg([b"\\0".join(map(os.fsencode, arguments))], rights)
for number in (0, 1, 2):
    os.close(number)
status = int(server.recv(16))
if status < 0:
    os.kill(os.getpid(), -status)
os._exit(status)
"""
_READ_ONCE: Final = ("HF_", "HOME", "LD_", "MALLOC_", "OMP_", "TORCH_", "TRANSFORMERS_", "XDG_")
"""The beginnings of variables that a process reads when it starts, or when it imports a library."""
_MOST_BYTES: Final = 2**16  # of a module's arguments
_COLD: Final = child_process.module


class Forks:
    """Starts children that run one of ``modules``; the first of them starts the process to fork."""

    def __init__(self, *modules: str, preloaded: Sequence[str] = _PRELOADED) -> None:
        self._modules, self._preloaded = modules, preloaded
        self._variables, self._read_once = child_process.environment(), _read_once()
        self._folder = tempfile.TemporaryDirectory()
        self._path = f"{self._folder.name}/forks"
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(self._path)
        self._listening.listen()
        self._server: subprocess.Popen[bytes] | None = None

    def command(self, name: str, *arguments: str) -> tuple[str, ...]:
        """Return the command that runs a module, in the place of ``child_process.module``."""
        if name not in self._modules or _read_once() != self._read_once:
            return _COLD(name, *arguments)
        if self._server is None:
            self._server = subprocess.Popen(
                [sys.executable, "-P", __file__, str(self._listening.fileno()), *self._preloaded],
                stdin=subprocess.PIPE,
                env=self._variables,
                pass_fds=[self._listening.fileno()],
                start_new_session=True,
            )
        return (sys.executable, "-I", "-S", "-c", _PROGRAM, self._path, name, *arguments)

    def close(self) -> None:
        """End the process, and with it its forks."""
        if self._server:
            self._server.communicate()
        self._listening.close()
        self._folder.cleanup()


def _read_once() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_READ_ONCE)}


def serve(descriptor: int, preloaded: Sequence[str]) -> None:
    """Fork for each program that connects, until standard input ends."""
    for name in preloaded:
        with suppress(ImportError):
            import_module(name)
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [folder for folder in sys.path if folder not in given]
    found = selectors.DefaultSelector()
    listening = socket.socket(fileno=descriptor)

    def accept() -> None:
        program, _ = listening.accept()
        words, streams, _, _ = socket.recv_fds(program, _MOST_BYTES, 3)
        if not words:  # it was killed at once
            program.close()
            return
        pid = _fork(os.fsdecode(words).split("\0"), streams, program, folders)
        ended = os.pidfd_open(pid)
        found.register(program, selectors.EVENT_READ, lambda: end(pid))
        found.register(ended, selectors.EVENT_READ, lambda: reap(pid, ended, program))

    def end(pid: int) -> None:
        for kill in (os.killpg, os.kill):  # it may not have its group yet
            with suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)

    def reap(pid: int, ended: int, program: socket.socket) -> None:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with suppress(OSError):  # the program was killed
            program.send(str(status).encode())
        for each in (program, ended):
            found.unregister(each)
        program.close()
        os.close(ended)

    found.register(listening, selectors.EVENT_READ, accept)
    found.register(0, selectors.EVENT_READ, sys.exit)
    while True:
        for key, _ in found.select():
            if key.fd in found.get_map():  # else its program and its fork ended at once
                act: Callable[[], None] = key.data
                act()


def _fork(
    words: list[str], streams: Sequence[int], program: socket.socket, folders: Sequence[str]
) -> int:
    """Start a fork that runs a module for this program, and return its process id."""
    peer = program.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    origin = Path("/proc", str(int.from_bytes(peer[:4], sys.byteorder)))
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.setsid()
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            os.closerange(3, os.sysconf("SC_OPEN_MAX"))
            status = _run(words, origin, folders)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    for stream in streams:
        os.close(stream)
    return pid


def _run(words: list[str], origin: Path, folders: Sequence[str]) -> int:
    """Run a module as ``python -P -m`` does in the place of the process ``origin``; return the status."""
    os.environb.clear()
    pairs = (line.partition(b"=") for line in (origin / "environ").read_bytes().split(b"\0"))
    os.environb.update({name: value for name, _, value in pairs if name})
    os.chdir(origin / "cwd")
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *folders]
    name, *sys.argv[1:] = words
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2:])
