"""Plan a run of commands, or restore a run of commands from its plan."""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from shlex import join
from typing import TYPE_CHECKING, Final

from weighin.cell import Cell
from weighin.errors import ConfigError
from weighin.isolation import select
from weighin.isolation.base import Isolation
from weighin.records import run_folder
from weighin.records.coverage import resume_command
from weighin.run import readiness
from weighin.run.command_runner import files_in
from weighin.run.command_settings import CommandSettings
from weighin.run.machines import THIS_MACHINE, Machines
from weighin.run.output_lines import Pattern
from weighin.run.settings import RunSettings
from weighin.run.task import PlannedCommand, Run, new_folder, write_plan
from weighin.units import complaint_of_limit

if TYPE_CHECKING:
    from weighin.suite.commands import CommandSuite

_LABEL_LENGTH: Final = 60  # characters of all labels in the name of a run's folder
_INTERPRETERS: Final = re.compile(r"(python|pypy|perl|ruby|node|bash|sh)[\d.]*")
_CODE: Final = {"perl": "eE", "ruby": "e", "node": "ep"}  # code follows these options, else -c
_VALUES: Final = {"python": "WX", "pypy": "WX", "bash": "oO", "sh": "o", "ruby": "rI", "node": "r"}
_LONG_CODE: Final = ("--eval", "--print")


@dataclass(frozen=True, slots=True)
class CommandRequest:
    """A command that the user wants to measure, and the limits under which it is to run.

    Attributes:
        label: the command's name in tables; empty for the name of its program or script.
        limits: RAM limits in bytes; None is no limit.
        environment: the variables that the command gets in addition to this process's environment.
        folder: the folder of the new run; None for ``results/TIME-LABELS-LIMITS``.
    """

    command: tuple[str, ...]
    how: CommandSettings
    settings: RunSettings = field(default_factory=RunSettings)
    label: str = ""
    limits: tuple[int | None, ...] = (None,)
    repeats: int = 1
    isolation: str = "auto"
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: Path | None = None


def start(requests: Sequence[CommandRequest], machines: Machines = THIS_MACHINE) -> tuple[Run, str]:
    """Plan a new run of commands, write its plan, and return the run and a note on the isolation.

    The requests may differ only in ``command``, ``label``, ``environment``, ``how.cold`` and
    ``how.marks``.

    Raises:
        ConfigError, IsolationUnavailable, RecordError: the run cannot start.
    """
    request = requests[0]
    for each in requests:
        _check_program(each, machines)
        if machines is THIS_MACHINE:
            files_in(each.how.cold)
        for pattern in each.how.marks:
            Pattern("--mark", pattern)
    readiness.check(request.how)
    if request.how.ready:
        Pattern("--ready", request.how.ready)
    _check_limits(request.limits)
    if request.how.image and request.isolation not in ("auto", "docker"):
        raise ConfigError(
            f"--image {request.how.image} needs --isolation docker, but the command line has"
            f" --isolation {request.isolation}",
            "leave out --isolation or --image",
        )
    machines.check_ram(request.limits)
    limited = any(limit is not None for limit in request.limits)
    isolation, note = _choose(
        request, machines, limited=limited or request.settings.within is not None
    )
    cells = [
        Cell.of_command(
            each.label or label_of(each.command),
            each.command,
            isolation.name,
            ram_limit_bytes=limit,
            repeat=repeat,
            environment=dict(each.environment),
            cache="cold" if each.how.cold else "as found",
        )
        for repeat in range(request.repeats)
        for limit in dict.fromkeys(request.limits)
        for each in requests
    ]
    settings = replace(request.settings, command=_shared(requests))
    label = "-".join(dict.fromkeys(cell.strategy for cell in cells))[:_LABEL_LENGTH]
    folder = new_folder([label], request.limits, is_search=settings.within is not None)
    planned = [PlannedCommand(cell) for cell in cells]
    return write_plan(request.folder or folder, planned, isolation, settings), note


def _check_limits(limits: Sequence[int | None]) -> None:
    for limit in limits:
        if complaint := complaint_of_limit(limit):
            raise ConfigError(f"--ram {complaint[0]}", complaint[1])


