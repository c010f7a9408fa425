"""Read a Hugging Face folder: ``config.json``, and the checkpoint beside it. No function uses the network."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from weighin import foreign
from weighin.cell import ModelSpec
from weighin.errors import CheckpointError, ConfigError
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

BUILDER: Final = TRANSFORMERS.builder
CONFIG: Final = "config.json"

_BUILT_IN: Final = "weighin.models."
_INDEX: Final = "index.json"
MODEL_DTYPES: Final = ("float32", "bfloat16", "float16", "float64")
"""The dtypes in which a model can be built: those that ``torch.set_default_dtype`` accepts."""
_DEEPEST: Final = 4  # folders between a file of weights and the config.json that names the file
_EXPLICIT: Final = "transformers_weights"
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
        checkpoint: the file with the weights, or the folder itself if the weights are in shards.
    """

    path: Path
    config: dict[str, Any]
    checkpoint: Path
    choice: FolderChoice = AS_SAVED

    @property
    def architecture(self) -> str:
        """The name of the model's class, such as "LlamaForCausalLM".

        Raises:
            ConfigError: nothing names a class, or the folder's code defines the class and may not run.
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
        """Whether ``config.json`` or the user names the model's class or its type."""
        if self.library is not TRANSFORMERS:
            return True
        named = any(self.config.get(key) for key in ("architectures", "model_type", AUTO_MAP))
        return named or bool(self.choice.model_class)

    @property
    def library(self) -> Library:
        return library_in(self.config)

    @property
    def code(self) -> dict[str, str] | None:
        """The argument ``code`` of the model's builder; None if the model needs no code of the
        folder.

        Raises:
            ConfigError: the code may not run, or does not define the model's class.
        """
        name, in_code = self._class
        if not in_code:
            return None
        auto_class(self.config, name)
        return describe_code(self.path)


