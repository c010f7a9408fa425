"""Fresh interpreters without the seconds that importing torch takes: forks of one that imported it."""

import json
import os
import runpy
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from select import select
from typing import Any, Final

MOST_BYTES: Final = 2**18  # of a request, which is one message
_PEAK: Final = """
import sys, threading
from pathlib import Path

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def watch():
    global peak
    while not ended.wait(0.001):
        peak = max(peak, anonymous())

{setup}
start = peak = anonymous()
ended = threading.Event()
thread = threading.Thread(target=watch)
thread.start()
{code}
ended.set()
thread.join()
print(max(peak, anonymous()) - start)  # the last look may precede the last pages
"""


class ForkServer:
    """A process that runs ``setup`` once, such as imports, and then code in forks of itself.

    A fork runs code as ``python -c CODE ARGUMENTS`` does, with output and exit status of its own.
    Packages in ``missing`` cannot be imported, as if they were not installed. Nor can those that this
    process itself cannot import, unless ``python`` names another interpreter, or ``missing`` is None.
    ``environment`` changes variables. A program that connects to ``path`` gets a fork that runs a
    module with its streams and in its place: ``unit/warm_children.py``.
    """

    def __init__(
        self,
        setup: str,
        missing: Sequence[str] | None = (),
        python: Path | str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        hidden = [*(missing or ())]
        if python == sys.executable and missing is not None:
            hidden += [name for name, module in sys.modules.items() if module is None]
        self._folder = tempfile.TemporaryDirectory()
        self.path = f"{self._folder.name}/forks"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
            listening.bind(self.path)
            listening.listen()
            number = listening.fileno()
            self._process = subprocess.Popen(
                [python, "-P", __file__, str(number), json.dumps(hidden), setup],
                stdin=subprocess.PIPE,
                pass_fds=[number],
                start_new_session=True,
                env=os.environ | dict(environment or {}),
            )

    def run(
        self, code: str, *arguments: object, folder: Path = Path(), timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run ``code`` in ``folder`` to its end."""
        words = ["code", str(folder.resolve()), code, *map(str, arguments)]
        with (
            Path(os.devnull).open() as none,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
            socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server,
        ):
            server.connect(self.path)
            streams = [one.fileno() for one in (none, out, err)]
            socket.send_fds(server, [os.fsencode("\0".join(words))], streams)
            ended = bool(select([server], [], [], timeout_s)[0])
            status = server.recv(16) if ended else b""
            out.seek(0)
            err.seek(0)
            printed = (out.read(), err.read())
        if not ended:
            raise subprocess.TimeoutExpired(code, timeout_s, *printed)
        assert status, f"the fork server ended with {self._process.wait()}"
        return subprocess.CompletedProcess(code, int(status), *printed)

    def peak_of(self, setup: str, code: str, *arguments: object) -> int:
        """Return how much anonymous memory ``code`` took at most beside that of ``setup``, in bytes, as sampled."""
        done = self.run(_PEAK.format(setup=setup, code=code), *arguments)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def close(self) -> None:
        """End the process, and with it its forks."""
        self._process.communicate()
        self._folder.cleanup()


def serve(descriptor: int) -> None:
    """Fork for each program that connects, until standard input ends."""
    given = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders = [folder for folder in sys.path if folder not in given]
    found = selectors.DefaultSelector()
    listening = socket.socket(fileno=descriptor)

    def accept() -> None:
        program, _ = listening.accept()
        words, streams, _, _ = socket.recv_fds(program, MOST_BYTES, 3)
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
    """Start a fork that runs code, or a module, for this program, and return its process id."""
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
            kind, folder, text, *sys.argv[1:] = words
            if kind == "module":
                _take_the_place_of(origin, folders)
                status = _status_of(lambda: runpy.run_module(text, {}, "__main__", alter_sys=True))
            else:
                os.chdir(folder)
                sys.argv[0], sys.path[:0] = "-c", [""]
                main = sys.modules["__main__"] = type(sys)("__main__")
                code = compile(text, "<string>", "exec")
                status = _status_of(lambda: exec(code, main.__dict__))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    for stream in streams:
        os.close(stream)
    return pid


def _take_the_place_of(origin: Path, folders: Sequence[str]) -> None:
    os.environb.clear()
    pairs = (line.partition(b"=") for line in (origin / "environ").read_bytes().split(b"\0"))
    os.environb.update({name: value for name, _, value in pairs if name})
    os.chdir(origin / "cwd")
    sys.path[:] = [*filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *folders]


def _status_of(run: Callable[[], Any]) -> int:
    try:
        run()
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            print(end.code, file=sys.stderr)
            return 1
        return end.code or 0
    return 0


if __name__ == "__main__":
    sys.modules.update(dict.fromkeys(json.loads(sys.argv[2])))  # cannot be imported
    exec(sys.argv[3], {})
    serve(int(sys.argv[1]))
