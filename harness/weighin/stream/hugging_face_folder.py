"""Read a Hugging Face folder, without its code or library, and find one in the Hub's local cache::

    ~/.cache/huggingface/hub/models--owner--name/refs/main              the commit of a branch or tag
                                                /snapshots/COMMIT/...   links to ../../blobs

``weighin.models.description`` asks transformers what the model is.
"""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Any, Final

from weighin.cell import ModelSpec
from weighin.errors import CheckpointError, ConfigError
from weighin.files import MIB, json_in, object_in, parse_json, read_bytes
from weighin.stream import foreign
from weighin.stream import gguf_files as gguf
from weighin.stream.foreign import HUB_ENTRY, no_model
from weighin.stream.pretrained_library import (
    ADAPTER,
    ARGUMENT,
    AS_SAVED,
    LIBRARIES,
    TRANSFORMERS,
    FolderChoice,
    Library,
    Selection,
    library_in,
    library_of,
)
from weighin.text import few, one_line, short

BUILDER: Final = TRANSFORMERS.builder
CONFIG: Final = "config.json"
AUTO_MAP: Final = "auto_map"
"""The key that names the folder's own code: {"AutoModelForCausalLM": "modeling_x.XForCausalLM"}."""
MODEL_DTYPES: Final = ("float32", "bfloat16", "float16", "float64")
"""The dtypes in which a model can be built: those that ``torch.set_default_dtype`` accepts."""

_BASE: Final = "AutoModel"
_INDEX: Final = "index.json"
_DEEPEST: Final = 4  # folders between a file of weights and the config.json that names the file
_EXPLICIT: Final = "transformers_weights"
_RESAVE: Final = "save the folder again with model.save_pretrained(FOLDER)"
_VARIANT: Final = re.compile(
    r"(?:model|pytorch_model|diffusion_pytorch_model)\."
    r"(?:([\w-]+)\.(?:safetensors|bin)|(?:safetensors|bin)\.index\.([\w-]+)\.json)"
)


@dataclass(frozen=True, slots=True)
class PretrainedFolder:
    """A folder of transformers, diffusers or timm: its ``config.json``, and what ``find_weights`` returns."""

    path: Path
    config: dict[str, Any]
    checkpoint: Path
    choice: FolderChoice = AS_SAVED

    @property
    def library(self) -> Library:
        return library_in(self.config)

    @property
    def names_model(self) -> bool:
        named = any(self.config.get(key) for key in ("architectures", "model_type", AUTO_MAP))
        return self.library is not TRANSFORMERS or named or bool(self.choice.model_class)

    @property
    def architectures(self) -> list[str]:
        named = self.config.get("architectures")
        return [one for one in named if isinstance(one, str)] if isinstance(named, list) else []

    @property
    def wanted(self) -> str:
        """The class that the user or ``config.json`` names, or an auto class such as "AutoModel"."""
        asked = self.choice.model_class.removeprefix("transformers.")
        return asked or next(iter(self.architectures), _BASE)


def is_pretrained(path: Path) -> bool:
    return (path / CONFIG).is_file()


def read_folder(path: Path, choice: FolderChoice = AS_SAVED) -> PretrainedFolder:
    """Return a Hugging Face folder with the weights that ``choice`` selects; else CheckpointError."""
    try:
        text = read_bytes(path / CONFIG)
        config = parse_json(text, finite=False)
    except OSError as error:
        raise foreign.unreadable(path / CONFIG, error) from error
    except ValueError as error:
        raise foreign.not_json(path / CONFIG, text, f"not JSON: {error}", _RESAVE) from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path / CONFIG}: not a JSON object", _RESAVE)
    parts = [config]
    for part in parts:  # the configurations of the model's parts are inside
        parts += [value for value in part.values() if isinstance(value, dict)]
        for key, value in part.items():
            if "layers" in f"{key}s" and isinstance(value, int) and value > 100_000:
                raise CheckpointError(
                    f"{path / CONFIG}: {one_line(key)} is {value:,}, more layers than any model has",
                    "correct the number: the model's library would build layers until no memory is left",
                )
    return PretrainedFolder(path, config, weights_in(path, choice.variant), choice)


def find_weights(path: Path, variant: str = "") -> Path | None:
    """Return the file of a folder's weights, the folder itself for shards with the usual index, or None."""
    if (explicit := _explicit(path)) is not None:
        return path if explicit == path / f"model.safetensors.{_INDEX}" else explicit
    file = next(candidates(path, variant), None)
    return path if file and file.name.endswith(_INDEX) else file