def _shared(requests: Sequence[CommandRequest]) -> CommandSettings:
    """Return a run's settings; with several commands, ``own`` has each one's ``cold`` and ``marks``."""
    first = requests[0].how
    if len(requests) == 1:
        return first
    own = {each.label: {"cold": each.how.cold, "marks": each.how.marks} for each in requests}
    return replace(first, cold=(), marks=(), own=own)


def of_suite(suite: "CommandSuite", request: CommandRequest) -> list[CommandRequest]:
    """Return a copy of ``request`` for each command of a suite, with the suite's settings."""
    settings = replace(request.settings, timeout_s=suite.timeout_s)
    return [
        replace(
            request,
            command=tuple(each.command),
            label=each.name,
            how=replace(
                request.how,
                cold=tuple(str(Path(path).absolute()) for path in each.cold),
                marks=tuple(each.marks),
                stacks=suite.stacks,
                image=suite.image,
            ),
            settings=settings,
            limits=tuple(suite.ram),
            repeats=suite.repeats,
            isolation=suite.isolation,
            environment=each.environment,
        )
        for each in suite.commands
    ]


def restore(folder: Path, cells: Sequence[Cell], settings: RunSettings, *, trusted: bool) -> Run:
    """Restore a run of commands from its plan.

    Raises:
        ConfigError: ``trusted`` is False, because a plan from somebody else may name any command.
    """
    assert settings.command
    if not trusted:
        from weighin.run import trust  # imports the suites, and pydantic

        trust.check(
            foreign(cells, settings.command),
            place=folder / run_folder.PLAN,
            again=resume_command(settings.verb, folder),
        )
    planned: Sequence[PlannedCommand] = [PlannedCommand(cell) for cell in cells]
    if settings.shard:
        planned = settings.shard.of(planned)
    isolation = select.named(cells[0].isolation, settings.base_image, image=settings.command.image)
    return Run(folder, planned, isolation, settings)


def foreign(cells: Sequence[Cell], how: CommandSettings) -> list[str]:
    """Return one line for each command of a plan, and for each path that a container mounts."""
    place = f"{how.folder}, image {how.image}" if how.image else how.folder
    lines = [f"command {join(cell.command)} in {place}" for cell in cells]
    return list(dict.fromkeys([*lines, *(f"mount {path}" for path in how.mounts)]))


def label_of(command: Sequence[str]) -> str:
    """Return a short name of a command: "train.py" for ("python", "train.py", "--epochs", "3")."""
    name = Path(command[0]).name
    interpreter = _INTERPRETERS.fullmatch(name)
    if not interpreter:
        return name
    code, values = _CODE.get(interpreter[1], "c"), _VALUES.get(interpreter[1], "")
    words = iter(command[1:])
    for word in words:
        if not word.startswith("-"):
            return Path(word).name
        if word == "-" or word in _LONG_CODE:  # the code is in standard input or in the next word
            return name
        # Options of one letter may share a word, whose rest may be the value of the last option.
        for place, letter in enumerate(word[1:] if word[:2] != "--" else "", 2):
            if letter in code:
                return name
            if letter == "m" and interpreter[1] in ("python", "pypy"):
                return word[place:] or next(words, name)
            if letter in values:
                if not word[place:]:
                    next(words, "")
                break
    return name


def _check_program(request: CommandRequest, machines: Machines) -> None:
    if not request.command:
        raise ConfigError(
            "no command was given",
            "write the command after --: weighin run --ram 4g -- python x.py",
        )
    program = request.command[0]
    if request.isolation == "docker" or request.how.image or machines is not THIS_MACHINE:
        return  # the program is in the image or on another node
    path = request.environment.get("PATH", os.environ.get("PATH"))
    if shutil.which(program, path=path) is None:
        raise ConfigError(
            f"there is no program {program!r}",
            "give a program in PATH, or the path of a program; for a shell's command line: sh -c 'LINE'",
        )


def _choose(request: CommandRequest, machines: Machines, *, limited: bool) -> tuple[Isolation, str]:
    """Choose the isolation. Choose a container only if the user asked for one, because a container
    lacks this machine's programs.
    """
    name = "docker" if request.isolation == "auto" and request.how.image else request.isolation
    return machines.choose(
        name,
        limited=limited,
        base_image=request.settings.base_image,
        packages=(),
        containers=name != "auto",
        image=request.how.image,
    )
