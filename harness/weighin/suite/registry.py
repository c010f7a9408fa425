"""Find strategies, uses and models by name, without importing torch or the files of users.

A file with a function ``load`` is a strategy for loads, one with ``save`` for saves, and one with ``use`` a use.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, entry_points, version
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any, TypeVar

from weighin.cell import NONE, SYNTHESISED, USES, ModelSpec, Operation, with_arguments
from weighin.child_process import CODE_PATH
from weighin.errors import ConfigError, UnknownName
from weighin.models.description import ask, spec_of
from weighin.settings.yaml_file import read_mapping
from weighin.stream import formats, pretrained_library, quantised
from weighin.stream import gguf_files as gguf
from weighin.stream import hugging_face_folder as hf
from weighin.stream.foreign import NOT_MEASURED
from weighin.stream.pretrained_library import AS_SAVED, TRANSFORMERS, WHOLE, FolderChoice, Selection
from weighin.stream.slices import check_converts, pack
from weighin.suite import user_code

if TYPE_CHECKING:
    from weighin.settings.definition import Settings

_Entry = TypeVar("_Entry")
PEAK_WORDS = ("model", "storages", "tensor", "layer", "shard", "mapped")
"""What a load can have in memory: the model's tensors, all storages of the files (the state dict that
``torch.load`` returns), the largest tensor, layer or shard, and the mapped file."""
_EXAMPLE_OF_PEAK = '("model + tensor",)'

_FROM = "from:"


def data_folder(name: str) -> Path:
    """Return "strategies" or "configs": beside the package in a checkout, inside it in a wheel."""
    return Path(CODE_PATH[1]) / name


@dataclass(frozen=True, slots=True)
class StrategyInfo:
    """The declarations in a strategy's file: the constants of these names, in capitals.

    ``maps_keys`` says that it renames and converts keys as transformers does, ``shares_load`` that it divides
    one load among ranks, and ``weights_only`` that it reads training checkpoints. ``packages`` are from PyPI
    ("safetensors>=0.8"). ``peak`` is the memory of a load on the CPU, for all formats or for each: words of
    ``PEAK_WORDS``, as in "model + tensor"; empty if it is not known.
    """

    name: str
    path: Path
    summary: str
    formats: tuple[str, ...] = ("pt",)
    devices: tuple[str, ...] = ("cpu",)
    options: tuple[str, ...] = ()
    maps_keys: bool = False
    pretrained: str = ""
    packages: tuple[str, ...] = ()
    shares_load: bool = False
    dequantises: bool = False
    weights_only: bool = False
    merges: bool = False
    needs_adapter: bool = False
    peak: tuple[str, ...] = ()

    def loads(self, found: quantised.Quantised) -> bool:
        """Tell whether the library's code or weighin's can load the quantised weights."""
        return self.dequantises and (bool(self.pretrained) or found.dequantises)

    @property
    def missing(self) -> str:
        """The missing packages and the command that installs them; empty if no package is missing."""
        return missing_packages(self.packages)

    def check_options(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.options:
                declare = f'a strategy declares its options in its file: OPTIONS = ("{name}",)'
                raise UnknownName(f"option of {self.name}", name, self.options, declare)


def strategies(operation: Operation = "load") -> dict[str, StrategyInfo]:
    """Return all strategies for one operation, by name: those of weighin and of installed packages."""
    by_name: dict[str, StrategyInfo] = {}
    folder = data_folder("strategies" if operation == "load" else "strategies/saving")
    for path in [*sorted(folder.glob("[!_]*.py")), *_third_party(operation)]:
        info = read_strategy(path, operation)
        if by_name.setdefault(info.name, info) is not info:
            why = f"two strategies are called {info.name!r}: {by_name[info.name].path} and {path}"
            repair = "rename one of the files: a strategy's name is its file's name"
            raise ConfigError(why, repair)
    return by_name


def _third_party(operation: Operation) -> Iterator[Path]:
    """Yield the files of strategies in installed packages, without importing a parent package."""
    for entry in entry_points(group=f"weighin.{'strategies' if operation == 'load' else 'saving'}"):
        top, *rest = entry.module.split(".")
        spec = find_spec(top)
        for part in rest:
            folders = spec.submodule_search_locations if spec else None
            spec = PathFinder.find_spec(part, list(folders)) if folders else None
        if not (spec and spec.origin and spec.has_location):
            raise ConfigError(
                f"the installed strategy {entry.name!r} names {entry.value!r}, which cannot be found",
                f"reinstall {entry.dist.name if entry.dist else entry.name}",
            )
        yield Path(spec.origin)


def _is_path(name: str, *endings: str) -> bool:
    return "/" in name or name.endswith(endings)


def _known(kind: str, name: str, known: Mapping[str, _Entry], own: str) -> _Entry:
    if name not in known:
        raise UnknownName(kind, name, known, f"for a file of your own: {own}")
    return known[name]


def strategy(name: str, operation: Operation = "load") -> StrategyInfo:
    """Return one strategy by its name, or by the path of its file ("./mine.py")."""
    if _is_path(name, ".py"):
        return read_strategy(Path(name).expanduser(), operation)
    kind = "strategy" if operation == "load" else "strategy for saves"
    return _known(kind, name, strategies(operation), "--strategies ./mine.py")


def chosen(
    settings: "Settings", own_format: str | None = None
) -> tuple[tuple[StrategyInfo, dict[str, Any]], ...]:
    """Return the strategies that the user named, else the default ones, else all that read ``own_format``."""
    pairs = []
    operation = settings.operation
    for entry in settings.strategies:
        is_all = entry.name == "all"
        for info in strategies(operation).values() if is_all else [strategy(entry.name, operation)]:
            info.check_options(entry.options)
            pairs.append((info, entry.options))
    if "strategies" not in settings.model_fields_set and own_format in formats.READ_ONLY:
        readers = [info for info in strategies().values() if own_format in info.formats]
        if not settings.format and not any(info in readers for info, _ in pairs):
            pairs = [(info, {}) for info in readers if not info.shares_load]
    return tuple(pairs)


def read_strategy(path: Path, operation: Operation = "load") -> StrategyInfo:
    """Read a strategy's name, summary and constants from its source, without executing the file."""
    example = "see strategies/README.md for an example of 20 lines"
    tree = user_code.parse(path, "strategy", f"{operation}(job)", example)
    docstring, constants = ast.get_docstring(tree), dict[str, tuple[Any, int]]()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            value = None  # of a value that is no literal
            with suppress(ValueError, TypeError):
                value = ast.literal_eval(node.value or ast.Constant(None))
            constants.setdefault(ast.unparse(target), (value, node.lineno))

    def wrong(name: str, what: str, example: str) -> ConfigError:
        where = f"{path}, line {constants[name][1]}"
        return ConfigError(f"{where}: {name} is not {what}", f"write it as in {name} = {example}")

    declared: dict[str, Any] = {}
    for field in fields(StrategyInfo):
        if field.name in ("name", "path", "summary"):
            continue
        name, default = field.name.upper(), field.default
        value, _ = constants.get(name, (default, 0))
        if isinstance(default, bool):
            value = value is True
        elif isinstance(default, tuple):
            is_texts = isinstance(value, tuple) and all(isinstance(each, str) for each in value)
            if not is_texts or (default and not value):
                what = "a tuple of at least one string" if default else "a tuple of strings"
                usual = _EXAMPLE_OF_PEAK if name == "PEAK" else f'("{(*default, "name")[0]}",)'
                raise wrong(name, what, usual)
        declared[field.name] = value
    words = {word for text in declared["peak"] for word in text.split(" + ")}
    if words - {*PEAK_WORDS} or len(declared["peak"]) not in (0, 1, len(declared["formats"])):
        what = f"a sum of {', '.join(PEAK_WORDS)}, or one for each of FORMATS"
        raise wrong("PEAK", what, _EXAMPLE_OF_PEAK)
    if declared["pretrained"] is True:
        declared["pretrained"] = TRANSFORMERS.name
    if declared["pretrained"] not in ("", *(each.name for each in pretrained_library.LIBRARIES)):
        raise wrong("PRETRAINED", "the name of a library", '"timm"')
    declared["merges"] |= declared["needs_adapter"]
    summary = docstring.splitlines()[0] if docstring else ""
    return StrategyInfo(path.stem, path.resolve(), summary, **declared)


