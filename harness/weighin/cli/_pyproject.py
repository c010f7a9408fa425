"""Read settings, and defaults of other options, from ``[tool.weighin]`` in pyproject.toml.

A key is the name of an option, or a key of a suite for the verbs that take ``--set``. The values in
``[tool.weighin.VERB]`` override the defaults in ``[tool.weighin]``. Relative paths start at the file's folder.
Permissions such as ``--trust`` and ``--yes`` are accepted only on the command line.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from weighin.errors import ConfigError, UnknownName

TABLE: Final = "tool.weighin"
_SHARED_BY: Final = ("bench", "floor", "predict", "recommend")
_ONLY_TYPED: Final = (
    "help", "json", "resume", "set", "trust", "trust-remote-code", "update", "version", "yes",
)  # fmt: skip


def read(context: click.Context, verbs: Mapping[str, click.Command]) -> None:
    """Keep the settings in the file for ``settings_of``; other options of a verb become click's defaults."""
    if (found := _nearest()) is None:
        return
    path, table = found
    known = {name: names for name, verb in verbs.items() if (names := _names(name, verb))}
    shared = {key for name in _SHARED_BY for key in known[name]}
    of_verbs = {
        name: value
        for name, value in table.items()
        if isinstance(value, dict) and name in known and name not in shared
    }
    common = {key: value for key, value in table.items() if key not in of_verbs}
    tables: list[tuple[str, dict[str, Any], tuple[str, ...]]]
    tables = [(f"{path}: {TABLE}", common, _SHARED_BY)]
    # A verb's own values come last, and override.
    tables += [(f"{path}: {TABLE}.{name}", own, (name,)) for name, own in of_verbs.items()]
    settings = {name: dict[str, tuple[str, Any]]() for name in known}
    defaults = {name: dict[str, Any]() for name in known}
    for place, content, users in tables:
        allowed = {key for name in users for key in known[name]}
        for key, value in content.items():
            where, normal = f"{place}.{key}", key.replace("_", "-")
            if normal not in allowed:
                choices = {*allowed, *(known if content is common else ())}
                repair = UnknownName("key", normal, choices).repair
                raise ConfigError(f"{where}: unknown key", repair)
            for name in users:
                target = known[name].get(normal)
                if isinstance(target, str):
                    settings[name][target] = where, _located(value, target, path.parent)
                elif target:
                    defaults[name][str(target.name)] = _default(target, value, path.parent, where)
    context.default_map = defaults
    context.meta[TABLE] = settings


def settings_of(context: click.Context) -> dict[str, tuple[str, Any]]:
    """Return the settings that the file has for the verb of a context: where each is, and its value."""
    of_verbs = context.find_root().meta.get(TABLE, {})
    found: dict[str, tuple[str, Any]] = of_verbs.get(context.command.name, {})
    return found


def _nearest() -> tuple[Path, dict[str, Any]] | None:
    """Return the nearest file with our table, and the table.

    The file of a stranger is ignored, because it can name code to run: any user can write
    /tmp/pyproject.toml, and a run in a folder below /tmp finds it.
    """
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the current folder was deleted
        return None
    trusted = {0, os.geteuid(), Path().stat().st_uid}
    for folder in (here, *here.parents):
        path = (Path() if folder == here else folder) / "pyproject.toml"
        if not path.is_file() or path.stat().st_uid not in trusted:
            continue
        try:
            if "weighin" not in (text := path.read_text(encoding="utf-8")):
                continue
            import tomllib  # imported here to save time, because most files have no weighin table

            table = tomllib.loads(text).get("tool", {}).get("weighin")
        except OSError as error:
            raise ConfigError(f"cannot read {path}: {error.strerror}") from None
        except ValueError as error:
            raise ConfigError(f"{path}: not TOML: {error}") from None
        if isinstance(table, dict):
            return path, table
        if table is not None:
            repair = f"write [{TABLE}], and the keys below it"
            raise ConfigError(f"{path}: {TABLE} is not a TOML table", repair)
    return None


def _names(name: str, verb: click.Command) -> dict[str, str | click.Option]:
    """Return the keys that a verb may have in the file: each a setting, or another option."""
    from weighin.settings.definition import COMMANDS, MODELS, used_by

    found: dict[str, str | click.Option] = {}
    if any(param.name == "assigned" for param in verb.params):
        keys = used_by(name, COMMANDS if name == "run" else MODELS)
        found = {key.replace("_", "-"): key for key in keys}
    for param in verb.params:
        if isinstance(param, click.Option):
            key = getattr(param, "key", "")
            is_setting = key and "." not in key
            found[max(param.opts, key=len).lstrip("-")] = key if is_setting else param
    return {key: target for key, target in found.items() if key not in _ONLY_TYPED}


def _default(option: click.Option, value: object, folder: Path, place: str) -> object:
    """Return a TOML value as the text or texts that click would read on the command line."""
    items = value if isinstance(value, list) else [value]
    wanted = "true or false" if option.is_flag else "a text, a number, or a list of them"
    for item in items:
        if not isinstance(item, str | int | float) or isinstance(item, bool) is not option.is_flag:
            raise ConfigError(f"{place}: not {wanted}, but {value!r}", f"write {wanted}")
    is_path, name = isinstance(option.type, click.Path), option.name or ""
    texts = [_located(str(item), name, folder, is_path=is_path) for item in items]
    return texts if option.multiple else ",".join(texts)


def _located(value: Any, name: str, folder: Path, *, is_path: bool = False) -> Any:
    """Return a path of the file, or each of a list, relative to the current folder; else the value."""
    if isinstance(value, list):
        return [_located(each, name, folder, is_path=is_path) for each in value]
    if not isinstance(value, str) or folder == Path():
        return value
    start = "from:" if name == "models" and value.startswith("from:") else ""
    text = value.removeprefix(start)
    is_path = is_path or name in ("checkpoint", "storage", "mounts", "adapter")
    if name in ("strategies", "suite", "uses"):
        is_path = "/" in text or text.endswith((".py", ".yaml", ".yml"))
    elif name == "models":
        from weighin.stream.foreign import looks_like_path  # imported here to save time

        is_path = bool(start) or ".py:" in text or looks_like_path(text)
        is_path = is_path or ("/" in text and (folder / text).exists())
    return start + os.path.relpath(folder / Path(text).expanduser()) if is_path else value
