"""Read settings, and defaults of other options, from ``[tool.weighin]`` in pyproject.toml.

A key is the name of an option, or a key of a suite for the verbs that take ``--set``.
``[tool.weighin]`` holds defaults for ``bench``, ``floor``, ``predict`` and ``recommend``, and
``[tool.weighin.VERB]`` for one verb, which override them. The file is the nearest pyproject.toml with
such a table, in the current folder or above it. Relative paths in it start at its folder. Options
such as ``--trust`` and ``--yes`` are accepted only on the command line.
"""

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import click

from weighin.errors import ConfigError

TABLE: Final = "tool.weighin"
FORMER: Final = {
    "class": "model_class", "env": "environment", "grace": "grace_s", "label": "labels", "mount": "mounts",
}  # fmt: skip
"""Options of earlier versions whose setting has another name."""
_SHARED_BY: Final = ("bench", "floor", "predict", "recommend")
_ONLY_TYPED: Final = (
    "help", "json", "resume", "set", "trust", "trust-remote-code", "update", "version", "yes",
)  # fmt: skip
_SETTINGS: Final = f"{TABLE} settings"
_PLACES: Final = f"{TABLE} places"


def read(context: click.Context, verbs: Mapping[str, click.Command]) -> None:
    """Let the context of ``weighin`` know the settings file, if there is one.

    Settings are kept as they are written, for ``settings_of``; other options of a verb become
    click's defaults.

    Raises:
        ConfigError: the file is unreadable or not TOML, or a key is unknown.
    """
    if (found := _nearest()) is None:
        return
    path, table = found
    known = {name: names for name, verb in verbs.items() if (names := _names(name, verb))}
    shared = {key for name in _SHARED_BY for key in known[name]}
    common = {
        key: value
        for key, value in table.items()
        if not isinstance(value, dict) or _normal(key) in shared
    }
    _check(common, shared, shared | known.keys(), f"{path}: {TABLE}")
    _check(table.keys() - common.keys(), known, shared | known.keys(), f"{path}: {TABLE}")
    settings, places, defaults = ({name: dict[str, Any]() for name in known} for _ in range(3))
    for name, names in known.items():
        own = {} if name in common else table.get(name, {})
        _check(own, names, names, f"{path}: {TABLE}.{name}")
        # A verb's own values come last, and override.
        for place, content in ((TABLE, common), (f"{TABLE}.{name}", own)):
            for key, value in content.items():
                target = names.get(_normal(key))
                if target is None or (content is common and name not in _SHARED_BY):
                    continue
                if isinstance(target, str):
                    settings[name][target] = _located(value, target, path.parent)
                    places[name][target] = f"{path}: {place}.{key}"
                else:
                    defaults[name][target.name or ""] = _default(
                        target, value, path.parent, f"{path}: {place}.{key}"
                    )
    context.default_map = defaults
    context.meta.update({_SETTINGS: settings, _PLACES: places})


def settings_of(context: click.Context) -> dict[str, Any]:
    """Return the settings that the file has for the verb of a context."""
    found: dict[str, Any] = (
        context.find_root().meta.get(_SETTINGS, {}).get(context.command.name, {})
    )
    return found


def place_of(context: click.Context, key: str) -> str:
    """Return the file, the table and the key in which a setting of the verb is written."""
    return str(context.find_root().meta[_PLACES][context.command.name][key])


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
            text = path.read_text(encoding="utf-8")
            if "weighin" not in text:
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
            raise ConfigError(
                f"{path}: {TABLE} is not a TOML table", f"write [{TABLE}], and the keys below it"
            )
    return None


def _names(name: str, verb: click.Command) -> dict[str, str | click.Option]:
    """Return the keys that a verb may have in the file: each a setting, or another option."""
    from weighin.settings.definition import COMMANDS, MODELS, used_by

    found: dict[str, str | click.Option] = {}
    if any(param.name == "assigned" for param in verb.params):
        found = {_normal(key): key for key in used_by(name, COMMANDS if name == "run" else MODELS)}
    for param in verb.params:
        if isinstance(param, click.Option):
            key = getattr(param, "key", "")
            is_setting = key and not key.startswith("command.")
            found[max(param.opts, key=len).lstrip("-")] = key if is_setting else param
    return {key: target for key, target in found.items() if key not in _ONLY_TYPED}


def _check(
    keys: Iterable[str], known: Collection[str], listed: Collection[str], table: str
) -> None:
    """Raise ConfigError if ``known`` lacks one of the keys; the error lists the keys in ``listed``."""
    for key in keys:
        place, normal = f"{table}.{key}", _normal(key)
        if normal in known:
            continue
        if normal in _ONLY_TYPED and normal != "set":
            raise ConfigError(
                f"{place} cannot be set in pyproject.toml, because it gives a permission or a"
                " confirmation",
                f"give the option on the command line: --{normal}",
            )
        from difflib import get_close_matches  # here to save time: most files are right

        near = get_close_matches(normal, sorted(listed), n=1)
        near = [FORMER[normal]] if normal in FORMER else near
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise ConfigError(f"{place}: unknown key", f"{hint}known: {', '.join(sorted(listed))}")


def _default(option: click.Option, value: object, folder: Path, place: str) -> object:
    """Return a TOML value in the form in which click passes it from the command line."""
    if option.is_flag:
        if not isinstance(value, bool):
            raise ConfigError(f"{place}: not true or false, but {value!r}", "write true or false")
        return value
    is_path = isinstance(option.type, click.Path)
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, bool) or not isinstance(item, str | int | float) for item in items):
        raise ConfigError(
            f"{place}: not a text, not a number, and not a list of texts or numbers",
            'write a value such as "8g", 3 or ["8g", "4g"]',
        )
    texts = [_located(str(item), option.name or "", folder, is_path=is_path) for item in items]
    return texts if option.multiple else ",".join(texts)


def _located(value: Any, name: str, folder: Path, *, is_path: bool = False) -> Any:
    """Return a path of the file, or each of a list, relative to the current folder; another value as
    it is.
    """
    if isinstance(value, list):
        return [_located(each, name, folder, is_path=is_path) for each in value]
    if not isinstance(value, str) or folder == Path():
        return value
    start = "from:" if name == "models" and value.startswith("from:") else ""
    text = value.removeprefix(start)
    if name in ("strategies", "suite", "uses"):
        is_path = "/" in text or text.endswith((".py", ".yaml", ".yml"))
    elif name == "models":
        from weighin.stream.foreign import looks_like_path  # imported here to save time

        is_path = bool(start) or ".py:" in text or looks_like_path(text)
        is_path = is_path or ("/" in text and (folder / text).exists())
    elif name in ("checkpoint", "storage", "mounts", "adapter"):
        is_path = True
    return start + os.path.relpath(folder / Path(text).expanduser()) if is_path else value


def _normal(key: str) -> str:
    return key.replace("_", "-")
