"""Read defaults of options from ``[tool.weighin]`` in pyproject.toml.

``[tool.weighin]`` holds defaults for ``bench``, ``floor``, ``predict`` and ``recommend``.
``[tool.weighin.VERB]`` holds defaults for one verb, which override ``[tool.weighin]``. The command
line overrides both tables. The settings file is the nearest pyproject.toml with a table
``[tool.weighin]``, in the current folder or above it. weighin ignores a file whose owner is neither
this user, nor root, nor the owner of the current folder. Relative paths in the file start at the
file's folder. Options such as ``--trust`` and ``--yes`` are accepted only on the command line.
"""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import click

from weighin.errors import ConfigError

TABLE: Final = "tool.weighin"
_SHARED_BY: Final = ("bench", "floor", "predict", "recommend")
_ONLY_TYPED: Final = (
    "check", "help", "json", "resume", "trust", "trust-remote-code", "update",
    "version", "yes",
)  # fmt: skip

Defaults = dict[str, dict[str, Any]]
"""Maps each verb to its parameters' defaults, by parameter name, as click's ``default_map``."""


def read(verbs: Mapping[str, click.Command]) -> tuple[Path | None, Defaults]:
    """Return the settings file's path and the defaults in it; (None, {}) if there is no such file.

    Raises:
        ConfigError: the file is unreadable or not TOML, or a key is unknown or has a wrong type.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the current folder was deleted
        return None, {}
    for folder in (here, *here.parents):
        path = (Path() if folder == here else folder) / "pyproject.toml"
        if _counts(path) and (table := _table(path)) is not None:
            return path, _defaults(table, path, verbs)
    return None, {}


def name_source(context: click.Context, error: ConfigError) -> None:
    """Name the settings file in an error's repair if the wrong option's value is from the file."""
    path = context.find_root().meta.get(TABLE)
    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        if error.option in param.opts and source is click.core.ParameterSource.DEFAULT_MAP:
            place = f"{error.option} is set in [{TABLE}] of {path}"
            error.repair = f"{error.repair}; {place}" if error.repair else place


def options_of(verb: click.Command) -> dict[str, click.Parameter]:
    """Return the options of a verb that pyproject.toml may set, by their keys in pyproject.toml."""
    keys = {}
    for param in verb.params:
        longest = max(param.opts, key=len).lstrip("-")
        is_option = isinstance(param, click.Option) and not param.hidden
        if is_option and longest not in _ONLY_TYPED:
            keys[longest] = param
    return keys


def _counts(path: Path) -> bool:
    """Return whether the file exists and has a trusted owner, because it can name code to run.

    For example, any user can write /tmp/pyproject.toml, and a run in a folder below /tmp finds it.
    """
    trusted = {0, os.geteuid(), Path().stat().st_uid}
    return path.is_file() and path.stat().st_uid in trusted


def _table(path: Path) -> dict[str, Any] | None:
    try:
        text = path.read_text(encoding="utf-8")
        if "weighin" not in text:
            return None
        import tomllib  # imported here to save time, because most files have no weighin table

        content = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    table = content.get("tool", {}).get("weighin")
    if table is not None and not isinstance(table, dict):
        raise ConfigError(
            f"{path}: {TABLE} is not a TOML table", f"write [{TABLE}], and the keys below it"
        )
    return table


def _defaults(table: dict[str, Any], path: Path, verbs: Mapping[str, click.Command]) -> Defaults:
    options = {name: found for name, verb in verbs.items() if (found := options_of(verb))}
    shared = {key for name in _SHARED_BY for key in options[name]}
    listed = shared | options.keys()
    tables: dict[str, dict[str, Any]] = {}
    common: dict[str, Any] = {}
    for key, value in table.items():
        is_table = isinstance(value, dict) and _normal(key) not in shared
        _check_key(key, options if is_table else shared, listed, path, TABLE)
        (tables if is_table else common)[key] = value
    for name, values in tables.items():
        for key in values:
            _check_key(key, options[name], options[name], path, f"{TABLE}.{name}")
    defaults: Defaults = {}
    for name, params in options.items():
        given = [(TABLE, *item) for item in common.items() if name in _SHARED_BY]
        given += [(f"{TABLE}.{name}", *item) for item in tables.get(name, {}).items()]
        defaults[name] = {
            param.name or "": _value(param, value, f"{path}: {place}.{key}", path.parent)
            for place, key, value in given  # a verb's own values come last, and override
            if (param := params.get(_normal(key)))
        }
    return defaults


def _check_key(
    key: str, known: Collection[str], listed: Collection[str], path: Path, table: str
) -> None:
    """Raise ConfigError if ``known`` lacks the key; the error lists the keys in ``listed``."""
    place, normal = f"{path}: {table}.{key}", _normal(key)
    if normal in known:
        return
    if normal in _ONLY_TYPED:
        raise ConfigError(
            f"{place} cannot be set in pyproject.toml, because it gives a permission or a"
            " confirmation",
            f"give the option on the command line: --{normal}",
        )
    from difflib import get_close_matches  # imported here to save time: most files have no error

    near = get_close_matches(normal, sorted(listed), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"{place}: unknown key", f"{hint}known: {', '.join(sorted(listed))}")


def _value(param: click.Parameter, value: object, place: str, folder: Path) -> object:
    """Return a TOML value in the form in which click passes it from the command line."""
    key = _normal(place.rpartition(".")[2])
    if getattr(param, "is_flag", False):
        if not isinstance(value, bool):
            raise ConfigError(f"{place}: not true or false, but {value!r}", "write true or false")
        return value
    if key == "kwargs" and isinstance(value, dict):
        return json.dumps(value)
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in items):
        raise ConfigError(
            f"{place}: not a text, not a number, and not a list of texts or numbers",
            'write a value such as "8g", 3 or ["8g", "4g"]',
        )
    texts = [_located(str(item), key, param, folder) for item in items]
    return texts if param.multiple else ",".join(texts)


def _located(text: str, key: str, param: click.Parameter, folder: Path) -> str:
    """Return a text of the settings file; make a path relative to the current folder."""
    is_path = isinstance(param.type, click.Path)
    if key == "strategies" or (key == "suite" and not is_path):
        is_path = "/" in text or text.endswith((".py", ".yaml", ".yml"))
    start = "from:" if key == "model" and text.startswith("from:") else ""
    if key == "model":
        from weighin.stream import foreign  # imported here to save time

        is_path = bool(start) or ".py:" in text or foreign.looks_like_path(text)
        is_path = is_path or ("/" in text and (folder / text).exists())
    if not is_path or folder == Path.cwd():
        return text
    return start + os.path.relpath(folder / Path(text.removeprefix(start)).expanduser())


def _normal(key: str) -> str:
    return key.replace("_", "-")
