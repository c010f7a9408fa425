"""Plan a run of a command, or restore one that was planned."""

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from shlex import join, quote
from typing import Final

from weighin.cell import Cell
from weighin.errors import ConfigError
from weighin.isolation import select
from weighin.isolation.base import Isolation
from weighin.records import run_folder
from weighin.run import readiness, trust
from weighin.run.command_output import Pattern
from weighin.run.command_runner import files_in
from weighin.run.command_settings import CommandSettings
from weighin.run.settings import RunSettings
from weighin.run.site import THIS_MACHINE, Site
from weighin.run.task import PlannedCommand, Run, check_folder
from weighin.units import MIB, format_exact

LEAST_RAM: Final = MIB
_INTERPRETERS: Final = re.compile(r"(python|pypy|perl|ruby|node|bash|sh)[\d.]*")


@dataclass(frozen=True, slots=True)
class CommandRequest:
    """A command, and the limits under which it is to run.

    Attributes:
        label: its name in tables; empty for the name of its program or script.
        limits: RAM limits in bytes; None is no limit.
        environment: variables that are added to this process's environment.
        folder: the folder of the new run; None for one with a name of its own.
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


def start(request: CommandRequest, site: Site = THIS_MACHINE) -> tuple[Run, str]:
    """Plan a new run, write its plan, and return the run with a note on the isolation.

    Raises:
        ConfigError, IsolationUnavailable, RecordError: the run cannot start.
    """
    _check_program(request)
    files_in(request.how.cold)
    readiness.check(request.how)
    for option, patterns in (("--mark", request.how.marks), ("--ready", (request.how.ready,))):
        for pattern in patterns:
            Pattern(option, pattern)
    for limit in request.limits:
        if limit is not None and limit < LEAST_RAM:
            raise ConfigError(
                f"--ram {format_exact(limit)} is less than any program needs",
                f"did you mean {limit}g?" if limit < 1024 else "give at least 1MiB",
            )
    if request.how.image and request.isolation not in ("auto", "docker"):
        raise ConfigError(
            f"--image {request.how.image} needs a container, not --isolation {request.isolation}",
            "leave out --isolation, or leave out --image",
        )
    site.check_ram(request.limits)
    limited = any(limit is not None for limit in request.limits)
    isolation, note = _choose(request, site, limited=limited or request.settings.within is not None)
    label = request.label or label_of(request.command)
    cells = [
        Cell.of_command(
            label,
            request.command,
            isolation.name,
            ram_limit_bytes=limit,
            repeat=repeat,
            environment=dict(request.environment),
            cache="cold" if request.how.cold else "as found",
        )
        for repeat in range(request.repeats)
        for limit in dict.fromkeys(request.limits)
    ]
    settings = replace(request.settings, command=request.how)
    folder = request.folder or Path("results") / _name(label, request)
    check_folder(folder, settings.verb)
    run_folder.write_plan(folder, cells, settings.as_json())
    planned: Sequence[PlannedCommand] = [PlannedCommand(cell) for cell in cells]
    if settings.shard:
        planned = settings.shard.of(planned)
    return Run(folder, planned, isolation, settings, is_new=True), note


def restore(folder: Path, cells: Sequence[Cell], settings: RunSettings, *, trusted: bool) -> Run:
    """Return a run of commands that was planned before.

    Raises:
        ConfigError: ``trusted`` is False: a plan may name any command.
    """
    assert settings.command
    if not trusted:
        trust.check(
            foreign(cells, settings.command),
            place=folder / run_folder.PLAN,
            again=f"weighin {settings.verb} --resume {quote(str(folder))}",
        )
    planned: Sequence[PlannedCommand] = [PlannedCommand(cell) for cell in cells]
    if settings.shard:
        planned = settings.shard.of(planned)
    isolation = select.named(cells[0].isolation, settings.base_image, image=settings.command.image)
    return Run(folder, planned, isolation, settings)


def foreign(cells: Sequence[Cell], how: CommandSettings) -> list[str]:
    """Return a line for each command of a plan, and for each path that its container sees."""
    place = f"{how.folder}, image {how.image}" if how.image else how.folder
    lines = [f"command {join(cell.command)} in {place}" for cell in cells]
    return list(dict.fromkeys([*lines, *(f"mount {path}" for path in how.mounts)]))


def label_of(command: Sequence[str]) -> str:
    """Return a short name of a command: "train.py" for ("python", "train.py", "--epochs", "3")."""
    name = Path(command[0]).name
    if _INTERPRETERS.fullmatch(name):
        for word in command[1:]:
            if word in ("-c", "-m"):
                follows = command[list(command).index(word) + 1 :]
                return follows[0] if word == "-m" and follows else name
            if not word.startswith("-"):
                return Path(word).name
    return name


def _check_program(request: CommandRequest) -> None:
    if not request.command:
        raise ConfigError(
            "there is no command to run", "write it after --: weighin run --ram 4g -- python x.py"
        )
    program = request.command[0]
    if request.isolation == "docker" or request.how.image:
        return  # it is looked for in the image
    path = request.environment.get("PATH", os.environ.get("PATH"))
    if shutil.which(program, path=path) is None:
        raise ConfigError(
            f"there is no program {program!r}",
            "give a program of PATH, or the path of one; for a line of a shell: sh -c 'LINE'",
        )


def _choose(request: CommandRequest, site: Site, *, limited: bool) -> tuple[Isolation, str]:
    """Choose the isolation. A container lacks this machine's programs, so it must be asked for."""
    name = "docker" if request.isolation == "auto" and request.how.image else request.isolation
    return site.choose(
        name,
        limited=limited,
        base_image=request.settings.base_image,
        packages=(),
        containers=name != "auto",
        image=request.how.image,
    )


def _name(label: str, request: CommandRequest) -> str:
    limits = [format_exact(limit) for limit in request.limits if limit is not None]
    words = [
        datetime.now().astimezone().strftime("%Y%m%dT%H%M%S"),
        re.sub(r"[^\w.+-]+", "_", label).strip("._-") or "command",
        *(["floor"] if request.settings.within is not None else limits),
    ]
    return "-".join(words)
