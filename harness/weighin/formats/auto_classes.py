"""Choose the class of a Hugging Face folder's model, as the auto classes of transformers choose it.

transformers has a table for each auto class, such as {"bert": "BertForMaskedLM"} for
``AutoModelForMaskedLM``. This module reads the tables from the source code of the installed
package, because an import of transformers takes seconds.
"""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from weighin import install
from weighin.errors import ConfigError
from weighin.formats.pretrained_choice import FolderChoice
from weighin.formats.pretrained_code import AUTO_MAP, CODE_IS_REFUSED
from weighin.text import few, one_line

BASE: Final = "AutoModel"
"""The auto class for a folder that names no class."""

_TABLES: Final = Path("models", "auto", "modeling_auto.py")
_PACKAGE: Final = "transformers."
_MOST: Final = 6
_NAME_IT: Final = "name the class: --class CLASS (in Python: model_class='CLASS')"


def choose(folder: Path, config: Mapping[str, Any], choice: FolderChoice) -> tuple[str, bool]:
    """Return the name of the model's class, and whether Python code in the folder defines the class.

    Without ``trust_remote_code``, the folder's code may not run. As in transformers, the result is
    then transformers' own class for the model type, if there is one.

    Raises:
        ConfigError: neither ``config.json`` nor the user names a class, transformers has no class
            for this model type, or the folder's code defines the class and may not run.
    """
    asked = choice.model_class.removeprefix(_PACKAGE)
    saved = config.get("architectures")
    names = [name for name in saved if isinstance(name, str)] if isinstance(saved, list) else []
    wanted = asked or (names[0] if names else BASE)
    remote = _in_code(config, wanted)
    if remote and choice.trust_remote_code:
        return remote, True
    if asked and not asked.startswith("Auto"):
        return asked, False
    known = classes_of(config.get("model_type"))
    if wanted in known:
        of_auto = known[wanted]
        return next((name for name in names if name in of_auto), of_auto[0]), False
    if names and not asked:
        if AUTO_MAP not in config or any(wanted in one for one in known.values()):
            return wanted, False
        if choice.trust_remote_code:
            return wanted, True  # the caller raises the error, because the code is missing
    if AUTO_MAP in config and not choice.trust_remote_code:
        raise ConfigError(
            f"the model of {folder} needs the Python code in this folder ({AUTO_MAP} in config.json)",
            CODE_IS_REFUSED,
        )
    raise _no_class(folder, config, wanted if asked else "", known)


def _in_code(config: Mapping[str, Any], wanted: str) -> str:
    """Return the class in the folder's code whose name or auto class is ``wanted``; else ""."""
    named = config.get(AUTO_MAP)
    for auto, reference in named.items() if isinstance(named, dict) else ():
        if isinstance(reference, str) and auto.startswith(BASE):
            name = reference.rpartition(".")[2]
            if wanted in (auto, name):
                return name
    return ""


def _no_class(
    folder: Path, config: Mapping[str, Any], asked: str, known: Mapping[str, tuple[str, ...]]
) -> ConfigError:
    kind = config.get("model_type")
    what = f"{folder / 'config.json'} names no class in 'architectures'"
    if asked:
        what = f"transformers has no {one_line(asked)} for the model type {one_line(str(kind))}"
    if kind is None and not asked:
        return ConfigError(
            f"{folder / 'config.json'} names neither 'architectures' nor 'model_type'", _NAME_IT
        )
    if not find_spec("transformers"):
        return ConfigError(
            f"{what}, and transformers, which may know one, is not installed", install.command("hf")
        )
    if not known:
        return ConfigError(
            f"{what}, and transformers has no model type {one_line(str(kind))}",
            f"{_NAME_IT}; or save the folder again with model.save_pretrained(FOLDER)",
        )
    classes = list(dict.fromkeys(name for names in known.values() for name in names))
    return ConfigError(what, f"{_NAME_IT}, one of {few(classes, _MOST)}")


def classes_of(model_type: object) -> dict[str, tuple[str, ...]]:
    """Return the classes of transformers for a model type, by their auto classes' names.

    If an auto class has several classes, it takes the one that ``config.json`` names, or else the
    first. The result is empty for an unknown model type, and if transformers is not installed.
    """
    if not isinstance(model_type, str):
        return {}
    return {auto: table[model_type] for auto, table in _tables().items() if model_type in table}


@cache
def _tables() -> dict[str, dict[str, tuple[str, ...]]]:
    package = find_spec("transformers")  # imports nothing
    if package is None or package.origin is None:
        return {}
    try:
        tree = ast.parse((Path(package.origin).parent / _TABLES).read_bytes())
    except (OSError, SyntaxError):
        return {}
    tables: dict[str, dict[str, tuple[str, ...]]] = {}
    mappings: dict[str, str] = {}
    by_auto: dict[str, dict[str, tuple[str, ...]]] = {}
    for name, value in _assigned(tree.body):
        if isinstance(value, ast.Call) and value.args:
            first, last = value.args[0], value.args[-1]
            if isinstance(first, ast.List):
                tables[name] = _read(first, tables)
            elif isinstance(last, ast.Name):
                mappings[name] = last.id  # _LazyAutoMapping(CONFIG_MAPPING_NAMES, TABLE)
    for node in (one for one in tree.body if isinstance(one, ast.ClassDef)):
        for name, value in _assigned(node.body):
            if name == "_model_mapping" and isinstance(value, ast.Name):
                auto = node.name.lstrip("_")
                by_auto[auto] = tables.get(mappings.get(value.id, ""), {})
    return {auto: table for auto, table in by_auto.items() if table}


def _assigned(body: list[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            yield node.targets[0].id, node.value


def _read(
    pairs: ast.List, tables: Mapping[str, dict[str, tuple[str, ...]]]
) -> dict[str, tuple[str, ...]]:
    """Return a table from its code: ("bert", "BertModel"), ("funnel", ("A", "B")), *TABLE.items()."""
    table: dict[str, tuple[str, ...]] = {}
    for pair in pairs.elts:
        if isinstance(pair, ast.Starred):
            for node in ast.walk(pair):
                table |= tables.get(node.id, {}) if isinstance(node, ast.Name) else {}
            continue
        try:
            key, value = ast.literal_eval(pair)
        except (ValueError, TypeError):
            continue
        names = tuple(name for name in ([value] if isinstance(value, str) else value) if name)
        if names:
            table[key] = names
    return table