def weights_in(path: Path, variant: str = "") -> Path:
    if found := find_weights(path, variant):
        return found
    if variant and (usual := find_weights(path)):
        raise CheckpointError(
            f"{path}: has no weights of the variant {variant!r}, only {usual.name}",
            "leave variant out",
        )
    raise no_model(path)


def candidates(path: Path, variant: str = "") -> Iterator[Path]:
    """Yield the files of weights and indexes in a folder, in the order in which its library looks."""
    libraries = (library_in(object_in(path / CONFIG)), *LIBRARIES)
    for name in dict.fromkeys(name for each in libraries for name in each.weights):
        stem, _, suffix = name.rpartition(".")
        file = path / (f"{stem}.{variant}.{suffix}" if variant else name)
        if file.is_file():
            yield file


def _explicit(path: Path) -> Path | None:
    """Return the file that the key ``transformers_weights`` names, or None if there is no such key."""
    name = object_in(path / CONFIG).get(_EXPLICIT)
    if name is None:
        return None
    place = Path(name if isinstance(name, str) else "")
    is_inside = not (place.is_absolute() or ".." in place.parts or "\0" in place.name)
    is_known = place.name.endswith((".safetensors", ".safetensors.index.json"))
    if is_inside and is_known and (path / place).is_file():
        return path / place
    if is_inside and is_known and (broken := foreign.broken_link(path / place)):
        raise broken
    raise CheckpointError(
        f"{path}: '{_EXPLICIT}' in {CONFIG} names {short(name)}, which is not a safetensors file or"
        " index in this folder; from_pretrained fails, too",
        f"correct '{_EXPLICIT}'; or remove this key, so that model.safetensors is read",
    )


def parts_with_weights(folder: Path) -> list[str]:
    """Return the subfolders in which a sentence-transformers folder has one part with weights each."""
    content = json_in(folder / "modules.json", MIB)
    listed = content if isinstance(content, list) else []
    places = [part.get("path") for part in listed if isinstance(part, dict)]
    inner = [*foreign.models_below(folder)] if places else []
    return [place for place in places if place in inner]


def folder_of(checkpoint: Path) -> Path:
    """Return a checkpoint's folder, or that above it whose ``config.json`` has ``transformers_weights``."""
    if checkpoint.is_dir():
        return checkpoint
    parents = [path for path in checkpoint.parents[:_DEEPEST] if is_pretrained(path)]
    named = (path for path in parents[:1] if path == checkpoint.parent or _explicit(path))
    return next(named, checkpoint.parent)


def variant_of(checkpoint: Path) -> str:
    """Return the variant, such as "fp16", in the name of a file of weights or index; else empty."""
    match = _VARIANT.fullmatch(checkpoint.name)
    return (match[1] or match[2]) if match else ""


def refuse_part(checkpoint: Path, selection: Selection) -> None:
    """Raise CheckpointError for any ``selection`` in a checkpoint that ``from_pretrained`` reads."""
    if selection and is_pretrained_checkpoint(checkpoint):
        raise CheckpointError(
            f"{checkpoint}: from_pretrained always loads this folder whole, so --key and strip_prefix"
            " cannot be used",
            "write the selected weights into a new folder, and copy config.json there: weighin"
            f" convert {checkpoint} NEW/model.safetensors {' '.join(selection.options)}",
        )


def is_pretrained_checkpoint(checkpoint: Path) -> bool:
    """Tell whether from_pretrained can read a checkpoint: GGUF, or any in a Hugging Face folder."""
    return is_pretrained(folder_of(checkpoint)) or gguf.is_file(checkpoint)


def from_pretrained_arguments(checkpoint: Path) -> dict[str, Any]:
    """Return from_pretrained's arguments for this file; CheckpointError if it would read another."""
    folder, variant = folder_of(checkpoint), variant_of(checkpoint)
    arguments = {"pretrained_model_name_or_path": str(folder), "local_files_only": True}
    if gguf.is_file(checkpoint):
        return arguments | {"gguf_file": checkpoint.name}
    if (read := find_weights(folder, variant)) != checkpoint:
        raise CheckpointError(
            f"{checkpoint}: from_pretrained would read {read.name if read else 'nothing'} in this"
            " folder, not this file",
            f"set '{_EXPLICIT}' in {CONFIG} to this file's name; or, to load the tensors without the"
            f" model's class, give from:{checkpoint} as the model",
        )
    return arguments | ({"variant": variant} if variant else {})