def name_of(requirement: str) -> str:
    """Return the package's name in a requirement: "safetensors" in "safetensors>=0.8"."""
    return re.split(r"[^\w.-]", requirement.strip(), maxsplit=1)[0]


def versions(requirements: Iterable[str]) -> dict[str, str]:
    found = {}
    for name in map(name_of, requirements):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def missing_packages(requirements: Iterable[str]) -> str:
    """Return what is missing with its command ("needs timm: pip install timm"); empty if nothing is."""
    from packaging.requirements import InvalidRequirement, Requirement  # `list` does without it

    absent = []
    for requirement in requirements:
        with suppress(InvalidRequirement):  # such as a URL, which pip can install
            asked = Requirement(requirement)
            found = versions([asked.name]).get(asked.name)
            if found and asked.specifier.contains(found, prereleases=True):
                continue
        absent.append(requirement)
    install = f"pip install {' '.join(map(quote, absent))}"
    return f"needs {', '.join(absent)}: {install}" if absent else ""


def chosen_uses(names: list[str]) -> dict[str, str]:
    """Return the path of each use's file, by the use's name; empty for a use of weighin."""
    ours, found = dict.fromkeys((*USES, NONE), ""), dict[str, str]()
    for name in names:
        if not _is_path(name, ".py"):
            found[name] = _known("use", name, ours, "--use ./mine.py")
            continue
        path = Path(name).expanduser().resolve()
        user_code.parse(path, "use", "use(model)", "see docs/suites.md for an example of 2 lines")
        if path.stem in ours or found.get(path.stem, str(path)) != str(path):
            why = f"two uses are called {path.stem!r}, one of them {path}"
            raise ConfigError(why, "rename the file: a use's name is its file's name")
        found[path.stem] = str(path)
    return found


