"""Find the module of a user's model, and parse the files of strategies and uses.

A model's module is in a file that the user names, in the current folder, or in a folder of
PYTHONPATH. The functions of this module never import or execute a user's code.
"""

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

from weighin.errors import ConfigError
from weighin.files import read_bytes
from weighin.text import printable

_OURS: Final = "weighin.models."
_FILE: Final = ".py:"
_TAKEN: Final = sys.stdlib_module_names | {"numpy", "safetensors", "torch", "weighin"}
"""Names that a model's module must not have, because Python or weighin has such a module."""


def is_file(name: str) -> bool:
    """Tell whether a model's name is a builder in a file: "path/nets.py:build"."""
    return _FILE in name


def of_file(name: str) -> tuple[str, Path]:
    """For "path/nets.py:build", return the builder "nets:build" and the folder from which to import
    the module.

    A file beside an ``__init__.py`` is imported as a part of that package, so that the file's
    relative imports work.

    Raises:
        ConfigError: the file does not exist, or Python cannot import a file of this name.
    """
    text, _, function = name.rpartition(":")
    path = Path(text).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"--model {name}: there is no file {text}",
            "name a Python file and a function in it: --model path/nets.py:build",
        )
    path = path.resolve()
    parts, folder = [path.stem], path.parent
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    if path.stem == "__init__" and len(parts) > 1:
        parts.pop()
    for part in parts:
        if not part.isidentifier():
            raise ConfigError(
                f"--model {name}: Python cannot import a module called {part!r}",
                "rename the file or folder: a module's name has only letters, digits and"
                " underscores",
            )
    if parts[0] in _TAKEN:
        raise ConfigError(
            f"--model {name}: Python or weighin already has a module called {parts[0]!r}",
            "rename the file, for example to nets.py",
        )
    return f"{'.'.join(parts)}:{function}", folder


def import_path(names: Iterable[str]) -> tuple[str, ...]:
    """Return the folders in which weighin looks for the models' modules.

    The order is: folders of builders in files, the current folder, existing folders of PYTHONPATH.
    """
    folders = [of_file(name)[1] for name in names if is_file(name)]
    folders.append(Path.cwd())
    listed = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders += [Path(text).resolve() for text in listed if text and Path(text).exists()]
    return tuple(dict.fromkeys(map(str, folders)))


def is_ours(builder: str) -> bool:
    """Tell whether a builder belongs to weighin, so that it needs no import path."""
    return builder.startswith(_OURS)


def file_of(builder: str, folders: Iterable[str]) -> Path | None:
    """Return the file of a builder's top module in one of ``folders``; None if no folder has it."""
    spec = PathFinder.find_spec(builder.partition(":")[0].partition(".")[0], [*folders])
    if spec is None:
        return None
    if spec.origin and spec.has_location:
        return Path(spec.origin)
    return Path(next(iter(spec.submodule_search_locations or ()), "")) or None


def check_builder(builder: str, kwargs: Mapping[str, Any], folders: Iterable[str]) -> None:
    """Raise an error for a wrong builder; read the source of its module, but run no code.

    If the module is no Python file, or imports or computes the function, ``check_builder`` cannot
    find every error. Such an error shows only when the model is built.

    Raises:
        ConfigError: the module or the function is missing, or does not accept ``kwargs``.
    """
    if is_ours(builder) or not builder.partition(":")[2]:
        return
    module, _, function = builder.partition(":")
    path = [*folders, *sys.path]
    spec = None
    for part in module.split("."):
        if not (spec := PathFinder.find_spec(part, path)):
            raise ConfigError(
                f"builder {builder!r}: there is no module {module!r}",
                "correct the builder's name, or install the module's package",
            )
        path = list(spec.submodule_search_locations or ())
    if spec is None or not (spec.origin and spec.has_location and spec.origin.endswith(".py")):
        return
    try:
        tree = _tree(Path(spec.origin))
    except (OSError, *_NOT_PYTHON) as error:
        raise ConfigError(f"builder {builder!r}: {spec.origin} is not Python: {error}") from None
    bound = set(_bound(tree))
    if function not in bound and not bound & {"*", "__getattr__"}:
        raise ConfigError(
            f"builder {builder!r}: module {module!r} has no function {function!r}",
            f"define `def {function}(...)` in {spec.origin}",
        )
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == function and not node.decorator_list:
            _check_arguments(builder, node.args, kwargs)


def parse(path: Path, what: str, function: str, example: str) -> ast.Module:
    """Return the syntax tree of a strategy's or use's file, which must define ``function``:
    "load(job)" for a strategy.

    Raises:
        ConfigError: the file is missing or not Python, its name cannot be shown, or the function is
            missing; in the last case, ``example`` is the repair.
    """
    try:
        tree = _tree(path)
    except FileNotFoundError:
        raise ConfigError(f"the {what} {path}: no such file or folder", "check the path") from None
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror}") from None
    except _NOT_PYTHON as error:
        raise ConfigError(f"{path} is not Python: {str(error) or type(error).__name__}") from None
    if not path.stem.isprintable():
        raise ConfigError(
            f"the name of the {what} {printable(str(path))} has characters that cannot be shown",
            "rename the file",
        )
    name = function.partition("(")[0]
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == name]
    if not found:
        raise ConfigError(f"{path} has no function {function}", example)
    if not found[-1].decorator_list and not _takes_one(found[-1].args):
        line = f"{name}({ast.unparse(found[-1].args)})"
        raise ConfigError(f"{path}: a {what} is {function}, and not {line}", example)
    return tree


_NOT_PYTHON: Final = (SyntaxError, ValueError, RecursionError, MemoryError)
"""What ``ast.parse`` raises; the last two for code that nests too deeply."""


def _tree(path: Path) -> ast.Module:
    return ast.parse(read_bytes(path), filename=str(path))


def _takes_one(taken: ast.arguments) -> bool:
    """Return whether a function with these arguments can be called with one positional argument."""
    positional = len(taken.posonlyargs) + len(taken.args)
    least = positional - len(taken.defaults)
    return (
        least <= 1
        and (positional > 0 or taken.vararg is not None)
        and None not in taken.kw_defaults
    )


def _bound(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id


def _check_arguments(builder: str, taken: ast.arguments, kwargs: Mapping[str, Any]) -> None:
    by_name = [each.arg for each in (*taken.args, *taken.kwonlyargs)]
    positional = [each.arg for each in (*taken.posonlyargs, *taken.args)]
    needed = positional[: len(positional) - len(taken.defaults)]
    pairs = zip(taken.kwonlyargs, taken.kw_defaults, strict=True)
    needed += [each.arg for each, default in pairs if default is None]
    unknown = [name for name in kwargs if name not in by_name and not taken.kwarg]
    missing = [name for name in needed if name not in kwargs]
    for names, verb in ((unknown, "does not take"), (missing, "needs")):
        if names:
            raise ConfigError(
                f"builder {builder!r} {verb} the argument {names[0]!r}",
                "correct the model's arguments: `kwargs` in the model's YAML file, or --set kwargs.NAME=VALUE",
            )