def dtype_of(config: Mapping[str, Any], file: Path = Path(CONFIG)) -> str | None:
    """Return the dtype that ``file`` names, or None. If it names several in a dict, the key "" counts."""
    name = config.get("dtype")
    if name is None:
        name = config.get("torch_dtype")
    if isinstance(name, dict):
        name = name.get("", "float32")
    if name is None or (isinstance(name, str) and name in MODEL_DTYPES):
        return name
    raise ConfigError(
        f"{file} names the dtype {short(name)}: no model can have this dtype, and from_pretrained fails, too",
        f"write one of {', '.join(MODEL_DTYPES)} into {CONFIG}",
    )


def own_dtype(model: ModelSpec) -> str:
    """Return the dtype in which a model was published; float32 if this is unknown."""
    if library := library_of(model.builder):
        return library.fixed_dtype or dtype_of(model.kwargs["config"]) or "float32"
    return (model.builder.startswith("weighin.models.") and dtype_of(model.kwargs)) or "float32"


def folder_library(model: ModelSpec) -> str:
    """Return the library whose folder a model was read from; "" if from no folder."""
    library = library_of(model.builder)
    # A model of transformers that is built into weighin lacks the key, which may be null.
    return library.name if library and library.class_key in model.kwargs["config"] else ""


def arguments_of(model: ModelSpec, checkpoint: Path) -> dict[str, Any] | None:
    """Return the arguments with which ``load_pretrained`` loads a model's own folder; None for other files."""
    library = folder_library(model)
    if not library or not is_pretrained_checkpoint(checkpoint):
        return None
    if gguf.is_file(checkpoint):
        return {"folder": checkpoint, "model_class": model.kwargs["architecture"]}
    arguments = {"folder": folder_of(checkpoint), "variant": variant_of(checkpoint)}
    if library == TRANSFORMERS.name:
        arguments |= {
            "model_class": model.kwargs["architecture"],
            "trust_remote_code": code_of(model) is not None,
            "adapter": model.kwargs.get(ARGUMENT, ""),
        }
    return arguments


def code_of(model: ModelSpec) -> dict[str, str] | None:
    """Return the folder and the digest of the model's own Python code; None for code of a package."""
    return planned(model, "code", {"folder": str, "sha256": str})


def planned(model: ModelSpec, name: str, types: Mapping[str, type]) -> dict[str, Any] | None:
    """Return a transformers model's argument, with the fields in ``types``; None if it lacks the argument."""
    found = model.kwargs.get(name) if model.builder == BUILDER else None
    if found is None:
        return None
    if not isinstance(found, dict) or any(type(found.get(one)) is not types[one] for one in types):
        raise ConfigError(
            f"plan.json is damaged: in the argument `{name}` of the model {model.name}, a field is"
            f" missing or has the wrong type; it needs {', '.join(types)}",
            "start a new run",
        )
    return {one: found[one] for one in types}  # a plan of an earlier version may have more


