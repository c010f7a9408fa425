"""Find the module of a user's model: in a file, in the current folder, or in a folder of
PYTHONPATH.

The search does not import the module.
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
    """A builder in a file: its name "package.module:function", and the module's import folder."""

    builder: str
    folder: Path


def is_file(name: str) -> bool:
    """Return whether a model's name is a builder in a file: "path/nets.py:build"."""
    return _FILE in name


def of_file(name: str) -> BuilderFile:
    """Return the builder that "path/nets.py:build" names.

    A file in a package, with ``__init__.py`` beside it, is imported as a part of that package, so
    that the file's relative imports work.

    Raises:
        ConfigError: the file does not exist, or Python cannot import a file of this name.
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

    The folders are those of builders in files, the current folder, and the existing folders of
    PYTHONPATH.
    """
    folders = [of_file(name).folder for name in names if is_file(name)]
    folders.append(Path.cwd())
    listed = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    folders += [Path(text).resolve() for text in listed if text and Path(text).exists()]
    return tuple(dict.fromkeys(map(str, folders)))


def is_ours(builder: str) -> bool:
    """Return whether a builder belongs to weighin, so that it needs no import path."""
    return builder.startswith(_OURS)


def file_of(builder: str, folders: Iterable[str]) -> Path | None:
    """Return the file of a builder's top module in one of ``folders``; None if no folder has it."""
    spec = PathFinder.find_spec(builder.partition(":")[0].partition(".")[0], [*folders])
    if spec is None:
        return None
    if spec.origin and spec.has_location:
        return Path(spec.origin)
    return Path(next(iter(spec.submodule_search_locations or ()), "")) or None
