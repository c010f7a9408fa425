"""Define the exceptions that stop weighin, with the cause and what the user can do, and explain its exit codes. A
measurement (cell) that fails raises none of them: its record gets an ``Outcome``.
"""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

MEANINGS: Final = {
    0: "done (a cell killed for lack of memory is a valid result)",
    1: "a comparison of `weighin check` failed, no strategy fits, or the user declined to confirm",
    2: "bad input",
    3: "the isolation that limits the measured processes' memory does not work on this machine",
    4: "a cell (one measurement) could not be made, or another run is measuring on this machine",
    5: "a strategy loaded wrong weights or failed, a use of the loaded model failed, or one of"
    " several measured commands failed (of one command, `weighin run` gives the exit code)",
    130: "stopped by Ctrl-C, SIGTERM or SIGHUP",
}
EXPLAINED: Final = f"Exit codes: {'; '.join(f'{code} {why}' for code, why in MEANINGS.items())}."

_ROOM = "free some space there, or set TMPDIR or WEIGHIN_CACHE to a folder on another disk"
_FILES = "allow more open files: ulimit -n 4096"
_REPAIRS = {errno.ENOSPC: _ROOM, errno.EDQUOT: _ROOM, errno.EMFILE: _FILES}


class HarnessError(Exception):
    """What stops weighin: the ``message`` names the cause, the ``repair`` what the user can do."""

    exit_code = 2

    def __init__(self, message: str, repair: str = "", *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.message, self.repair = message, repair
        self.exit_code = self.exit_code if exit_code is None else exit_code

    def __str__(self) -> str:
        return f"{self.message}\n{self.repair}" if self.repair else self.message


class ConfigError(HarnessError): ...  # a model, suite, option or command line is invalid


class FormatLimit(ConfigError): ...  # a checkpoint format cannot hold a model; other formats can


class UnknownName(ConfigError):
    """A name is unknown; the repair suggests a similar name."""

    def __init__(self, kind: str, name: str, known: Iterable[str], repair: str = "") -> None:
        from difflib import get_close_matches  # imported here to save a worker's memory

        names = sorted(known)
        small = [one for one in names if one == f"{name}-small"]  # "gpt2", as the Hub calls it
        longest_first = sorted(names, key=len, reverse=True)
        words = {word: one for one in longest_first for word in one.replace("-", "_").split("_")}
        words |= {one: one for one in names}
        # Half of the letters agree by chance, as of "set" and "use".
        near = small or [words[one] for one in get_close_matches(name, words, n=1, cutoff=0.7)]
        hint = f"did you mean {near[0]!r}? " if near else ""
        listing = f"{hint}known: {', '.join(names) or 'none'}" + (f"; {repair}" if repair else "")
        super().__init__(f"no {kind} is called {name!r}", listing)


class IsolationUnavailable(HarnessError):
    exit_code = 3


class CheckpointError(HarnessError): ...  # a checkpoint is damaged or of an unsupported kind


class RecordError(HarnessError): ...  # a run's folder or records cannot be read, written or used


class StillRunning(HarnessError):
    exit_code = 4

    def __init__(self, message: str) -> None:
        waits = "the process waits in the kernel, for example for a disk or a network share that does not answer"
        super().__init__(message, f"{waits}: repair the disk or share, or restart the machine")


class Interrupted(HarnessError):
    exit_code = 130


@contextmanager
def extra(name: str, purpose: str) -> Iterator[None]:
    """Turn a failed import into a ConfigError, which says that ``purpose`` needs weighin's extra ``name``."""
    try:
        yield
    except ImportError as error:
        from weighin import install  # imported here to save a worker's memory

        package = f"the Python package {error.name}" if error.name else "a Python package"
        fault = f"{purpose} needs {package}: {error}"
        raise ConfigError(fault, install.command(name)) from None


def explain(error: OSError) -> HarnessError:
    from shlex import quote  # imported here to save a worker's memory

    reason, path = error.strerror or str(error) or type(error).__name__, error.filename
    place = os.fsdecode(path) if isinstance(path, str | bytes) else ""
    message = f"{place}: {reason}" if place else f"the operating system refused: {reason}"
    usual = "run weighin doctor to see what works on this machine"
    if place and error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        usual = f"run ls -ld {quote(place)} to see who owns it"
    return HarnessError(message, _REPAIRS.get(error.errno or 0, usual))
