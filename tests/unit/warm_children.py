"""Children of weighin without the seconds that their imports take: forks of a process that imported torch.

The command of such a child is a small program in the place of ``python -m MODULE``. A fork runs
the module with the program's standard streams, environment and folder. The program ends as the fork
ends, and the fork is killed when the program is.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

from fork_server import ForkServer

from weighin import child_process

_PRELOADED: Final = (
    "torch", "transformers.modeling_utils", "weighin.checkpoint.convert", "weighin.checkpoint.generate",
)  # fmt: skip
"""What most of the children import; a package that is not installed is left out."""

_PRELOAD: Final = """
from contextlib import suppress
from importlib import import_module
for name in {}:
    with suppress(ImportError):
        import_module(name)
"""
_PROGRAM: Final = """
import _socket, os, sys
path, *arguments = sys.argv[1:]
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
server.connect(path)
streams = b"".join(number.to_bytes(4, sys.byteorder) for number in (0, 1, 2))
rights = [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, streams)]
server.sendmsg([b"\\0".join(map(os.fsencode, ("module", "", *arguments)))], rights)
for number in (0, 1, 2):
    os.close(number)
status = int(server.recv(16))
if status < 0:
    os.kill(os.getpid(), -status)
os._exit(status)
"""
_READ_ONCE: Final = ("HF_", "HOME", "LD_", "MALLOC_", "OMP_", "TORCH_", "TRANSFORMERS_", "XDG_")
"""The beginnings of variables that a process reads when it starts, or when it imports a library."""
_COLD: Final = child_process.module


class Forks:
    """Starts children that run one of ``modules``; the first of them starts the process to fork."""

    def __init__(self, *modules: str, preloaded: Sequence[str] = _PRELOADED) -> None:
        self._modules, self._setup = modules, _PRELOAD.format([*preloaded])
        self._variables, self._read_once = child_process.environment(), _read_once()
        self._server: ForkServer | None = None

    def command(self, name: str, *arguments: str) -> tuple[str, ...]:
        """Return the command that runs a module, in the place of ``child_process.module``."""
        if name not in self._modules or _read_once() != self._read_once:
            return _COLD(name, *arguments)
        if self._server is None:
            self._server = ForkServer(self._setup, missing=None, environment=self._variables)
        return (sys.executable, "-I", "-S", "-c", _PROGRAM, self._server.path, name, *arguments)

    def close(self) -> None:
        """End the process, and with it its forks."""
        if self._server:
            self._server.close()


def _read_once() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_READ_ONCE)}
