"""Read settings from the files of suites, from options of a command line, and from plans.

An error names the file and the key. For an unknown key, the error also names the most similar valid
key.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

from pydantic import AfterValidator, BaseModel, Field, ValidationError
from pydantic_core import ErrorDetails

from weighin.cell import Cell, ModelSpec
from weighin.errors import ConfigError
from weighin.settings.definition import COMMANDS, IN_PLAN, MODELS, Settings, Strict

_Kind = TypeVar("_Kind", bound=BaseModel)
_OTHER: Final = {MODELS: ("commands", "run"), COMMANDS: ("models", "bench")}
"""For each kind of suite, the key of the other kind, and the verb that measures the other kind."""
_OPTIONS: Final = {"environment": "env", "uses": "use"}
"""The name of an option, where a suite's key differs."""


def _as_builder(value: str) -> str:
    if not re.fullmatch(r"[\w.]+:\w+", value):
        raise ValueError(f"{value!r} is not a builder", "write package.module:function")
    return value


class _ModelFile(Strict):
    name: str
    builder: Annotated[str, AfterValidator(_as_builder)]
    kwargs: dict[str, Any] = Field({})
    description: str = ""


def read_model(path: Path) -> ModelSpec:
    """Read a model's YAML file; raise ConfigError if the file, a key or a value in it is invalid."""
    from weighin.settings.yaml_file import read_mapping  # `weighin run` does without yaml

    model = validate(_ModelFile, read_mapping(path), str(path))
    return ModelSpec(model.name, model.builder, model.kwargs)


def keys_of(suite: str) -> list[str]:
    """Return the keys of a suite of models (``MODELS``) or of commands (``COMMANDS``)."""
    return [name for name, field in Settings.model_fields.items() if suite in field.metadata]


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
    keys = keys_of(kind)
    for key in content:
        if key not in keys:
            raise ConfigError(f"{path}: {key}: unknown key", _known(str(key), keys))
    needed = "models" if kind == MODELS else "commands"
    if needed not in content:
        raise ConfigError(f"{path}: {needed}: missing", _known("", keys))
    return validate(Settings, content, str(path))


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

    ``file`` is the file that error messages name; empty for options of a command line. In a plan
    (``context``), a later version of weighin may have written more keys; they are ignored.
    """
    try:
        extra: Literal["ignore"] | None = "ignore" if context == IN_PLAN else None
        return kind.model_validate(content, context=context, extra=extra)
    except ValidationError as error:
        # An unknown key comes first: often it is a misspelling of the key that is missing.
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    key = ".".join(part for part in first["loc"] if isinstance(part, str)) or str(first["loc"][-1])
    message, repair = _complaint(first, _kind_at(kind, first["loc"][:-1]))
    if file:
        raise ConfigError(f"{file}: {key}: {message}", repair)
    option = f"--{_OPTIONS.get(key, key.removesuffix('_s').replace('_', '-'))}"
    raise ConfigError(f"{option}: {message}", repair, option=option)


def _kind_at(kind: type[BaseModel], place: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the pydantic model of the mapping at ``place`` (keys and indexes) inside a ``kind``."""
    for part in place:
        if isinstance(part, str) and part in kind.model_fields:
            kind = next(_models_in(kind.model_fields[part].annotation), kind)
    return kind


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


def _complaint(error: ErrorDetails, kind: type[BaseModel]) -> tuple[str, str]:
    keys = [field.alias or name for name, field in kind.model_fields.items()]
    if error["type"] == "value_error":
        message, repair = error["ctx"]["error"].args
        return message, repair
    if error["type"] == "missing":
        return "missing", _known("", keys)
    if error["type"] == "too_short":
        return "empty", "write at least one value, or leave the key out"
    if error["type"] in ("extra_forbidden", "invalid_key"):
        return "unknown key", _known(str(error["loc"][-1]), keys)
    return f"{error['msg'][0].lower()}{error['msg'][1:]}, got {error['input']!r}", ""


def _known(key: str, keys: Sequence[str]) -> str:
    """Say which keys there are, and which of them is most similar to ``key``."""
    from difflib import get_close_matches

    known = f"known keys: {', '.join(keys)}"
    near = get_close_matches(key, keys, n=1)
    return f"did you mean {near[0]!r}? {known}" if near else known
