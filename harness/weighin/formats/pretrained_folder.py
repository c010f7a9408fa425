"""Read a Hugging Face folder: its ``config.json``, and the checkpoint beside it.

This module uses only the standard library, and never the network. A model of the Hub is found in
the local cache (``~/.cache/huggingface/hub``) by its id, such as "Qwen/Qwen3-0.6B".
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from weighin.cell import ModelSpec
from weighin.errors import CheckpointError, ConfigError
from weighin.formats import gguf, sniff
from weighin.formats.pretrained_code import AUTO_MAP, CODE_KEYS, auto_class, describe_code
from weighin.formats.pretrained_library import (
    LIBRARIES,
    TRANSFORMERS,
    Library,
    library_in,
    library_of,
)

BUILDER: Final = TRANSFORMERS.builder
CONFIG: Final = "config.json"

_BUILT_IN: Final = "weighin.models."
_INDEX: Final = "index.json"
MODEL_DTYPES: Final = ("float32", "bfloat16", "float16", "float64")
"""Dtypes that torch accepts as the default dtype, in which a model can be built."""
_ENTRY: Final = "models--"
_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")


@dataclass(frozen=True, slots=True)
class PretrainedFolder:
    """A folder that ``save_pretrained`` of transformers or diffusers wrote, or a folder of timm.

    Attributes:
        config: the content of ``config.json``.
        checkpoint: the file with the weights, or the folder itself if they are in shards.
        trust_remote_code: whether the folder's own code may run, if it brings any.
    """

    path: Path
    config: dict[str, Any]
    checkpoint: Path
    trust_remote_code: bool = False

    @property
    def architecture(self) -> str:
        """The name of the model's class, such as "LlamaForCausalLM".

        Raises:
            ConfigError: ``config.json`` names no class, or code in the folder that may not run.
        """
        if self.has_code and not self.trust_remote_code:
            raise ConfigError(
                f"this model's code comes with the folder: {self.path} ({AUTO_MAP} in {CONFIG})",
                "read the code; if you trust it, add --trust-remote-code to run it (bench, floor, predict,"
                " recommend, convert; in Python: trust_remote_code=True)",
            )
        if (name := self.library.class_in(self.config)) is None:
            raise ConfigError(
                f"{self.path / CONFIG} names no class in 'architectures'",
                "save the folder again with model.save_pretrained(FOLDER)",
            )
        return name

    @property
    def has_code(self) -> bool:
        """Whether the folder brings code for its model: ``auto_map`` in ``config.json``."""
        return AUTO_MAP in self.config

    @property
    def library(self) -> Library:
        """The library that the model's class belongs to."""
        return library_in(self.config)

    @property
    def code(self) -> dict[str, str] | None:
        """The folder's code as an argument of the builder; None if the folder brings no code.

        Raises:
            ConfigError: the code may not run, or is not code of the model's class.
        """
        if not self.has_code:
            return None
        auto_class(self.config, self.architecture)
        return describe_code(self.path)


def dtype_of(config: Mapping[str, Any]) -> str | None:
    """Return the dtype that the content of a ``config.json`` names; None if it names none.

    A dict names a dtype for each part of the model, of which transformers takes the one of the
    whole model, float32 if there is none. Dtypes in the configurations of parts have no effect.

    Raises:
        ConfigError: a model cannot have this dtype.
    """
    names = [config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None]
    if not names:
        return None
    name = names[0].get("", "float32") if isinstance(names[0], dict) else names[0]
    return checked_dtype(name, Path(CONFIG))


def checked_dtype(name: object, file: Path) -> str:
    """Return ``name`` if torch can build a model in this dtype; raise ConfigError for any other."""
    if isinstance(name, str) and name in MODEL_DTYPES:
        return name
    raise ConfigError(
        f"{file} names the dtype {sniff.short(name)}, which is no dtype of a model: from_pretrained fails, too",
        f"write one of {', '.join(MODEL_DTYPES)} into {CONFIG}",
    )


def is_folder(model: ModelSpec) -> bool:
    """Tell whether a model was read from a folder of a library."""
    return bool(folder_library(model))


def folder_library(model: ModelSpec) -> str:
    """Return the library of the folder that a model was read from; empty for other models.

    The configuration in a folder names its class; that of a built-in model of transformers does not.
    """
    library = library_of(model.builder)
    return library.name if library and library.class_in(model.kwargs["config"]) else ""


def own_dtype(model: ModelSpec) -> str:
    """Return the dtype of a model's published files; float32 for a model without such files.

    A model of transformers has it in its configuration, another built-in model in its arguments. A
    model of diffusers or timm has float32, whatever the dtype of its files.
    """
    if library := library_of(model.builder):
        if library.fixed_dtype:
            return library.fixed_dtype
        return dtype_of(model.kwargs["config"]) or "float32"
    return (model.builder.startswith(_BUILT_IN) and dtype_of(model.kwargs)) or "float32"


