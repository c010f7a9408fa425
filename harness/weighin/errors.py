"""What stops the harness, as exceptions; what happens inside a cell is an ``Outcome`` instead.

::

    HarnessError              message, repair, exit_code
     x ConfigError            a model, suite, option or command line that cannot be used   exit 2
        - UnknownName         a strategy, model or isolation that does not exist
     x IsolationUnavailable   this machine cannot run cells that way; the repair mends it  exit 3
     x CheckpointError        a file, what is wrong with it, and where                     exit 2
     x NoBaseline             what was measured must not become a baseline                 exit 1
     x RecordError            a run's folder or its records                                exit 2
        - SchemaTooNew        written by a later weighin
        - DamagedRecord       a line that is no record
     x StillRunning           a process that SIGKILL does not end                          exit 4
     x Interrupted            Ctrl-C or SIGTERM, after everything was cleaned up           exit 130

Exit code 1 means that a gate failed, 4 that some cell has the outcome ``measurement_failed``, 5 that
some strategy loaded wrong weights or failed (``weighin.exit_codes``). An ``OSError`` that nobody
expected becomes a HarnessError at the command line (``explain``).
"""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
_TOO_MANY = (errno.EMFILE, errno.ENFILE)
_ROOM = "free some space there; TMPDIR and WEIGHIN_CACHE name other folders"
_MEMORY = "free memory: end other programs, or measure fewer things at once"


class HarnessError(Exception):
    """Base of all errors that a user sees: one line of cause, one line of repair."""

    exit_code = 2

    def __init__(self, message: str, repair: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.repair = repair

    def __str__(self) -> str:
        return f"{self.message}\n{self.repair}" if self.repair else self.message


class ConfigError(HarnessError):
    """A configuration file, an option or an argument that cannot be used."""


class UnknownName(ConfigError):
    """A name that is not among the known ones; suggests the nearest."""

    def __init__(self, kind: str, name: str, known: Iterable[str], repair: str = "") -> None:
        from difflib import get_close_matches  # the worker never asks for a near match

        names = sorted(known)
        near = get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        listing = f"{hint}known: {', '.join(names) or 'none'}"
        super().__init__(
            f"no {kind} is called {name!r}", f"{listing}; {repair}" if repair else listing
        )
        self.name = name


class IsolationUnavailable(HarnessError):
    """Cells cannot be run in this way on this machine; ``repair`` is the command that mends it."""

    exit_code = 3


class CheckpointError(HarnessError):
    """A checkpoint that cannot be used: names the file, what is wrong, and where."""


class NoBaseline(HarnessError):
    """What was measured must not become a baseline, or not without its owner's word."""

    exit_code = 1


class RecordError(HarnessError):
    """A run's folder, or a file in it, that cannot be written or read."""


class SchemaTooNew(RecordError):
    """Records of a later schema than this version knows."""


class DamagedRecord(RecordError):
    """A line of a record file that is not a whole record."""


class StillRunning(HarnessError):
    """A process that SIGKILL does not end: it waits in the kernel, and holds what it has."""

    exit_code = 4

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            "it waits in the kernel, as for a disk or a network share that does not answer: mend"
            " that, or restart the machine",
        )


class Interrupted(HarnessError):
    """The user stopped the run; everything it started is already gone."""

    exit_code = 130


@contextmanager
def extra(name: str, purpose: str) -> Iterator[None]:
    """Import packages of an extra inside; where one is missing, a ConfigError says what to install.

    ``purpose`` is what needs them: "parquet".
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{purpose} needs {error.name}, which is not installed",
            f"pip install 'weighin[{name}]'",
        ) from None


def explain(error: OSError) -> HarnessError:
    """Return what the operating system refused, in a user's words: the path, the reason, a repair."""
    from shlex import quote  # the worker, which raises these too, has no use for it

    reason = error.strerror or str(error) or type(error).__name__
    path = error.filename
    place = os.fsdecode(path) if isinstance(path, str | bytes) else ""
    message = f"{place}: {reason}" if place else f"the operating system refused: {reason}"
    repair = "weighin doctor says what works on this machine"
    if error.errno in _FULL:
        repair = _ROOM
    elif error.errno in _REFUSED and place:
        repair = f"ls -ld {quote(place)} shows whose it is"
    elif error.errno in _TOO_MANY:
        repair = "allow more open files: ulimit -n 4096"
    elif error.errno == errno.ENOMEM:
        repair = _MEMORY
    return HarnessError(message, repair)
