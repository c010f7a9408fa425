"""Find the module of a user's model, and parse the files of strategies and uses, without executing any."""

import ast
import os
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from pathlib import Path

from weighin.errors import ConfigError
from weighin.files import read_bytes
from weighin.text import printable

_TAKEN = sys.stdlib_module_names | {"numpy", "safetensors", "torch", "weighin"}
"""Names that a model's module must not have, because Python or weighin has such a module."""


def is_file(name: str) -> bool:
    return ".py:" in name  # a builder: "path/nets.py:build"


def of_file(name: str) -> tuple[str, Path]:
    """Return "nets:build" for "path/nets.py:build", and the folder to import it from."""
    text, _, function = name.rpartition(":")
    path = Path(text).expanduser()
    if not path.is_file():
        why = f"--model {name}: there is no file {text}"
        repair = "name a Python file and a function in it: --model path/nets.py:build"
        raise ConfigError(why, repair)
    path = path.resolve()
    parts, folder = [path.stem], path.parent
    # A file beside an __init__.py is a part of that package, which its relative imports need.
    while (folder / "__init__.py").is_file():
        parts.insert(0, folder.name)
        folder = folder.parent
    if path.stem == "__init__" and len(parts) > 1:
        parts.pop()
    if wrong := [part for part in parts if not part.isidentifier()] or [*{parts[0]} & _TAKEN]:
        raise ConfigError(
            f"--model {name}: {wrong[0]!r} cannot be the name of your module",
            "rename it, for example to nets.py: use letters, digits and underscores, but no name of a"
            " module of Python or weighin",
        )
    return f"{'.'.join(parts)}:{function}", folder


def import_path(names: Iterable[str]) -> tuple[str, ...]:
    """Return the folders of the models' modules: those of files, the current one, PYTHONPATH's."""
    folders = [of_file(name)[1] for name in names if is_file(name)]
    folders.append(Path.cwd())
    listed = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders += [Path(text).resolve() for text in listed if text and Path(text).exists()]
    return tuple(dict.fromkeys(map(str, folders)))


def is_ours(builder: str) -> bool:
    """Tell whether a builder belongs to weighin, so that it needs no import path."""
    return builder.startswith("weighin.models.")


def file_of(builder: str, folders: Iterable[str]) -> Path | None:
    """Return the file of a builder's top module in one of ``folders``; None if no folder has it."""
    spec = PathFinder.find_spec(builder.partition(":")[0].partition(".")[0], [*folders])
    if spec is None:
        return None
    if spec.origin and spec.has_location:
        return Path(spec.origin)
    return Path(next(iter(spec.submodule_search_locations or ()), "")) or None


def parse(path: Path, what: str, function: str, example: str) -> ast.Module:
    """Return the syntax tree of a file that must define ``function``, such as "load(job)"."""
    try:
        tree = ast.parse(read_bytes(path), filename=str(path))
    except FileNotFoundError:
        raise ConfigError(f"the {what} {path}: no such file or folder", "check the path") from None
    except OSError as error:
        raise ConfigError(f"cannot read the {what} {path}: {error.strerror}") from None
    # The last two are for code that nests too deeply.
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(f"{path} is not Python: {str(error) or type(error).__name__}") from None
    if not path.stem.isprintable():
        name = printable(str(path))
        raise ConfigError(f"the {what} {name}: its name cannot be printed", "rename the file")
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    if function.partition("(")[0] not in names:
        raise ConfigError(f"{path} has no function {function}", example)
    return tree
