"""Read a Hugging Face folder: ``config.json``, and the checkpoint beside it. No function uses the network."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from weighin.cell import ModelSpec
from weighin.errors import CheckpointError, ConfigError
from weighin.files import object_in, parse_json, read_bytes
from weighin.formats import auto_classes, gguf, hub_cache, unknown_file
from weighin.formats.pretrained_choice import AS_SAVED, FolderChoice
from weighin.formats.pretrained_code import AUTO_MAP, CODE_KEYS, auto_class, describe_code
from weighin.formats.pretrained_library import (
    LIBRARIES,
    TRANSFORMERS,
    Library,
    library_in,
    library_of,
)
from weighin.formats.selection import Selection
from weighin.formats.unknown_folder import no_model
from weighin.text import one_line

BUILDER: Final = TRANSFORMERS.builder
CONFIG: Final = "config.json"

_BUILT_IN: Final = "weighin.models."
_INDEX: Final = "index.json"
MODEL_DTYPES: Final = ("float32", "bfloat16", "float16", "float64")
"""The dtypes in which a model can be built: those that ``torch.set_default_dtype`` accepts."""
_DEEPEST: Final = 4  # folders between a file of weights and the config.json that names the file
_EXPLICIT: Final = "transformers_weights"
_MOST_LAYERS: Final = 100_000
_EXPLICIT_ENDS: Final = (".safetensors", ".safetensors.index.json")
_VARIANT: Final = re.compile(
    r"(?:model|pytorch_model|diffusion_pytorch_model)\."
    r"(?:([\w-]+)\.(?:safetensors|bin)|(?:safetensors|bin)\.index\.([\w-]+)\.json)"
)


@dataclass(frozen=True, slots=True)
class PretrainedFolder:
    """A folder that ``save_pretrained`` of transformers or diffusers wrote, or a folder of timm.

    Attributes:
        config: the content of ``config.json``.
        checkpoint: the file with the weights. For weights in shards, the folder itself, or the
            index if the index has an unusual name.
    """

    path: Path
    config: dict[str, Any]
    checkpoint: Path
    choice: FolderChoice = AS_SAVED

    @property
    def architecture(self) -> str:
        """The name of the model's class, such as "LlamaForCausalLM".

        Raises:
            ConfigError: ``auto_classes.choose`` finds no class, or one in code that may not run.
        """
        return self._class[0]

    @property
    def _class(self) -> tuple[str, bool]:
        """The name of the model's class, and whether the folder's code defines the class."""
        if self.library is not TRANSFORMERS:
            return str(self.library.class_in(self.config)), False
        return auto_classes.choose(self.path, self.config, self.choice)

    @property
    def names_model(self) -> bool:
        """Whether ``config.json`` names a class or a model type, or the user names a class."""
        if self.library is not TRANSFORMERS:
            return True
        named = any(self.config.get(key) for key in ("architectures", "model_type", AUTO_MAP))
        return named or bool(self.choice.model_class)

    @property
    def library(self) -> Library:
        return library_in(self.config)

    @property
    def code(self) -> dict[str, str] | None:
        """The path and digest of the folder's Python code, for the argument ``code`` of the model's
        builder; None if that code does not define the model's class.

        Raises:
            ConfigError: as for ``architecture``, or ``auto_map`` names no code for the class.
        """
        name, in_code = self._class
        if not in_code:
            return None
        auto_class(self.config, name)
        return describe_code(self.path)


def dtype_of(config: Mapping[str, Any]) -> str | None:
    """Return the dtype that the content of a ``config.json`` names; None if ``config.json`` names
    no dtype.

    The dtype in ``config.json`` may be a dict that maps parts of the model to dtypes. transformers
    then takes the dtype under the key "", or float32 if the dict lacks this key. Dtypes in nested
    configurations, such as ``text_config``, have no effect.

    Raises:
        ConfigError: the named dtype is not in ``MODEL_DTYPES``.
    """
    names = [config[key] for key in ("dtype", "torch_dtype") if config.get(key) is not None]
    if not names:
        return None
    name = names[0].get("", "float32") if isinstance(names[0], dict) else names[0]
    return checked_dtype(name, Path(CONFIG))


def checked_dtype(name: object, file: Path) -> str:
    """Return ``name`` if it is in ``MODEL_DTYPES``; raise ConfigError for any other name."""
    if isinstance(name, str) and name in MODEL_DTYPES:
        return name
    raise ConfigError(
        f"{file} names the dtype {unknown_file.short(name)}: no model can have this dtype, and from_pretrained fails, too",
        f"write one of {', '.join(MODEL_DTYPES)} into {CONFIG}",
    )


def is_folder(model: ModelSpec) -> bool:
    """Tell whether the model was read from a folder of transformers, diffusers or timm."""
    return bool(folder_library(model))


def folder_library(model: ModelSpec) -> str:
    """Return the name of the library whose folder a model was read from; "" if from no folder.

    The configuration of a model from a folder always has the library's key for the class. Its value
    may be null. The configuration of a transformers model that is built into weighin lacks the key.
    """
    library = library_of(model.builder)
    return library.name if library and library.class_key in model.kwargs["config"] else ""


def own_dtype(model: ModelSpec) -> str:
    """Return the dtype in which a model was published; float32 if the ``ModelSpec`` names no dtype.

    A transformers model names this dtype in its configuration. Any other model that is built into
    weighin names it in its arguments. For diffusers and timm, the result is always float32, the
    dtype in which these libraries build a model.
    """
    if library := library_of(model.builder):
        if library.fixed_dtype:
            return library.fixed_dtype
        return dtype_of(model.kwargs["config"]) or "float32"
    return (model.builder.startswith(_BUILT_IN) and dtype_of(model.kwargs)) or "float32"


def is_pretrained(path: Path) -> bool:
    return (path / CONFIG).is_file()


def is_pretrained_checkpoint(checkpoint: Path) -> bool:
    """Tell whether from_pretrained can read a checkpoint: GGUF, or any in a Hugging Face folder."""
    return is_pretrained(folder_of(checkpoint)) or gguf.is_file(checkpoint)


def refuse_part(checkpoint: Path, selection: Selection) -> None:
    """Raise CheckpointError for any ``selection`` in a checkpoint that ``from_pretrained`` reads.

    weighin compares a load of it with ``from_pretrained``, which always loads the whole checkpoint.
    """
    if selection and is_pretrained_checkpoint(checkpoint):
        raise CheckpointError(
            f"{checkpoint}: --key and --strip-prefix do not apply to this folder: weighin compares"
            " each load with from_pretrained, which always loads a whole folder",
            "write the selected weights into a new folder, and copy config.json there: weighin"
            f" convert {checkpoint} NEW/model.safetensors {' '.join(selection.options)}",
        )


def folder_of(checkpoint: Path) -> Path:
    """Return the Hugging Face folder of a checkpoint: a folder itself, or else the file's folder.

    If the file's folder has no ``config.json``, the result may be one of the three folders above:
    the nearest with a ``config.json``, if that has the key ``transformers_weights``.
    """
    if checkpoint.is_dir():
        return checkpoint
    parents = [path for path in checkpoint.parents[:_DEEPEST] if is_pretrained(path)]
    named = (path for path in parents[:1] if path == checkpoint.parent or _explicit(path))
    return next(named, checkpoint.parent)


def code_of(model: ModelSpec) -> dict[str, str] | None:
    """Return the folder and the digest of the model's own Python code; None if the code of the
    model is in an installed package.

    Raises:
        ConfigError: the model's argument ``code`` is damaged, as after an edit of the run's plan.
    """
    code = model.kwargs.get("code") if model.builder == BUILDER else None
    if code is None:
        return None
    if not isinstance(code, dict) or not all(isinstance(code.get(key), str) for key in CODE_KEYS):
        raise ConfigError(
            f"the plan is damaged: the argument `code` of the model {model.name} is not a folder"
            " and a digest",
            "start a new run",
        )
    return code


def read_folder(path: Path, choice: FolderChoice = AS_SAVED) -> PretrainedFolder:
    """Return the content of a Hugging Face folder, with the weights that ``choice`` selects.

    Raises:
        CheckpointError: the folder has no weights of the chosen variant, or ``config.json`` is
            damaged or unreadable.
    """
    repair = "save the folder again with model.save_pretrained(FOLDER)"
    try:
        text = read_bytes(path / CONFIG)
        config = parse_json(text, finite=False)
    except OSError as error:
        raise unknown_file.unreadable(path / CONFIG, error) from error
    except ValueError as error:
        raise unknown_file.not_json(path / CONFIG, text, f"not JSON: {error}", repair) from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path / CONFIG}: not a JSON object", repair)
    for key, value in _settings_in(config):
        if "layers" in f"{key}s" and isinstance(value, int) and value > _MOST_LAYERS:
            raise CheckpointError(
                f"{path / CONFIG}: {one_line(key)} is {value:,}, more layers than any model has",
                "correct the number: the model's library would build layers until no memory is left",
            )
    return PretrainedFolder(path, config, weights_in(path, choice.variant), choice)


def _settings_in(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the settings of a model and of each model in it, as of its text and of its vision model."""
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _settings_in(value)
        else:
            yield key, value