def files(kind: str) -> dict[str, Path]:
    """Return the files of the built-in "models" or "suites", by name."""
    return {path.stem: path for path in sorted((data_folder("configs") / kind).glob("*.yaml"))}


def suite_file(name: str) -> Path:
    """Return the file of a built-in suite by its name, or ``name`` itself if it is a path."""
    is_path = _is_path(name, ".yaml", ".yml")
    return Path(name) if is_path else _known("suite", name, files("suites"), "--suite ./mine.yaml")


def read_model(path: Path) -> ModelSpec:
    content = read_mapping(path)
    return ModelSpec(content["name"], content["builder"], content.get("kwargs", {}))


def builders() -> set[str]:
    """Return the builders of weighin's own models, which run without ``--trust``."""
    return {SYNTHESISED, *(read_model(path).builder for path in files("models").values())}


def model(
    name: str,
    kwargs: dict[str, object] | None = None,
    selection: Selection = WHOLE,
    choice: FolderChoice = AS_SAVED,
) -> ModelSpec:
    return model_and_checkpoint(name, kwargs, selection, choice)[0]


def model_and_checkpoint(
    name: str,
    kwargs: dict[str, object] | None = None,
    selection: Selection = WHOLE,
    choice: FolderChoice = AS_SAVED,
) -> tuple[ModelSpec, Path | None]:
    """Return the model that ``name`` stands for, and its checkpoint if ``name`` is a path.

    In this order, ``name`` is a built-in model, a builder ("package.module:callable", "path/nets.py:callable"),
    a Hugging Face folder or Hub id, a GGUF file, or any other checkpoint, whose model is the tensors that
    ``selection`` selects. "from:PATH" makes such a model of any checkpoint.
    """
    path = path_of(name, kwargs, choice.revision)
    if path is None:
        if choice.options:
            raise _no_folder(name, choice.options)
        if file := files("models").get(name):
            spec, given = read_model(file), kwargs or {}
            others = {key: one for key, one in given.items() if spec.kwargs.get(key) != one}
            title = with_arguments(spec.name, others)
            return ModelSpec(title, spec.builder, spec.kwargs | others), None
        builder = user_code.of_file(name)[0] if user_code.is_file(name) else name
        return ModelSpec(builder.rpartition(":")[2], builder, kwargs or {}), None
    if not name.startswith(_FROM) and (file := gguf_in(path)):
        spec = ModelSpec(file.stem, TRANSFORMERS.builder, ask(file))
        return hf.with_adapter(spec, choice.adapter), file
    if hf.is_pretrained(path) and not name.startswith(_FROM):
        folder = hf.read_folder(path, choice)
        if folder.names_model:
            return hf.with_adapter(spec_of(folder, selection), choice.adapter), folder.checkpoint
    if ignored := replace(choice, variant="", revision="").options:
        raise _no_folder(name, ignored)
    weights = weights_of(path, replace(choice, revision=""))
    slices = formats.read(weights, selection)
    formats.refuse_empty(weights, slices)
    check_converts(path, slices, NOT_MEASURED)
    quantised.refuse_codes(path, slices, tuple)
    return ModelSpec(path.name, SYNTHESISED, {"tensors": pack(slices)}), weights


