"""Read defaults of options from ``[tool.weighin]`` in pyproject.toml.

A key is the name of an option, or a key of a suite for the verbs that take ``--set``.
``[tool.weighin]`` holds defaults for ``bench``, ``floor``, ``predict`` and ``recommend``, and
``[tool.weighin.VERB]`` for one verb, which override them. The file is the nearest pyproject.toml with
such a table, in the current folder or above it. Relative paths in it start at its folder. Options
such as ``--trust`` and ``--yes`` are accepted only on the command line.
"""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Final

import click

from weighin.errors import ConfigError

TABLE: Final = "tool.weighin"
_SHARED_BY: Final = ("bench", "floor", "predict", "recommend")
_ONLY_TYPED: Final = (
    "help", "json", "resume", "trust", "trust-remote-code", "update",
    "version", "yes",
)  # fmt: skip

_KEYS: Final = f"{TABLE} keys"
_PLACES: Final = f"{TABLE} places"
_PATHS: Final = ("checkpoint", "storage", "mounts", "adapter")
"""Settings that are paths; those that may be something else are told by their text."""

FORMER: Final = {
    "class": "model_class",
    "env": "environment",
    "grace": "grace_s",
    "label": "labels",
    "mount": "mounts",
}
"""Options of earlier versions whose setting has another name."""


def read(context: click.Context, verbs: Mapping[str, click.Command]) -> None:
    """Let the context of ``weighin`` know the settings file, if there is one.

    weighin ignores a file of a stranger, because it can name code to run: any user can write
    /tmp/pyproject.toml, and a run in a folder below /tmp finds it.

    Raises:
        ConfigError: the file is unreadable or not TOML, or a key is unknown or has a wrong type.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the current folder was deleted
        return
    trusted = {0, os.geteuid(), Path().stat().st_uid}
    for folder in (here, *here.parents):
        path = (Path() if folder == here else folder) / "pyproject.toml"
        is_trusted = path.is_file() and path.stat().st_uid in trusted
        if is_trusted and (table := _table(path)) is not None:
            _read_table(context, table, path, verbs)
            return


def keys_of(context: click.Context) -> dict[str, Any]:
    """Return the settings in the file that are keys of a suite, but no options of the verb."""
    found: dict[str, Any] = context.find_root().meta.get(_KEYS, {}).get(context.command.name, {})
    return found


def place_of(context: click.Context, key: str) -> str:
    """Return the file, the table and the key in which a setting of the verb is written."""
    return str(context.find_root().meta[_PLACES][context.command.name][key])


def options_of(verb: click.Command) -> dict[str, click.Parameter]:
    """Return the options of a verb that pyproject.toml may set, by their keys in pyproject.toml."""
    keys = {max(param.opts, key=len).lstrip("-"): param for param in verb.params}
    return {
        key: param
        for key, param in keys.items()
        if isinstance(param, click.Option) and not param.hidden and key not in (*_ONLY_TYPED, "set")
    }


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


def _read_table(
    context: click.Context, table: dict[str, Any], path: Path, verbs: Mapping[str, click.Command]
) -> None:
    """Set the defaults of each verb's options in ``default_map``, and its other settings in ``meta``."""
    from weighin.settings.definition import COMMANDS, MODELS, used_by

    options = {name: found for name, verb in verbs.items() if (found := options_of(verb))}
    settable = {
        name: {_normal(key): key for key in used_by(name, COMMANDS if name == "run" else MODELS)}
        for name in options
        if any(param.name == "assigned" for param in verbs[name].params)
    }
    known = {name: {*options[name], *settable.get(name, ())} - {*_ONLY_TYPED} for name in options}
    shared = {key for name in _SHARED_BY for key in known[name]}
    common = {}
    for key, value in table.items():
        if isinstance(value, dict) and _normal(key) not in shared:
            _check_key(key, options, shared | options.keys(), path, TABLE)
            for inner in value:
                _check_key(inner, known[key], known[key], path, f"{TABLE}.{key}")
        else:
            _check_key(key, shared, shared | options.keys(), path, TABLE)
            common[key] = value
    defaults, others, places = ({name: dict[str, Any]() for name in options} for _ in range(3))
    for name, params in options.items():
        own = table.get(name, {})
        given = [(TABLE, *item) for item in common.items() if name in _SHARED_BY]
        # A verb's own values come last, and override.
        for table_name, key, value in [
            *given,
            *((f"{TABLE}.{name}", *item) for item in own.items()),
        ]:
            place = f"{path}: {table_name}.{key}"
            if param := params.get(_normal(key)):
                setting = param.name or ""
                defaults[name][setting] = _value(param, value, place, path.parent)
            elif setting := settable.get(name, {}).get(_normal(key), ""):
                others[name][setting] = _path_in(value, path.parent) if setting in _PATHS else value
            places[name][setting] = place
    context.default_map = defaults
    context.meta.update({_KEYS: others, _PLACES: places})


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

    near = [FORMER[normal]] if normal in FORMER else get_close_matches(normal, sorted(listed), n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ConfigError(f"{place}: unknown key", f"{hint}known: {', '.join(sorted(listed))}")


def _value(param: click.Parameter, value: object, place: str, folder: Path) -> object:
    """Return a TOML value in the form in which click passes it from the command line."""
    if getattr(param, "is_flag", False):
        if not isinstance(value, bool):
            raise ConfigError(f"{place}: not true or false, but {value!r}", "write true or false")
        return value
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in items):
        raise ConfigError(
            f"{place}: not a text, not a number, and not a list of texts or numbers",
            'write a value such as "8g", 3 or ["8g", "4g"]',
        )
    key = _normal(place.rpartition(".")[2])
    texts = [_located(str(item), key, param, folder) for item in items]
    return texts if param.multiple else ",".join(texts)


def _path_in(value: Any, folder: Path) -> Any:
    """Return a path of the settings file, or each of a list, relative to the current folder."""
    if isinstance(value, list):
        return [_path_in(each, folder) for each in value]
    if not isinstance(value, str) or folder == Path.cwd():
        return value
    return os.path.relpath(folder / Path(value).expanduser())


def _located(text: str, key: str, param: click.Parameter, folder: Path) -> str:
    """Return a text of the settings file; make a path relative to the current folder."""
    is_path = isinstance(param.type, click.Path) or param.name in _PATHS
    start = "from:" if key == "model" and text.startswith("from:") else ""
    if key in ("strategies", "suite", "use"):
        is_path = "/" in text or text.endswith((".py", ".yaml", ".yml"))
    elif key == "model":
        from weighin.stream import foreign  # imported here to save time

        is_path = bool(start) or ".py:" in text or foreign.looks_like_path(text)
        is_path = is_path or ("/" in text and (folder / text).exists())
    return start + _path_in(text.removeprefix(start), folder) if is_path else text


def _normal(key: str) -> str:
    return key.replace("_", "-")
