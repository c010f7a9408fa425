"""Read and validate a YAML file with a suite of commands, for ``weighin run --suite``."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from weighin.errors import ConfigError
from weighin.suite.config import (
    Environment,
    Limit,
    Strict,
    as_list,
    refuse_both,
    validate,
)
from weighin.suite.yaml_file import read_mapping
from weighin.text import printable
from weighin.units import complaint_of_limit


def _as_command(value: object) -> object:
    """Read a command: a list of words, or a text that is split into words as in a shell."""
    if not isinstance(value, str):
        words = value if isinstance(value, list) else [value]
        return [str(word) if isinstance(word, int | float) else word for word in words]
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ValueError(
            f"{value!r} cannot be split into words: {str(error).lower()}",
            "write a list of words: [python, train.py]",
        ) from None


def _check_name(name: str) -> str:
    if not name or printable(name) != name:
        raise ValueError(f"{name!r} is not a name", "write a name of printable characters")
    return name


def _check_limit(value: int | None) -> int | None:
    if complaint := complaint_of_limit(value):
        raise ValueError(*complaint)
    return value


class SuiteCommand(Strict):
    name: Annotated[str, AfterValidator(_check_name)]
    """The label of the command in reports and in a baseline. Each command has its own."""
    command: Annotated[list[str], BeforeValidator(_as_command), Field(min_length=1)]
    """The program and its arguments: a list, or one text that is split as a shell splits it."""
    cold: Annotated[list[str], BeforeValidator(as_list)] = Field([])
    """Files and folders to drop from the page cache before each start, as `--cold`."""
    marks: Annotated[list[str], BeforeValidator(as_list)] = Field([])
    """Regular expressions: each line of output that contains one is a mark on the timeline, as `--mark`."""
    environment: Environment = Field({})
    """Environment variables of the command, such as `{OMP_NUM_THREADS: 1}`."""


def _check_names(commands: list[SuiteCommand]) -> list[SuiteCommand]:
    names = [each.name for each in commands]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(
            f"two commands are called {twice!r}",
            "rename one of the two commands, because a record identifies a command by its name",
        )
    return commands


class CommandSuite(Strict):
    """A matrix of measurements (cells): every command x limit, ``repeats`` times."""

    commands: Annotated[
        list[SuiteCommand],
        BeforeValidator(as_list),
        AfterValidator(_check_names),
        Field(min_length=1),
    ]
    """The commands: mappings with the keys of a command."""
    ram: Annotated[
        list[Annotated[Limit, AfterValidator(_check_limit)]],
        BeforeValidator(as_list),
        Field(min_length=1),
    ] = Field([None])
    """RAM limits, such as `[8g, 600m, none]`."""
    isolation: Literal["auto", "docker", "cgroup", "process"] = "auto"
    """How a command is limited and measured. `auto` takes a cgroup, or a plain process; a container must be asked for."""
    image: str = ""
    """The image of the container in which the commands run. Without this key, the commands run on this machine."""
    repeats: int = Field(1, ge=1, le=10_000)
    """How many times each cell is measured."""
    timeout_s: float = Field(0, ge=0, allow_inf_nan=False)
    """Seconds after which a command is killed; 0 for none."""
    stacks: bool = False
    """Whether the stacks of Python processes are read near the peak. Each reading stops the command for an instant."""
    description: str = ""
    """One line for `weighin list suites`."""


def read_command_suite(path: Path) -> CommandSuite:
    """Read the YAML file of a suite of commands.

    Raises:
        ConfigError: the file is unreadable or not YAML, has models, or has an invalid key or value.
    """
    content = read_mapping(path)
    refuse_both(path, content)
    if "models" in content:
        raise ConfigError(
            f"{path} is a suite of models",
            f"measure the suite with weighin bench: weighin bench --suite {shlex.quote(str(path))}",
        )
    return validate(CommandSuite, content, str(path))