def name_of(folder: Path) -> str:
    """Return a folder's name; for a snapshot in the Hub's cache, the id of its model."""
    snapshots, entry = folder.parent, folder.parent.parent.name
    if snapshots.name == "snapshots" and entry.startswith(_ENTRY):
        return entry.removeprefix(_ENTRY).replace("--", "/")
    return folder.name


def is_pretrained(path: Path) -> bool:
    """Tell whether a path is a folder with ``config.json``."""
    return (path / CONFIG).is_file()


def is_pretrained_checkpoint(checkpoint: Path) -> bool:
    """Tell whether ``from_pretrained`` reads a checkpoint: in a Hugging Face folder, or a GGUF file."""
    return is_pretrained(folder_of(checkpoint)) or gguf.is_file(checkpoint)


def folder_of(checkpoint: Path) -> Path:
    """Return the Hugging Face folder of a checkpoint: the path itself, or the parent of a file."""
    return checkpoint if checkpoint.is_dir() else checkpoint.parent


def code_of(model: ModelSpec) -> dict[str, str] | None:
    """Return the folder and the digest of the code that a model's folder brings, if any.

    Raises:
        ConfigError: the model's arguments, which anybody may have written into a plan, are damaged.
    """
    code = model.kwargs.get("code") if model.builder == BUILDER else None
    if code is None:
        return None
    if not isinstance(code, dict) or not all(isinstance(code.get(key), str) for key in CODE_KEYS):
        raise ConfigError(
            f"the argument `code` of the model {model.name} is not a folder and a digest",
            "start a new run",
        )
    return code


def read_folder(path: Path, *, trust_remote_code: bool = False) -> PretrainedFolder:
    """Return a Hugging Face folder, whose own code may run only with ``trust_remote_code``.

    Raises:
        CheckpointError: the folder has no weights, or ``config.json`` is damaged.
    """
    repair = "save the folder again with model.save_pretrained(FOLDER)"
    try:
        text = (path / CONFIG).read_bytes()
        config = json.loads(text)
    except OSError as error:
        raise sniff.unreadable(path / CONFIG, error) from error
    except (ValueError, RecursionError) as error:
        raise sniff.not_json(path / CONFIG, text, f"not JSON: {error}", repair) from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path / CONFIG}: not a JSON object", repair)
    return PretrainedFolder(path, config, weights_in(path), trust_remote_code)


def weights_in(path: Path) -> Path:
    """Return the checkpoint of a Hugging Face folder, as its library chooses it.

    Raises:
        CheckpointError: the folder has no weights.
    """
    if found := find_weights(path):
        return found
    raise sniff.no_model(path)


def index_in(path: Path) -> Path:
    """Return the index of a folder whose weights are in shards."""
    return next(file for file in _candidates(path) if file.name.endswith(_INDEX))


def find_weights(path: Path) -> Path | None:
    """Return what ``weights_in`` returns; None if the folder has no weights of these libraries."""
    file = next(_candidates(path), None)
    return path if file and file.name.endswith(_INDEX) else file


def _candidates(path: Path, variant: str | None = None) -> Iterator[Path]:
    """Yield the folder's files of weights and indexes in a variant, those of its own library first."""
    libraries = (library_in(_config_in(path)), *LIBRARIES)
    names = dict.fromkeys(name for each in libraries for name in each.weights_as(variant))
    return (path / name for name in names if (path / name).is_file())


def _config_in(path: Path) -> dict[str, Any]:
    """Return the content of ``config.json``; empty if it cannot be read."""
    try:
        config = json.loads((path / CONFIG).read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def cached_snapshot(name: str) -> Path | None:
    """Return the folder of a Hub model in the local cache; None if ``name`` is no Hub id.

    Raises:
        CheckpointError: ``name`` is an id, but the cache does not have this model; or ``name`` can
            only be a path, which does not exist.
    """
    if sniff.looks_like_path(name) and not Path(name).expanduser().exists():
        raise sniff.missing(name)
    if not _HUB_ID.fullmatch(name):
        return None
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    entry = hub / f"{_ENTRY}{name.replace('/', '--')}"
    try:
        snapshot = entry / "snapshots" / (entry / "refs" / "main").read_text().strip()
    except OSError:
        snapshot = entry / "snapshots"
    if is_pretrained(snapshot):
        return snapshot
    raise CheckpointError(
        f"{name} is not in the cache {hub}, and weighin never downloads", f"hf download {name}"
    )


def from_pretrained_arguments(checkpoint: Path) -> dict[str, Any]:
    """Return the arguments with which ``from_pretrained`` reads this checkpoint of a folder."""
    folder = {"pretrained_model_name_or_path": str(folder_of(checkpoint)), "local_files_only": True}
    return folder | ({"gguf_file": checkpoint.name} if gguf.is_file(checkpoint) else {})


def path_of(path: Path) -> Path:
    """Return a path that exists, or the snapshot of the model whose id the path is.

    An index stands for its folder. Return any other path unchanged.
    """
    path = path.expanduser()
    if path.exists():
        is_index = path.name.endswith(_INDEX) and path.is_file()
        return path.parent if is_index else path
    try:
        return cached_snapshot(str(path)) or path
    except CheckpointError:
        return path
