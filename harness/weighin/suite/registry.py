"""Strategies and models by name, found without importing torch or any strategy.

A strategy loads or saves: the function that its file defines says which.
"""

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weighin.cell import ModelSpec, Operation
from weighin.errors import ConfigError, UnknownName

if TYPE_CHECKING:
    from weighin.suite.config import Suite

_PACKAGE = Path(__file__).resolve().parents[1]
_ENTRY_POINTS: dict[Operation, str] = {"load": "weighin.strategies", "save": "weighin.saving"}
_FOLDERS: dict[Operation, str] = {"load": ".", "save": "saving"}


def data_folder(name: str) -> Path:
    """Return "strategies", "configs" or "docker": beside the package, or inside it once installed."""
    installed = _PACKAGE / "_data" / name
    return installed if installed.is_dir() else _PACKAGE.parents[1] / name


@dataclass(frozen=True, slots=True)
class StrategyInfo:
    """What a strategy's file says about itself: ``formats`` that it reads, or that it writes.

    ``options`` are the names that it reads of ``job.options``.
    """

    name: str
    path: Path
    summary: str
    formats: tuple[str, ...]
    devices: tuple[str, ...]
    options: tuple[str, ...] = ()

    def check_options(self, names: Iterable[str]) -> None:
        """Raise UnknownName for an option that the strategy would ignore."""
        for name in names:
            if name not in self.options:
                declare = f'a strategy names its own in its file: OPTIONS = ("{name}",)'
                raise UnknownName(f"option of {self.name}", name, self.options, declare)


def strategies(operation: Operation = "load") -> dict[str, StrategyInfo]:
    """Return all strategies of one operation: our own files, and those of installed packages.

    Raises:
        ConfigError: two of one name, or a file that is no strategy.
    """
    found: dict[str, StrategyInfo] = {}
    ours = sorted((data_folder("strategies") / _FOLDERS[operation]).glob("[!_]*.py"))
    for path in [*ours, *_third_party(operation)]:
        info = read_strategy(path, operation)
        if info.name in found:
            raise ConfigError(
                f"two strategies are called {info.name!r}: {found[info.name].path} and {path}",
                "rename one of the files: a strategy's name is its file's name",
            )
        found[info.name] = info
    return found


def strategy(name: str, operation: Operation = "load") -> StrategyInfo:
    """Return one strategy by its name, or by the path of its file ("./mine.py")."""
    if name.endswith(".py") or "/" in name:
        return read_strategy(Path(name), operation)
    known = strategies(operation)
    if name not in known:
        kind = "strategy" if operation == "load" else "strategy of saving"
        raise UnknownName(kind, name, known, "a file of your own: --strategies ./mine.py")
    return known[name]


def named(name: str, operation: Operation = "load") -> list[StrategyInfo]:
    """Return the strategies that a name stands for: one, or with "all" every one that is known."""
    if name == "all":
        return list(strategies(operation).values())
    return [strategy(name, operation)]


def chosen(suite: "Suite") -> tuple[tuple[StrategyInfo, dict[str, Any]], ...]:
    """Return the strategies of a suite with their options.

    Raises:
        UnknownName: there is no such strategy, or it has no such option.
    """
    found = []
    for one in suite.strategies:
        for info in named(one.name, suite.operation):
            info.check_options(one.options)
            found.append((info, one.options))
    return tuple(found)


def read_strategy(path: Path, operation: Operation = "load") -> StrategyInfo:
    """Read a strategy's name, summary and constants from its syntax tree; runs none of it.

    Raises:
        ConfigError: no such file, no Python, no ``load`` (or ``save``), or wrong constants.
    """
    try:
        tree = ast.parse(path.read_bytes(), filename=str(path))
    except OSError as error:
        raise ConfigError(f"cannot read the strategy {path}: {error.strerror}") from None
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} is not Python: {error}") from None
    docstring = ast.get_docstring(tree)
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    if operation not in functions:
        raise ConfigError(
            f"{path} has no function {operation}(job)",
            "see strategies/README.md for one in 20 lines",
        )
    return StrategyInfo(
        name=path.stem,
        path=path.resolve(),
        summary=docstring.splitlines()[0] if docstring else "",
        formats=_constant(tree, "FORMATS", path, ("pt",)),
        devices=_constant(tree, "DEVICES", path, ("cpu",)),
        options=_constant(tree, "OPTIONS", path, ()),
    )


def models() -> dict[str, Path]:
    """Return the built-in models' configuration files by name."""
    return {path.stem: path for path in sorted((data_folder("configs") / "models").glob("*.yaml"))}


def model(name: str, kwargs: dict[str, object] | None = None) -> ModelSpec:
    """Return a built-in model by name, or any builder as "package.module:callable"."""
    if ":" in name:
        return ModelSpec(name.rpartition(":")[2], name, kwargs or {})
    known = models()
    if name not in known:
        raise UnknownName("model", name, known, "any other: --model package.module:callable")
    from weighin.suite.config import read_model  # pydantic, which `weighin list` need not import

    spec = read_model(known[name])
    return ModelSpec(spec.name, spec.builder, spec.kwargs | kwargs) if kwargs else spec


def suites() -> dict[str, Path]:
    """Return the built-in suites' files by name."""
    return {path.stem: path for path in sorted((data_folder("configs") / "suites").glob("*.yaml"))}


def suite_file(name: str) -> Path:
    """Return the file of a built-in suite by its name; a path ("mine.yaml", "./mine") is itself.

    Raises:
        UnknownName: no built-in suite has this name.
    """
    if "/" in name or name.endswith((".yaml", ".yml")):
        return Path(name)
    known = suites()
    if name not in known:
        raise UnknownName("suite", name, known, "for a file of your own: --suite ./mine.yaml")
    return known[name]


def _third_party(operation: Operation) -> list[Path]:
    """Return the files of the modules that installed packages offer as strategies."""
    paths = []
    for entry in entry_points(group=_ENTRY_POINTS[operation]):
        path = _file_of(entry.module)
        if path is None:
            raise ConfigError(
                f"the strategy {entry.name!r} points at {entry.value!r}, which cannot be found",
                f"reinstall {entry.dist.name if entry.dist else entry.name}",
            )
        paths.append(path)
    return paths


def _file_of(module: str) -> Path | None:
    """Return a module's file; the packages around it are not imported, as find_spec would do."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    for part in rest:
        folders = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(part, list(folders)) if folders else None
    return Path(spec.origin) if spec and spec.origin and spec.has_location else None


def _constant(tree: ast.Module, name: str, path: Path, default: tuple[str, ...]) -> tuple[str, ...]:
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if [ast.unparse(target) for target in targets] == [name]:
            is_empty = isinstance(node.value, ast.Tuple) and not node.value.elts
            if not (value := _strings(node.value)) and (default or not is_empty):
                raise ConfigError(
                    f"{path}, line {node.lineno}: {name} is not a tuple of strings",
                    f'write it out, as in {name} = ("{[*default, "name"][0]}",)',
                )
            return value
    return default


def _strings(node: ast.expr | None) -> tuple[str, ...]:
    """Return the tuple of strings that an expression writes out; an empty one for any other."""
    items = node.elts if isinstance(node, ast.Tuple) else []
    found = [item.value for item in items if isinstance(item, ast.Constant)]
    strings = tuple(value for value in found if isinstance(value, str))
    return strings if len(strings) == len(items) else ()
