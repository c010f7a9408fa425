"""Find strategies and models by name, without importing torch or any strategy.

A file that defines ``load`` is a strategy for loads; a file that defines ``save`` is a strategy for
saves.
"""

import ast
from collections.abc import Iterable
from dataclasses import dataclass, replace
from importlib.machinery import PathFinder
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weighin import formats
from weighin.cell import SYNTHESISED, ModelSpec, Operation
from weighin.errors import ConfigError, UnknownName
from weighin.formats import structure
from weighin.formats.pretrained_folder import (
    cached_snapshot,
    is_pretrained,
    own_dtype,
    read_folder,
)
from weighin.formats.selection import WHOLE, Selection
from weighin.suite import user_code

if TYPE_CHECKING:
    from weighin.suite.config import Suite

_PACKAGE = Path(__file__).resolve().parents[1]
_ENTRY_POINTS: dict[Operation, str] = {"load": "weighin.strategies", "save": "weighin.saving"}
_FROM = "from:"
_FOLDERS: dict[Operation, str] = {"load": ".", "save": "saving"}


def data_folder(name: str) -> Path:
    """Return the path of one of weighin's data folders: "strategies", "configs" or "docker".

    The data folders lie beside the package in a checkout, and inside the package in an installed
    wheel.
    """
    installed = _PACKAGE / "_data" / name
    return installed if installed.is_dir() else _PACKAGE.parents[1] / name


@dataclass(frozen=True, slots=True)
class StrategyInfo:
    """The declarations in a strategy's file.

    ``formats`` are the checkpoint formats that the strategy reads (a load) or writes (a save).
    ``options`` are the names that the strategy accepts in ``job.options``. ``maps_keys`` tells
    whether the strategy renames and converts a checkpoint's keys as transformers does.
    ``pretrained`` tells whether the strategy loads only Hugging Face folders. ``packages`` are the
    packages that the strategy imports beside torch and weighin, by their names on PyPI:
    "fastsafetensors", "safetensors>=0.8". ``shares_load`` tells whether the strategy divides one
    load among several ranks, so that it needs at least two.
    """

    name: str
    path: Path
    summary: str
    formats: tuple[str, ...]
    devices: tuple[str, ...]
    options: tuple[str, ...] = ()
    maps_keys: bool = False
    pretrained: bool = False
    packages: tuple[str, ...] = ()
    shares_load: bool = False

    @property
    def missing(self) -> str:
        """A text on the missing packages and how to install them; empty if none is missing."""
        from weighin.suite import (
            packages,
        )  # imports importlib.metadata, which `weighin list` does not need

        return packages.missing(self.packages)

    def check_options(self, names: Iterable[str]) -> None:
        """Raise UnknownName for an option that the strategy does not declare."""
        for name in names:
            if name not in self.options:
                declare = f'a strategy declares its options in its file: OPTIONS = ("{name}",)'
                raise UnknownName(f"option of {self.name}", name, self.options, declare)


def strategies(operation: Operation = "load") -> dict[str, StrategyInfo]:
    """Return all strategies for one operation by name: those of weighin and of installed packages.

    Raises:
        ConfigError: two strategies have the same name, or a file is not a strategy.
    """
    by_name: dict[str, StrategyInfo] = {}
    ours = sorted((data_folder("strategies") / _FOLDERS[operation]).glob("[!_]*.py"))
    for path in [*ours, *_third_party(operation)]:
        info = read_strategy(path, operation)
        if info.name in by_name:
            raise ConfigError(
                f"two strategies are called {info.name!r}: {by_name[info.name].path} and {path}",
                "rename one of the files: a strategy's name is its file's name",
            )
        by_name[info.name] = info
    return by_name


def strategy(name: str, operation: Operation = "load") -> StrategyInfo:
    """Return one strategy by its name, or by the path of its file ("./mine.py")."""
    if name.endswith(".py") or "/" in name:
        return read_strategy(Path(name), operation)
    known = strategies(operation)
    if name not in known:
        kind = "strategy" if operation == "load" else "strategy for saves"
        raise UnknownName(kind, name, known, "for a file of your own: --strategies ./mine.py")
    return known[name]


