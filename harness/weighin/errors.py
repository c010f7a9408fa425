"""Define the exceptions that stop weighin. A measurement (cell) that fails raises no error of this
module: its record gets an ``Outcome``.

::

    HarnessError              message, repair, exit_code
     x ConfigError            a model, suite, option or command line is invalid            exit 2
        - FormatLimit         a checkpoint format cannot hold a model; other formats can
        - UnknownName         a name of a strategy, metric, format ... is unknown
     x IsolationUnavailable   this machine cannot run cells in this isolation              exit 3
     x CheckpointError        a checkpoint is damaged or of an unsupported kind            exit 2
        - WholePipeline       a pipeline of several models was given as one model
     x NoBaseline             a run's results must not become a baseline file              exit 1
     x RecordError            a run's folder or records cannot be read, written or used    exit 2
        - SchemaTooNew        a later version of weighin wrote the record or file
        - DamagedRecord       a line of a record file is not a record
     x StillRunning           a process has not ended after SIGKILL                        exit 4
     x MachineBusy            another run is measuring on this machine                     exit 4
     x NoNodeLeft             no machine of a cluster can run the remaining cells          exit 4
     x Interrupted            Ctrl-C, SIGTERM, SIGHUP, raised when all is cleaned up       exit 130

``weighin.exit_codes`` explains the exit codes 0 to 5 and 130. The command line turns an ``OSError``
into a HarnessError (``explain``).
"""

import errno
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)
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
    """Base of weighin's errors: ``message`` says the cause, and ``repair`` what the user can do."""

    exit_code = 2

    def __init__(self, message: str, repair: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.repair = repair

    def __str__(self) -> str:
        return f"{self.message}\n{self.repair}" if self.repair else self.message


class ConfigError(HarnessError):
    """A configuration file, an argument or an option is invalid; ``option`` names the option."""

    def __init__(self, message: str, repair: str = "", *, option: str = "") -> None:
        super().__init__(message, repair)
        self.option = option


class FormatLimit(ConfigError):
    """A checkpoint format cannot hold a model; other formats can."""


class UnknownName(ConfigError):
    """No strategy, metric, format ... has this name; the repair suggests a similar name."""

    def __init__(self, kind: str, name: str, known: Iterable[str], repair: str = "") -> None:
        from difflib import get_close_matches  # imported here to save a worker's memory

        names = sorted(known)
        small = [one for one in names if one == f"{name}-small"]  # "gpt2", as the Hub calls it
        near = small or get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        listing = f"{hint}known: {', '.join(names) or 'none'}"
        super().__init__(
            f"no {kind} is called {name!r}", f"{listing}; {repair}" if repair else listing
        )
        self.name = name


class IsolationUnavailable(HarnessError):
    """An isolation (such as Docker) does not work on this machine; ``repair`` makes it work."""

    exit_code = 3


class CheckpointError(HarnessError):
    """A checkpoint is damaged or unsupported; the message names the file and where the fault is."""


class WholePipeline(CheckpointError):
    """A pipeline of several models was given in place of one model.

    ``folder`` is the pipeline's folder, and ``largest`` is the folder of its largest model. The
    command line then shows the typed command with ``largest`` in place of ``folder`` as the repair.
    """

    def __init__(
        self, message: str, repair: str, *, folder: os.PathLike[str], largest: os.PathLike[str]
    ) -> None:
        super().__init__(message, repair)
        self.folder, self.largest = os.fspath(folder), os.fspath(largest)


class NoBaseline(HarnessError):
    """A run's results must not become a baseline file (the accepted figures of ``weighin check``),
    or the user has not confirmed that they may.
    """

    exit_code = 1


class RecordError(HarnessError):
    """A run's folder, or a file in it, cannot be read, written, resumed or joined."""


class SchemaTooNew(RecordError):
    """A record or baseline file has a schema version that this version of weighin cannot read."""


class DamagedRecord(RecordError):
    """A line of a record file is not a complete record."""


class StillRunning(HarnessError):
    """A process waits in the kernel, so that SIGKILL does not end it and free its memory."""

    exit_code = 4

    def __init__(self, message: str) -> None:
        super().__init__(
            message,
            "the process waits in the kernel, for example for a disk or a network share that does not"
            " answer: repair the disk or share, or restart the machine",
        )


class MachineBusy(HarnessError):
    """Another run is measuring on this machine; two runs together would distort both results."""

    exit_code = 4


class NoNodeLeft(HarnessError):
    """No machine of a cluster can run the cells (measurements) that have no record yet."""

    exit_code = 4


class Interrupted(HarnessError):
    """The user stopped the run; every process that the run started has already ended."""

    exit_code = 130


@contextmanager
def extra(name: str, purpose: str) -> Iterator[None]:
    """Turn a failed import in the ``with`` block into a ConfigError with the install command.

    ``purpose`` is the feature that needs the package, and ``name`` is the extra of weighin that
    installs the package.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        from weighin import install  # imported here to save a worker's memory

        raise ConfigError(
            f"{purpose} needs the Python package {error.name}, which is not installed",
            install.command(name),
        ) from None


def explain(error: OSError) -> HarnessError:
    """Return a HarnessError for an OSError, with its path (if any), its reason and a repair."""
    from shlex import quote  # imported here to save a worker's memory

    reason = error.strerror or str(error) or type(error).__name__
    path = error.filename
    place = os.fsdecode(path) if isinstance(path, str | bytes) else ""
    message = f"{place}: {reason}" if place else f"the operating system refused: {reason}"
    if error.errno in _REFUSED and place:
        repair = f"run ls -ld {quote(place)} to see who owns it"
    else:
        usual = "run weighin doctor to see what works on this machine"
        repair = _REPAIRS.get(error.errno or 0, usual)
    return HarnessError(message, repair)