def weights_in(path: Path, variant: str = "") -> Path:
    """Return the path that ``find_weights`` finds in a Hugging Face folder.

    Raises:
        CheckpointError: the folder has no weights of this variant, or as for ``find_weights``.
    """
    if found := find_weights(path, variant):
        return found
    if variant and (usual := find_weights(path)):
        raise CheckpointError(
            f"{path}: has no weights of the variant {variant!r}, only {usual.name}",
            "leave --variant out",
        )
    raise no_model(path)


def index_in(path: Path) -> Path:
    """Return the index of a folder whose weights are in shards."""
    return next(file for file in _candidates(path) if file.name.endswith(_INDEX))


def find_weights(path: Path, variant: str = "") -> Path | None:
    """Return the path of a Hugging Face folder's weights; None without weights of this variant.

    The result is the file of weights. For shards, the result is the folder itself, or the index if
    the index has an unusual name. If ``config.json`` has the key ``transformers_weights``, the
    weights are those that this key names, whatever the variant.

    Raises:
        CheckpointError: ``transformers_weights`` names a missing file or an impossible one.
    """
    if (explicit := _explicit(path)) is not None:
        return path if explicit == path / f"model.safetensors.{_INDEX}" else explicit
    file = next(_candidates(path, variant), None)
    return path if file and file.name.endswith(_INDEX) else file