def named(name: str, operation: Operation = "load") -> list[StrategyInfo]:
    """Return a list with the strategy of this name, or with all strategies for the name "all"."""
    if name == "all":
        return list(strategies(operation).values())
    return [strategy(name, operation)]


def chosen(suite: "Suite") -> tuple[tuple[StrategyInfo, dict[str, Any]], ...]:
    """Return the strategies of a suite, each with its options.

    Raises:
        UnknownName: a strategy does not exist, or does not declare one of its options.
    """
    pairs = []
    for entry in suite.strategies:
        for info in named(entry.name, suite.operation):
            info.check_options(entry.options)
            pairs.append((info, entry.options))
    return tuple(pairs)


def read_strategy(path: Path, operation: Operation = "load") -> StrategyInfo:
    """Read a strategy's name, summary and constants from its syntax tree, without executing it.

    Raises:
        ConfigError: the file is missing or not Python, defines no ``load`` (or ``save``), or has
            an invalid constant.
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
            "see strategies/README.md for an example of 20 lines",
        )
    return StrategyInfo(
        name=path.stem,
        path=path.resolve(),
        summary=docstring.splitlines()[0] if docstring else "",
        formats=_constant(tree, "FORMATS", path, ("pt",)),
        devices=_constant(tree, "DEVICES", path, ("cpu",)),
        options=_constant(tree, "OPTIONS", path, ()),
        maps_keys=_flag(tree, "MAPS_KEYS"),
        pretrained=_flag(tree, "PRETRAINED"),
        packages=_constant(tree, "PACKAGES", path, ()),
        shares_load=_flag(tree, "SHARES_LOAD"),
    )


def models() -> dict[str, Path]:
    """Return the built-in models' configuration files by name."""
    return {path.stem: path for path in sorted((data_folder("configs") / "models").glob("*.yaml"))}


def from_checkpoint(path: Path, selection: Selection = WHOLE) -> ModelSpec:
    """Return a model without code whose parameters have the names and shapes in a checkpoint.

    Raises:
        CheckpointError: ``path`` is not a checkpoint, or has no tensors or too many.
    """
    _, slices = formats.read(path.expanduser(), selection)
    return ModelSpec(path.name, SYNTHESISED, {"tensors": structure.pack(slices)})


def own_checkpoint(names: Iterable[str], given: Path | None) -> Path | None:
    """Return the checkpoint that a model's name ("from:PATH") or --checkpoint gives, if any.

    Raises:
        ConfigError: several checkpoints are given, or a "from:PATH" model is not the only model.
    """
    names = list(names)
    own = [name for name in names if name.startswith(_FROM)]
    if not own:
        return given
    if len(names) > 1:
        raise ConfigError(
            f"{own[0]} and other models in one run, which has one checkpoint", "run them one by one"
        )
    if given is not None:
        raise ConfigError(
            f"two checkpoints: {own[0]} and --checkpoint {given}", "leave --checkpoint out"
        )
    return Path(own[0].removeprefix(_FROM))


def models_of(
    suite: "Suite",
    kwargs: dict[str, Any],
    selection: Selection = WHOLE,
    *,
    trust_remote_code: bool = False,
) -> tuple[ModelSpec, ...]:
    """Return the models of a suite; ``kwargs`` are arguments of all of them, beside their own."""
    specs = []
    for entry in suite.models:
        spec = model(
            entry.source,
            entry.kwargs | kwargs or None,
            selection,
            trust_remote_code=trust_remote_code,
        )
        specs.append(
            replace(spec, name=entry.name) if entry.name and entry.name != entry.source else spec
        )
    return tuple(specs)


def checkpoint_of(suite: "Suite", given: Path | None) -> Path | None:
    """Return the checkpoint that a suite's model or --checkpoint gives, if any.

    Raises:
        ConfigError: several checkpoints are given.
    """
    own = next((one for one in suite.models if one.checkpoint), None)
    if own is None or own.source.startswith(_FROM):
        return own_checkpoint(suite.sources, given)
    if given is not None:
        raise ConfigError(
            f"two checkpoints: {own.checkpoint} of the suite and --checkpoint {given}",
            "leave --checkpoint out",
        )
    return Path(own.checkpoint)


