"""Plan a run of commands: expand its settings into cells, in the order in which they run."""

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from weighin.cell import Cell
from weighin.errors import ConfigError
from weighin.isolation.base import Isolation
from weighin.plan.task import Node, Planned, choose
from weighin.settings.definition import Settings

_INTERPRETERS: Final = re.compile(r"(python|pypy|perl|ruby|node|bash|sh)[\d.]*")
_CODE: Final = {"perl": "eE", "ruby": "e", "node": "ep"}  # code follows these options, else -c
_VALUES: Final = {"python": "WX", "pypy": "WX", "bash": "oO", "sh": "o", "ruby": "rI", "node": "r"}
_LONG_CODE: Final = ("--eval", "--print")


def plan(settings: Settings, nodes: Sequence[Node]) -> tuple[list[Planned], Isolation, str]:
    """Return a new run's cells and isolation, and a note on the isolation; raise ConfigError or
    IsolationUnavailable if the run cannot start.
    """
    # Else the program is in the image or on another node.
    is_here = not (settings.isolation == "docker" or settings.image or nodes)
    for command in settings.commands:
        program, variables = command.command[0], os.environ | command.environment
        if is_here and shutil.which(program, path=variables.get("PATH")) is None:
            raise ConfigError(
                f"there is no program {program!r}",
                "give a program in PATH, or the path of a program; for a shell's command line: sh -c 'LINE'",
            )
        if not nodes:
            files_in(command.cold)
    check(settings)
    if settings.image and settings.isolation not in ("auto", "docker"):
        raise ConfigError(
            f"--image {settings.image} needs --isolation docker, but the command line has"
            f" --isolation {settings.isolation}",
            "leave out --isolation or --image",
        )
    isolation, note = choose(settings, nodes)
    planned = [
        Planned(
            Cell.of_command(
                command.name,
                tuple(command.command),
                isolation.name,
                ram_limit_bytes=limit,
                repeat=repeat,
                environment=dict(command.environment),
                cache="cold" if command.cold else "as found",
            )
        )
        for repeat in range(settings.repeats)
        for limit in dict.fromkeys(settings.ram)
        for command in settings.commands
    ]
    return planned, isolation, note


def check(settings: Settings) -> None:
    """Raise ConfigError for a regular expression or an address that cannot be used."""
    patterns = [("--mark", mark) for command in settings.commands for mark in command.marks]
    for option, pattern in [*patterns, ("--ready", settings.ready)]:
        if not pattern:
            continue
        import regex  # takes 0.02 s

        try:
            regex.compile(pattern)
        except regex.error as error:
            raise ConfigError(
                f"{option} {pattern!r} is not a regular expression: {error}",
                "write a backslash before a character that stands for itself: 'loss \\(train\\)'",
            ) from None
    if settings.ready and settings.ready_url:
        raise ConfigError(
            "--ready and --ready-url cannot be combined: each decides when the server is ready",
            "leave one of the two out",
        )
    try:
        parts = urlsplit(settings.ready_url)
        is_usable = parts.scheme == "http" and parts.hostname and parts.port != 0
    except ValueError:  # http://[::1 or a port that is none
        is_usable = False
    if settings.ready_url and not is_usable:
        raise ConfigError(
            f"--ready-url {settings.ready_url!r} is not an HTTP address",
            "write the address as in --ready-url http://127.0.0.1:8000/health",
        )


def files_in(paths: Sequence[str]) -> list[Path]:
    """Return the files among ``paths`` and in its folders; raise ConfigError if a path does not exist."""
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise ConfigError(f"--cold {path}: there is no such file or folder")
        found = [path] if path.is_file() else path.rglob("*")
        files += [each for each in found if each.is_file()]
    return files


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
