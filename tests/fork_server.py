"""Fresh interpreters without the seconds that importing torch takes: forks of one that imported it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from select import select
from tempfile import NamedTemporaryFile
from typing import Final

_SERVER: Final = """
import json, os, sys, traceback
sys.modules.update(dict.fromkeys(json.loads(sys.argv[1])))  # cannot be imported
exec(sys.argv[2], {})

def run(request):
    for stream, path in enumerate((os.devnull, request["out"], request["err"])):
        os.dup2(os.open(path, os.O_RDWR), stream)
    os.chdir(request["folder"])
    sys.argv = ["-c", *request["arguments"]]
    main = sys.modules["__main__"] = type(sys)("__main__")
    try:
        exec(compile(request["code"], "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        return end.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0

for line in sys.stdin:
    child = os.fork()
    if not child:
        status = run(json.loads(line))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
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
    process itself cannot import, unless ``python`` names another interpreter. ``environment`` changes variables.
    """

    def __init__(
        self,
        setup: str,
        missing: Sequence[str] = (),
        python: Path | str = sys.executable,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        hidden = [*missing]
        if python == sys.executable:
            hidden += [name for name, module in sys.modules.items() if module is None]
        self._process = subprocess.Popen(
            [python, "-c", _SERVER, json.dumps(hidden), setup],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env=os.environ | dict(environment or {}),
        )

    def run(
        self, code: str, *arguments: object, folder: Path = Path(), timeout_s: float = 120
    ) -> subprocess.CompletedProcess[str]:
        """Run ``code`` in ``folder`` to its end."""
        assert self._process.stdin and self._process.stdout
        with NamedTemporaryFile("r") as out, NamedTemporaryFile("r") as err:
            request = {
                "code": code,
                "arguments": [str(one) for one in arguments],
                "folder": str(folder.resolve()),
                "out": out.name,
                "err": err.name,
            }
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            if not select([self._process.stdout], [], [], timeout_s)[0]:
                os.killpg(self._process.pid, signal.SIGKILL)
                raise subprocess.TimeoutExpired(code, timeout_s, out.read(), err.read())
            status = self._process.stdout.readline()
            assert status, f"the fork server ended with {self._process.wait()}"
            return subprocess.CompletedProcess(code, int(status), out.read(), err.read())

    def peak_of(self, setup: str, code: str, *arguments: object) -> int:
        """Return how much anonymous memory ``code`` took at most beside that of ``setup``, in bytes, as sampled."""
        done = self.run(_PEAK.format(setup=setup, code=code), *arguments)
        assert done.returncode == 0, done.stderr
        return int(done.stdout)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()
