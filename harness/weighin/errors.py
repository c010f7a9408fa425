"""Define the exceptions that stop weighin, and explain its exit codes. A measurement (cell) that fails
raises no error of this module: its record gets an ``Outcome``. An ``OSError`` becomes a HarnessError
(``explain``).

::

    HarnessError              message (the cause), repair (what the user can do)          exit 2
     x ConfigError            a model, suite, option (``option``) or command line is invalid
        - FormatLimit         a checkpoint format cannot hold a model; other formats can
        - UnknownName         a name is unknown; the repair suggests a similar name
     x IsolationUnavailable   this machine cannot run cells in this isolation             exit 3
     x CheckpointError        a checkpoint is damaged or of an unsupported kind; names the fault
     x RecordError            a run's folder or records cannot be read, written or used
     x StillRunning           a process has not ended after SIGKILL                       exit 4
     x NoNodeLeft             no machine of a cluster can run the remaining cells         exit 4
     x Interrupted            Ctrl-C, SIGTERM, SIGHUP, raised when all is cleaned up      exit 130
"""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

MEANINGS: Final = {
    0: "done (a cell killed for lack of memory is a valid result)",
    1: "a comparison of `weighin check` failed, no strategy fits into the memory, or the user"
    " declined a confirmation",
    2: "bad input",
    3: "the isolation that limits the memory of the measured processes does not work on this"
    " machine",
    4: "a cell (one measurement) could not be made, or another run is measuring on this machine",
    5: "a strategy loaded wrong weights or failed, a use of the loaded model failed, or one of"
    " several measured commands failed",
    130: "stopped by Ctrl-C, SIGTERM or SIGHUP",
}
EXPLAINED: Final = f"Exit codes: {'; '.join(f'{code} {why}' for code, why in MEANINGS.items())}."

_ROOM = "free some space there, or set TMPDIR or WEIGHIN_CACHE to a folder on another disk"
_FILES = "allow more open files: ulimit -n 4096"
_REPAIRS = {
    errno.ENOSPC: _ROOM,
    errno.EDQUOT: _ROOM,
    errno.EMFILE: _FILES,
    errno.ENFILE: _FILES,
    errno.ENOMEM: "free memory: end other programs, or run fewer measurements at once",
}


class HarnessError(Exception):
    exit_code = 2

    def __init__(self, message: str, repair: str = "", *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.message, self.repair = message, repair
        self.exit_code = self.exit_code if exit_code is None else exit_code

    def __str__(self) -> str:
        return f"{self.message}\n{self.repair}" if self.repair else self.message


class ConfigError(HarnessError):
    def __init__(self, message: str, repair: str = "", *, option: str = "") -> None:
        super().__init__(message, repair)
        self.option = option


class FormatLimit(ConfigError): ...


class UnknownName(ConfigError):
    def __init__(self, kind: str, name: str, known: Iterable[str], repair: str = "") -> None:
        from difflib import get_close_matches  # imported here to save a worker's memory

        names = sorted(known)
        small = [one for one in names if one == f"{name}-small"]  # "gpt2", as the Hub calls it
        near = small or get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        listing = f"{hint}known: {', '.join(names) or 'none'}" + (f"; {repair}" if repair else "")
        super().__init__(f"no {kind} is called {name!r}", listing)


class IsolationUnavailable(HarnessError):
    exit_code = 3


class CheckpointError(HarnessError): ...


class RecordError(HarnessError): ...


class StillRunning(HarnessError):
    exit_code = 4

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            "the process waits in the kernel, for example for a disk or a network share that does not"
            " answer: repair the disk or share, or restart the machine",
        )


class NoNodeLeft(HarnessError):
    exit_code = 4


class Interrupted(HarnessError):
    exit_code = 130


@contextmanager
def extra(name: str, purpose: str) -> Iterator[None]:
    """Turn a failed import into a ConfigError: ``purpose``, a feature, needs the extra ``name`` of weighin."""
    try:
        yield
    except ImportError as error:
        from weighin import install  # imported here to save a worker's memory

        fault = f"a Python package that cannot be imported: {error}"
        if isinstance(error, ModuleNotFoundError):
            fault = f"the Python package {error.name}, which is not installed"
        raise ConfigError(f"{purpose} needs {fault}", install.command(name)) from None


def explain(error: OSError) -> HarnessError:
    from shlex import quote  # imported here to save a worker's memory

    reason = error.strerror or str(error) or type(error).__name__
    path = error.filename
    place = os.fsdecode(path) if isinstance(path, str | bytes) else ""
    message = f"{place}: {reason}" if place else f"the operating system refused: {reason}"
    usual = "run weighin doctor to see what works on this machine"
    if place and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        usual = f"run ls -ld {quote(place)} to see who owns it"
    return HarnessError(message, _REPAIRS.get(error.errno or 0, usual))