def _candidates(path: Path, variant: str = "") -> Iterator[Path]:
    """Yield the folder's files of weights and indexes of shards that belong to a variant.

    Files with names that the folder's library (by ``config.json``) uses come before other files.
    """
    libraries = (library_in(object_in(path / CONFIG)), *LIBRARIES)
    names = dict.fromkeys(name for each in libraries for name in each.weights_as(variant))
    return (path / name for name in names if (path / name).is_file())


def _explicit(path: Path) -> Path | None:
    """Return the file that ``config.json`` names in ``transformers_weights``; None without this key."""
    name = object_in(path / CONFIG).get(_EXPLICIT)
    if name is None:
        return None
    inside = isinstance(name, str) and "\0" not in name and ".." not in Path(name).parts
    if not inside or Path(name).is_absolute() or not name.endswith(_EXPLICIT_ENDS):
        raise CheckpointError(
            f"{path / CONFIG}: '{_EXPLICIT}' is {unknown_file.short(name)}, which is neither a safetensors file nor"
            " an index in this folder; from_pretrained fails for the same reason",
            f"correct '{_EXPLICIT}' in config.json, or remove the key, so that weighin reads"
            " model.safetensors",
        )
    file: Path = path / name
    if not file.is_file():
        raise unknown_file.broken_link(file) or CheckpointError(
            f"{path}: the weights that '{_EXPLICIT}' in {CONFIG} names are missing: {name}",
            f"put the file into the folder, or correct '{_EXPLICIT}'",
        )
    return file


def variant_of(checkpoint: Path) -> str:
    """Return the variant, such as "fp16", in the name of a file of weights or index; else empty."""
    match = _VARIANT.fullmatch(checkpoint.name)
    return (match[1] or match[2]) if match else ""


def from_pretrained_arguments(checkpoint: Path) -> dict[str, Any]:
    """Return the arguments with which ``from_pretrained`` reads this checkpoint of a folder.

    Raises:
        CheckpointError: ``from_pretrained`` would read another file of the folder, or no file.
    """
    folder, variant = folder_of(checkpoint), variant_of(checkpoint)
    arguments = {"pretrained_model_name_or_path": str(folder), "local_files_only": True}
    if gguf.is_file(checkpoint):
        return arguments | {"gguf_file": checkpoint.name}
    if (read := find_weights(folder, variant)) != checkpoint:
        raise CheckpointError(
            f"{checkpoint}: from_pretrained would not read this file, but"
            f" {read.name if read else 'no file'} in the file's folder",
            f"to load this file as the folder's weights, write its name into {CONFIG}, under the"
            f" key '{_EXPLICIT}'; to load the tensors without the model's class, give the model"
            f" from:{checkpoint}",
        )
    return arguments | ({"variant": variant} if variant else {})


def path_of(path: Path, revision: str = "") -> Path:
    """Return the path of the checkpoint that a user's path, or a model's id on the Hub, refers to.

    An id gives the snapshot that ``hub_cache.path_of`` finds. The usual index of shards gives its
    folder, unless a load of that folder reads other weights. Any other path stays as it is. The
    errors are those of ``hub_cache.path_of`` and ``find_weights``.
    """
    path = hub_cache.path_of(path, revision)
    usual = path.name.endswith(_INDEX) and any(path.name in each.weights for each in LIBRARIES)
    if not (usual and path.is_file()):
        return path
    folder = path.parent
    return folder if not is_pretrained(folder) or find_weights(folder) == folder else path
