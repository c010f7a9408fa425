"""What a fault is: what is prepared, which command meets it, and what must come of it."""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from signal import Signals
from typing import Final

ISOLATIONS: Final = ("process", "cgroup", "docker")


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault, and what must come of it.

    Attributes:
        name: what happens, in the words of the table.
        group: the part of the table.
        command: the arguments of ``weighin``, in a folder of its own.
        code: a regular expression of the exit code.
        says: a regular expression that standard error contains.
        outcomes: for each strategy of the run ``run``, regular expressions of the outcome and the message
            of its record. Each must have one record.
        prepare: writes into the folder before the command. The folder ``base`` is there: a run with one
            record.
        before: the beginning of the command line, such as ``unshare``; it ends with the command.
        variables: environment variables; None removes one.
        needs: "cgroup", "docker" or "root"; a machine without it leaves the fault out.
        stop: a signal, sent to the command ``stop_s`` seconds after it can take it.
        then: the arguments of a second command, which must end with 0, or what chooses them.
        absent: files of the folder that must not be there afterwards.
        present: files of the folder that must be there, because the fault itself wrote them.
        makes: a regular expression of the files that the command adds to the cache for good.
        remakes: a regular expression of the files of the cache that the command makes again.
    """

    name: str
    group: str
    command: tuple[str, ...]
    code: str = "0"
    says: str = ""
    outcomes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    prepare: Callable[[Path], object] = lambda _: None
    before: tuple[str, ...] = ()
    variables: Mapping[str, str | None] = field(default_factory=dict)
    needs: str = ""
    stop: Signals | None = None
    stop_s: float = 0
    then: tuple[str, ...] | Callable[[Path], tuple[str, ...]] = ()
    absent: tuple[str, ...] = ()
    present: tuple[str, ...] = ()
    patience_s: float = 180
    makes: str = ""
    remakes: str = ""


def every() -> list[Fault]:
    """Return the faults of all modules beside this one that have ``FAULTS``, in their order."""
    found: list[Fault] = []
    for module in sorted(one.name for one in pkgutil.iter_modules([str(Path(__file__).parent)])):
        if not module.startswith(("test_", "__")):
            found += getattr(importlib.import_module(module), "FAULTS", [])
    names = [one.name for one in found]
    twice = {name for name in names if names.count(name) > 1}
    assert not twice, f"two faults have one name: {twice}"
    return found
