"""Find the module of a user's model: in a file, in the current folder, or in a folder of PYTHONPATH.

Imports none of them.
"""

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

from weighin.errors import ConfigError

_OURS: Final = "weighin.models."
_FILE: Final = ".py:"
_TAKEN: Final = sys.stdlib_module_names | {"numpy", "safetensors", "torch", "weighin"}
"""The names of modules that a worker has already imported when it imports a model's module."""


@dataclass(frozen=True, slots=True)
class BuilderFile:
    """A builder in a file: its name as "package.module:function", and the folder to import it from."""

    builder: str
    folder: Path


def is_file(name: str) -> bool:
    """Tell whether a model's name is a builder in a file: "path/nets.py:build"."""
    return _FILE in name


def of_file(name: str) -> BuilderFile:
    """Return the builder that "path/nets.py:build" names.

    A file in a package, with ``__init__.py`` beside it, is imported as a part of that package, so that
    its relative imports work.

    Raises:
        ConfigError: there is no such file, or Python cannot import it under its name.
    """
    text, _, function = name.rpartition(":")
    path = Path(text).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"--model {name}: there is no file {text}",
            "write the path of a Python file and the name of a function: --model path/nets.py:build",
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
                "rename it: letters, digits and underscores",
            )
    if parts[0] in _TAKEN:
        raise ConfigError(
            f"--model {name}: Python or weighin already has a module called {parts[0]!r}",
            "rename the file, for example to nets.py",
        )
    return BuilderFile(f"{'.'.join(parts)}:{function}", folder)


def import_path(names: Iterable[str]) -> tuple[str, ...]:
    """Return the folders from which the modules of these models are imported, first to last.

    They are those of builders in files, the current folder, and those of PYTHONPATH that exist.
    """
    folders = [of_file(name).folder for name in names if is_file(name)]
    folders.append(Path.cwd())
    listed = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders += [Path(text).resolve() for text in listed if text and Path(text).exists()]
    return tuple(dict.fromkeys(map(str, folders)))


def is_ours(builder: str) -> bool:
    """Tell whether a builder is one of weighin's own, which needs no import path."""
    return builder.startswith(_OURS)


def file_of(builder: str, folders: Iterable[str]) -> Path | None:
    """Return the file of the builder's top module in one of these folders; None if none has it."""
    spec = PathFinder.find_spec(builder.partition(":")[0].partition(".")[0], [*folders])
    if spec is None:
        return None
    if spec.origin and spec.has_location:
        return Path(spec.origin)
    return Path(next(iter(spec.submodule_search_locations or ()), "")) or None