def digest(path: Path) -> str:
    """Return a digest of the names and contents of a folder's Python files, or of one file."""
    import hashlib  # hashlib loads OpenSSL, 4 MiB, which few workers need

    whole = hashlib.sha256()
    for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
        if file.is_file():
            name = file.relative_to(path).as_posix()
            whole.update(f"{name}\0{hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    return whole.hexdigest()


def models_in_code(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of ``auto_map`` for models, by their auto classes."""
    named = config.get(AUTO_MAP)
    entries = named.items() if isinstance(named, dict) else ()
    return {auto: one for auto, one in entries if auto.startswith(_BASE) and isinstance(one, str)}


def auto_class(config: Mapping[str, Any], architecture: str) -> str:
    """Return the auto class of transformers that loads a class of the folder's code; else ConfigError."""
    for auto, reference in models_in_code(config).items():
        if reference.rpartition(".")[2] == architecture:
            return auto
    raise ConfigError(
        f"'{AUTO_MAP}' in config.json has no entry for the class {architecture!r}",
        f"correct '{AUTO_MAP}' or 'architectures' in config.json",
    )


def path_of(path: Path | str, revision: str = "") -> Path:
    """Return the checkpoint that a user's path or a model's id on the Hub means; an index means its folder."""
    try:
        name, path = str(path).rstrip("/"), Path(path).expanduser()
        path.resolve().exists()
    except (OSError, RuntimeError, ValueError) as error:  # an unknown user, a NUL, too long a name
        raise foreign.unreadable(path, error) from error
    if path.name.startswith(HUB_ENTRY) and (path / "snapshots").is_dir():
        path = _snapshot_of(path, revision)
    elif not path.exists():
        with suppress(CheckpointError):  # the caller says what is missing
            path = cached_snapshot(name, revision) or path
    elif revision:
        raise ConfigError(
            f"{path}: not a model in the cache of the Hub, so the revision {revision} would be ignored",
            "leave revision out, or give the model's id: OWNER/NAME",
        )
    is_usual = path.name.endswith(_INDEX) and any(path.name in each.weights for each in LIBRARIES)
    if not (is_usual and path.is_file()):
        return path
    folder = path.parent
    return folder if not is_pretrained(folder) or find_weights(folder) == folder else path


def cached_snapshot(name: str, revision: str = "") -> Path | None:
    """Return the folder of a Hub model in the local cache; CheckpointError: it is missing; None: no Hub id."""
    if foreign.looks_like_path(name) and not Path(name).expanduser().exists():
        raise foreign.missing(name)
    if not (match := re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name)):
        return None
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    hub = Path(os.environ.get("HF_HUB_CACHE", home / "hub"))
    entry = hub / f"{HUB_ENTRY}{name.replace('/', '--')}"
    if (entry / "snapshots").is_dir():
        return _snapshot_of(entry, revision)
    if match[1] is None:  # a few old models have an id without an owner, such as "gpt2"
        return None
    raise CheckpointError(
        f"{name} is not in the Hub's cache {hub}, and weighin downloads no model",
        f"hf download {name}",
    )


def _snapshot_of(entry: Path, revision: str) -> Path:
    wanted, known = revision or "main", dict[str, str]()
    for path in sorted((entry / "refs").rglob("*")):
        if path.is_file():
            with suppress(OSError, ValueError):
                known[path.relative_to(entry / "refs").as_posix()] = path.read_text().strip()
    commits = sorted(path.name for path in (entry / "snapshots").iterdir() if path.is_dir())
    known |= {commit: commit for commit in commits if commit != "main"}
    if (commit := known.get(wanted, wanted)) in commits:
        return entry / "snapshots" / commit
    name = foreign.hub_id(entry / "snapshots" / "main")
    repair = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    if usable := [one for one in known if one not in (wanted, "main")]:
        of_python = f"(in Python: revision={usable[0]!r})"
        repair = f"--set revision={one_line(usable[0])} {of_python}, or {repair}"
    raise CheckpointError(
        f"{name}: the Hub's cache lacks the revision {one_line(wanted)} of this model; it has:"
        f" {one_line(few([*known], 5)) or 'none'}",
        repair,
    )


def adapter_of(spec: ModelSpec) -> Path | None:
    named = spec.kwargs.get(ARGUMENT) if spec.builder == BUILDER else None
    return Path(named) if named else None


def with_adapter(spec: ModelSpec, named: str) -> ModelSpec:
    """Return a copy of ``spec`` whose model has the adapter in the folder ``named`` merged; ``spec`` itself for ""."""
    if not named:
        return spec
    if spec.builder != BUILDER:
        raise ConfigError(
            f"{spec.title} is no model of transformers, so --adapter={named} would be ignored",
            "leave --adapter out",
        )
    adapter = Path(named).absolute()
    adapter_files(Path(named))  # raises before anything is measured
    kwargs = {**spec.kwargs, ARGUMENT: str(adapter)}
    return replace(spec, name=f"{spec.name}+{adapter.name}", kwargs=kwargs)


def adapter_files(adapter: Path) -> list[Path]:
    """Return the files of an adapter; CheckpointError if some are missing, which peft would ask the Hub for."""
    names = (ADAPTER, "adapter_model.safetensors", "adapter_model.bin")
    files = [file for name in names if (file := adapter / name).is_file()]
    if len(files) < 2 or files[0].name != ADAPTER:
        raise CheckpointError(
            f"--adapter {adapter}: not an adapter of peft: it needs {ADAPTER} and {names[1]}",
            "give the folder that peft's save_pretrained wrote",
        )
    return files


def files_of_adapter(spec: ModelSpec) -> list[Path]:
    return adapter_files(adapter) if (adapter := adapter_of(spec)) else []


def adapter_note(folder: Path) -> str:
    """Return a sentence on the adapter beside the model in a folder, or ""."""
    if not (folder / ADAPTER).is_file():
        return ""
    return (
        f"{folder / ADAPTER} lies beside the model: from_pretrained adds this adapter if peft is installed,"
        " and weighin reads the model alone"
    )


def refuse_adapter(folder: Path) -> None:
    """Raise CheckpointError if ``from_pretrained`` adds an adapter to the model in this folder."""
    if (note := adapter_note(folder)) and find_spec("peft"):
        file = quote(str(folder / ADAPTER))
        raise CheckpointError(
            f"{note}. peft is installed here, so the weights would differ from those of from_pretrained",
            "merge the adapter and save the result (merge_and_unload() of peft, then"
            f" save_pretrained(FOLDER)); or, for the model alone, set it aside: mv {file} {file}.off",
        )
