"""Read settings from the files of suites, from options of a command line, and from plans.

An error names the file and the key. For an unknown key, the error also names the most similar valid
key.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Final, TypeVar

from pydantic import BaseModel, Field, ValidationError

from weighin.cell import Cell, ModelSpec
from weighin.errors import ConfigError
from weighin.settings.definition import COMMANDS, IN_PLAN, MODELS, Settings, Strict, matching

_Kind = TypeVar("_Kind", bound=BaseModel)
_OTHER: Final = {MODELS: ("commands", "run"), COMMANDS: ("models", "bench")}
"""For each kind of suite, the key of the other kind, and the verb that measures the other kind."""
_OPTIONS: Final = {"environment": "env", "uses": "use"}
"""The name of an option, where a suite's key differs."""


class _ModelFile(Strict):
    name: str
    builder: Annotated[str, matching(r"[\w.]+:\w+", "a builder", "write package.module:function")]
    kwargs: dict[str, Any] = Field({})
    description: str = ""


def read_model(path: Path) -> ModelSpec:
    """Read a model's YAML file; raise ConfigError if the file, a key or a value in it is invalid."""
    from weighin.settings.yaml_file import read_mapping  # `weighin run` does without yaml

    model = validate(_ModelFile, read_mapping(path), str(path))
    return ModelSpec(model.name, model.builder, model.kwargs)


def read_suite(path: Path, kind: str = MODELS) -> Settings:
    """Read a suite's YAML file; raise ConfigError as ``read_model``, or if it is of the other kind."""
    from weighin.settings.yaml_file import read_mapping

    content = read_mapping(path)
    if {"models", "commands"} <= content.keys():
        raise ConfigError(f"{path}: a suite has models or commands, not both", "write two suites")
    other, verb = _OTHER[kind]
    if other in content:
        raise ConfigError(
            f"{path} is a suite of {other}",
            f"measure the suite with weighin {verb}: weighin {verb} --suite {quote(str(path))}",
        )
    return validate(Settings, content, str(path), kind)


def check_suite(options: Mapping[str, Any]) -> Settings:
    return validate(Settings, options, "")


def read_plan(settings: Mapping[str, Any], cells: Sequence[Cell], place: Path) -> Settings:
    """Return the settings of a plan, also of an older weighin; ignore keys of a later one."""
    content = {name: value for name, value in settings.items() if value is not None}
    # An older weighin stored the settings of commands in an object of their own, and by label what
    # differs between the commands.
    if isinstance(old := content.pop("command", None), dict):
        own = old.pop("own", {})
        content |= {name: value for name, value in old.items() if name not in ("cold", "marks")}
        content["cwd"] = old.get("folder", "")
        content["commands"] = [
            {
                "name": cell.strategy,
                "command": list(cell.command),
                "environment": cell.environment,
                **{key: old.get(key, []) for key in ("cold", "marks")},
                **own.get(cell.strategy, {}),
            }
            for cell in {cell.strategy: cell for cell in cells}.values()
        ]
    return validate(Settings, content, str(place), IN_PLAN)


def validate(
    kind: type[_Kind], content: Mapping[str, Any], file: str, context: str | None = None
) -> _Kind:
    """Validate ``content`` as a ``kind``; raise ConfigError that names an invalid key or value.

    ``file`` is the file that error messages name; empty for options of a command line.
    """
    try:
        return kind.model_validate(content, context=context)
    except ValidationError as error:
        first = error.errors()[0]
    more, repair = first.get("ctx", {}), ""
    key = ".".join(part for part in (*first["loc"], more.get("key")) if isinstance(part, str))
    if first["type"] == "value_error":
        message, repair = more["error"].args
    elif first["type"] == "key":
        message, repair = first["msg"], more["repair"]
    elif first["type"] == "too_short":
        message, repair = "empty", "write at least one value, or leave the key out"
    else:
        message = f"{first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r}"
    if file:
        raise ConfigError(f"{file}: {key}: {message}", repair)
    option = f"--{_OPTIONS.get(key, key.removesuffix('_s').replace('_', '-'))}"
    raise ConfigError(f"{option}: {message}", repair, option=option)