def _no_folder(name: str, options: Iterable[str]) -> ConfigError:
    typed = " and ".join(options)
    return ConfigError(
        f"{name} is no Hugging Face folder of transformers, so {typed} would be ignored",
        f"leave {typed} out",
    )


def path_of(name: str, kwargs: dict[str, object] | None = None, revision: str = "") -> Path | None:
    """Return the file or folder that ``name`` stands for; None for a built-in model or a builder."""
    if name in (known := files("models")) or user_code.is_file(name):
        return None
    path = hf.path_of(Path(name.removeprefix(_FROM)), revision)
    if name.startswith(_FROM) or path.exists():
        if kwargs:
            why = f"{name} takes no arguments, so kwargs would be ignored"
            raise ConfigError(why, "leave kwargs out")
        return path
    if "://" in name:
        why = f"{name} is a URL, and weighin downloads no models"
        raise ConfigError(why, "download it, then give the path of the file or folder")
    if ":" in name:
        return None
    hf.cached_snapshot(name, revision)  # raises an error for a missing path or Hub model
    repair = "for any other model: ./FILE, ./FOLDER, or --model package.module:callable"
    raise UnknownName("model", name, known, repair)


def gguf_in(path: Path) -> Path | None:
    """Return the GGUF file at a path, or in the folder at a path; None for any other checkpoint."""
    if (gguf.is_file(path) or gguf.files_in(path)) and formats.detect(path) == gguf.NAME:
        return gguf.file_of(path)
    return None


def weights_of(path: Path, choice: FolderChoice = AS_SAVED) -> Path:
    """Return the checkpoint at ``path``: of a Hugging Face folder with one file, this file."""
    path = hf.path_of(path, choice.revision)
    if file := gguf_in(path):
        return file
    if hf.is_pretrained(path):
        return hf.weights_in(path, choice.variant)
    if choice.variant:
        raise _no_folder(str(path), (f"--set variant={choice.variant}",))
    return path


def notes_on(
    checkpoint: Path, choice: FolderChoice = AS_SAVED, architecture: str = ""
) -> tuple[str, ...]:
    """Return notes on a folder's class (``architecture``: what transformers took) and unloaded parts."""
    if not hf.is_pretrained(path := hf.folder_of(checkpoint)) or gguf_in(checkpoint):
        return ()
    notes = []
    folder = hf.read_folder(path, replace(choice, variant=hf.variant_of(checkpoint)))
    is_of_transformers = folder.library is TRANSFORMERS and folder.names_model
    if is_of_transformers and not (choice.model_class or folder.architectures):
        taken = f"{architecture}, which AutoModel chooses" if architecture else "that of AutoModel"
        notes.append(
            f"config.json names no class in 'architectures', so weighin takes {taken}; to choose"
            " another one: --set model_class=CLASS"
        )
    if parts := hf.parts_with_weights(path):
        notes.append(
            f"{path} is the transformer of a sentence-transformers folder; other parts that have"
            f" weights are not loaded: {', '.join(str(path / part) for part in parts)}"
        )
    return tuple(notes)