def dtype_of(config: Mapping[str, Any]) -> str | None:
    """Return the dtype that the content of a ``config.json`` names; None if ``config.json`` names
    no dtype.

    ``config.json`` may have a dict with a dtype for each part of the model. transformers then takes
    the dtype under the key "", else float32. Dtypes in the configurations of the parts have no
    effect.

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
        f"{file} names the dtype {unknown_file.short(name)}: no model can have this dtype, and from_pretrained fails, too",
        f"write one of {', '.join(MODEL_DTYPES)} into {CONFIG}",
    )


def is_folder(model: ModelSpec) -> bool:
    """Tell whether the model was read from a folder of transformers, diffusers or timm."""
    return bool(folder_library(model))


def folder_library(model: ModelSpec) -> str:
    """Return the library of the folder from which a model was read; "" for a model without a folder.

    The configuration of a folder always has the key with the model's class, which is null for no
    class. The configuration of a model of transformers that is built into weighin lacks this key.
    """
    library = library_of(model.builder)
    return library.name if library and library.class_key in model.kwargs["config"] else ""


def own_dtype(model: ModelSpec) -> str:
    """Return the dtype of a model's published files; float32 for a model without such files.

    The configuration of a model of transformers names this dtype. For another model that is built
    into weighin, the arguments name it. A model of diffusers or timm has float32, whatever the
    dtype of its files.
    """
    if library := library_of(model.builder):
        if library.fixed_dtype:
            return library.fixed_dtype
        return dtype_of(model.kwargs["config"]) or "float32"
    return (model.builder.startswith(_BUILT_IN) and dtype_of(model.kwargs)) or "float32"


def is_pretrained(path: Path) -> bool:
    return (path / CONFIG).is_file()


def is_pretrained_checkpoint(checkpoint: Path) -> bool:
    """Tell whether ``from_pretrained`` reads a checkpoint: in a Hugging Face folder, or a GGUF file."""
    return is_pretrained(folder_of(checkpoint)) or gguf.is_file(checkpoint)


def refuse_part(checkpoint: Path, selection: Selection) -> None:
    """Raise CheckpointError if ``selection`` chooses a part of a Hugging Face folder's weights.

    weighin compares a load with ``from_pretrained``, which always reads all weights of a folder.
    """
    if selection and is_pretrained_checkpoint(checkpoint):
        raise CheckpointError(
            f"{checkpoint}: --key and --strip-prefix do not apply to this folder: weighin compares"
            " each load with from_pretrained, which always loads a whole folder",
            "write the selected weights into a new folder, and copy config.json there: weighin"
            f" convert {checkpoint} NEW/model.safetensors {' '.join(selection.options)}",
        )


def folder_of(checkpoint: Path) -> Path:
    """Return the Hugging Face folder of a checkpoint: the path itself, or the folder of a file.

    ``folder_of`` returns a folder further up if that folder's ``config.json`` names the weights in
    ``transformers_weights``.
    """
    if checkpoint.is_dir():
        return checkpoint
    parents = [path for path in checkpoint.parents[:_DEEPEST] if is_pretrained(path)]
    named = (path for path in parents[:1] if path == checkpoint.parent or _explicit(path))
    return next(named, checkpoint.parent)


def code_of(model: ModelSpec) -> dict[str, str] | None:
    """Return the folder and the digest of the model's own Python code; None for a model of an
    installed package.

    Raises:
        ConfigError: the argument ``code`` of the model is damaged, as in a plan that was edited.
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
        CheckpointError: the folder has no weights of this variant, or ``config.json`` is damaged.
    """
    repair = "save the folder again with model.save_pretrained(FOLDER)"
    try:
        text = foreign.read_bytes(path / CONFIG)
        config = foreign.parse_json(text, finite=False)
    except OSError as error:
        raise unknown_file.unreadable(path / CONFIG, error) from error
    except ValueError as error:
        raise unknown_file.not_json(path / CONFIG, text, f"not JSON: {error}", repair) from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path / CONFIG}: not a JSON object", repair)
    return PretrainedFolder(path, config, weights_in(path, choice.variant), choice)


def weights_in(path: Path, variant: str = "") -> Path:
    """Return the checkpoint in a Hugging Face folder, as ``find_weights`` does.

    Raises:
        CheckpointError: the folder has no weights of this variant.
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
    """Return the checkpoint in a Hugging Face folder; None if the folder has no weights.

    ``find_weights`` returns the file of weights, the folder itself for shards with the usual index,
    or an index with another name. If ``config.json`` has the key ``transformers_weights``, the
    weights are the file that this key names.

    Raises:
        CheckpointError: ``config.json`` names weights that are not in the folder.
    """
    if (explicit := _explicit(path)) is not None:
        return path if explicit == path / f"model.safetensors.{_INDEX}" else explicit
    file = next(_candidates(path, variant), None)
    return path if file and file.name.endswith(_INDEX) else file


def _candidates(path: Path, variant: str = "") -> Iterator[Path]:
    """Yield the folder's files of weights and indexes in a variant.

    The names that the library in ``config.json`` uses come first.
    """
    libraries = (library_in(foreign.object_in(path / CONFIG)), *LIBRARIES)
    names = dict.fromkeys(name for each in libraries for name in each.weights_as(variant))
    return (path / name for name in names if (path / name).is_file())


def _explicit(path: Path) -> Path | None:
    """Return the file that ``config.json`` names in ``transformers_weights``; None without this key."""
    name = foreign.object_in(path / CONFIG).get(_EXPLICIT)
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
    """Return the variant in the name of a file of weights or an index: "fp16"; empty for none."""
    match = _VARIANT.fullmatch(checkpoint.name)
    return (match[1] or match[2]) if match else ""


def from_pretrained_arguments(checkpoint: Path) -> dict[str, Any]:
    """Return the arguments with which ``from_pretrained`` reads this checkpoint of a folder.

    Raises:
        CheckpointError: ``from_pretrained`` reads another file of the folder.
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
    """Return the path of a checkpoint or a folder for a typed path or a model's id on the Hub.

    ``path_of`` returns the snapshot for an id, the folder for the usual index of the folder's
    shards, and any other path unchanged. The errors are those of ``hub_cache.path_of``.
    """
    path = hub_cache.path_of(path, revision)
    usual = path.name.endswith(_INDEX) and any(path.name in each.weights for each in LIBRARIES)
    if not (usual and path.is_file()):
        return path
    folder = path.parent
    return folder if not is_pretrained(folder) or find_weights(folder) == folder else path