def model(
    name: str,
    kwargs: dict[str, object] | None = None,
    selection: Selection = WHOLE,
    *,
    trust_remote_code: bool = False,
) -> ModelSpec:
    """Return the model that ``name`` gives: built-in, a Hugging Face folder, or a builder's model.

    A builder is "package.module:callable", or "path/nets.py:callable" for a builder in a file.
    "from:PATH" is the model that consists of the tensors that ``selection`` selects in a
    checkpoint. With ``trust_remote_code``, a Hugging Face folder may bring code of its own.
    """
    if folder := pretrained_folder(name):
        if kwargs:
            raise ConfigError(
                f"{name} has its arguments in config.json, so --kwargs would be ignored",
                "leave --kwargs out, or change config.json",
            )
        return read_folder(folder, trust_remote_code=trust_remote_code).spec()
    if name.startswith(_FROM):
        if kwargs:
            raise ConfigError(f"--model {name} takes no arguments", "leave --kwargs out")
        return from_checkpoint(Path(name.removeprefix(_FROM)), selection)
    if user_code.is_file(name):
        name = user_code.of_file(name).builder
    if ":" in name:
        return ModelSpec(name.rpartition(":")[2], name, kwargs or {})
    known = models()
    if name not in known:
        raise UnknownName(
            "model",
            name,
            known,
            "for any other model: a Hugging Face folder, or --model package.module:callable",
        )
    from weighin.suite.config import read_model  # imports pydantic, which `weighin list` avoids

    spec = read_model(known[name])
    return ModelSpec(spec.name, spec.builder, spec.kwargs | kwargs) if kwargs else spec


def pretrained_folder(name: str) -> Path | None:
    """Return the Hugging Face folder of a model's name: a path, or an id in the local cache.

    Return None for any other name.

    Raises:
        CheckpointError: the name is the id of a model that the local cache does not have.
    """
    if is_pretrained(path := Path(name).expanduser()):
        return path
    return None if path.exists() or name in models() else cached_snapshot(name)


def model_dtype(name: str, dtype: str) -> str:
    """Return the dtype of a load.

    "auto" is the dtype in the configuration of a Hugging Face folder or of a built-in model of
    transformers, and float32 for any other model.
    """
    if dtype != "auto":
        return dtype
    if folder := pretrained_folder(name):
        return read_folder(folder).dtype
    return own_dtype(model(name)) if name in models() else "float32"


def suites() -> dict[str, Path]:
    """Return the built-in suites' files by name."""
    return {path.stem: path for path in sorted((data_folder("configs") / "suites").glob("*.yaml"))}


def suite_file(name: str) -> Path:
    """Return the file of a built-in suite by its name, or ``name`` itself if it is a path.

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
    """Return the strategy files that installed packages declare as entry points."""
    paths = []
    for entry in entry_points(group=_ENTRY_POINTS[operation]):
        path = _file_of(entry.module)
        if path is None:
            raise ConfigError(
                f"the entry point of strategy {entry.name!r} names {entry.value!r}, which cannot be found",
                f"reinstall {entry.dist.name if entry.dist else entry.name}",
            )
        paths.append(path)
    return paths


def _file_of(module: str) -> Path | None:
    """Return a module's file. Unlike ``find_spec``, do not import the module's parent packages."""
    top, *rest = module.split(".")
    spec = find_spec(top)
    for part in rest:
        folders = spec.submodule_search_locations if spec else None
        spec = PathFinder.find_spec(part, list(folders)) if folders else None
    return Path(spec.origin) if spec and spec.origin and spec.has_location else None


def _flag(tree: ast.Module, name: str) -> bool:
    """Return whether a file sets the constant ``name`` to True."""
    return any(
        isinstance(node, ast.Assign)
        and [target.id for target in node.targets if isinstance(target, ast.Name)] == [name]
        and isinstance(node.value, ast.Constant)
        and node.value.value is True
        for node in tree.body
    )


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
                    f'write a literal tuple, as in {name} = ("{[*default, "name"][0]}",)',
                )
            return value
    return default


def _strings(node: ast.expr | None) -> tuple[str, ...]:
    """Return the items of a literal tuple of strings; empty for any other expression."""
    items = node.elts if isinstance(node, ast.Tuple) else []
    values = [item.value for item in items if isinstance(item, ast.Constant)]
    strings = tuple(value for value in values if isinstance(value, str))
    return strings if len(strings) == len(items) else ()
