"""Describe the model of a Hugging Face folder or of a GGUF file as a ``ModelSpec``.

``config.json`` mostly names the model's class. If transformers has to choose the class, and for a GGUF
file, weighin asks a child process, because its own process imports neither torch nor transformers. The
child, ``python -m weighin.models.description REQUEST``, runs no code of the folder. REQUEST is JSON: the
path, and the user's choices in a folder. The child sends one event: ``answer``, or ``error`` with
type, message and repair.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from typing import Any, Final

from weighin import child_process, install
from weighin.cell import ModelSpec
from weighin.child_process import Parent, end_with_parent
from weighin.errors import CheckpointError, ConfigError, HarnessError
from weighin.stream import formats, quantised
from weighin.stream import gguf_files as gguf
from weighin.stream.foreign import RESAVE, read_object
from weighin.stream.hub_cache import name_of
from weighin.stream.pretrained_folder import (
    AUTO_MAP,
    BUILDER,
    CODE_IS_REFUSED,
    CONFIG,
    MODEL_DTYPES,
    PretrainedFolder,
    auto_class,
    checked_dtype,
    digest,
    dtype_of,
    index_in,
    read_folder,
    refuse_adapter,
)
from weighin.stream.pretrained_library import WHOLE, FolderChoice, Selection
from weighin.stream.slices import Slice, are_equal
from weighin.text import few, one_line

_NUMBERED: Final = re.compile(r"\.\d+\.")
_NAME_IT: Final = "name the class: --set model_class=CLASS (in Python: model_class='CLASS')"


def spec_of(folder: PretrainedFolder, selection: Selection = WHOLE) -> ModelSpec:
    """Return the ``ModelSpec`` of a folder's model, with the class and configuration as arguments."""
    refuse_adapter(folder.path)
    if (kind := folder.named_class) is None:
        answer = _ask({"path": str(folder.path), "choice": asdict(folder.choice)})
        kind = answer["architecture"], answer["in_code"]
    architecture, in_code = kind
    kwargs: dict[str, Any] = {"architecture": architecture, "config": folder.config}
    if not folder.library.fixed_dtype:
        config = kwargs["config"] = {"architectures": None} | folder.config
        if dtype_of(config) is None:
            config["dtype"] = auto_dtype(folder, selection)
        if in_code:
            auto_class(config, architecture)  # raises ConfigError if there is no code of this class
            path = folder.path.absolute()
            kwargs["code"] = {"folder": str(path), "sha256": digest(path)}
        slices = formats.read(folder.checkpoint, selection)
        if apart := _kept_apart(config, slices):
            kwargs["apart"] = apart
        if found := quantised.of_folder(folder.path, folder.config, slices):
            kwargs["quantised"] = found.as_json()
    return ModelSpec(name_of(folder.path.resolve()), folder.library.builder, kwargs)


def spec_of_gguf(file: Path) -> ModelSpec:
    """Return the ``ModelSpec`` of a GGUF file, like that of a Hugging Face folder."""
    answer = _ask({"path": str(file), "choice": None})
    return ModelSpec(file.stem, BUILDER, answer)


def _kept_apart(config: Mapping[str, Any], slices: Sequence[Slice]) -> list[tuple[str, str]]:
    """Return the pairs of tensors that the model's class may tie, but that differ in the files.

    ``from_pretrained`` does not tie an output head to the embedding if the file has different
    values for the two. ``_kept_apart`` compares the matrices of equal shape that have a row for each
    token of the vocabulary, but no two matrices of numbered layers; only where the class ties two of
    them, the model's builder unties them.
    """
    parts = [config, *(value for value in config.values() if isinstance(value, Mapping))]
    if not any(part.get("tie_word_embeddings", True) for part in parts):
        return []
    sizes = {
        value
        for part in parts
        for key, value in part.items()
        if "vocab_size" in key and isinstance(value, int)
    }
    if not sizes:  # config.json may leave a usual size out
        sizes = {max((one.shape[0] for one in slices if len(one.shape) > 1), default=0)}
    rows = [one for one in slices if one.nbytes and one.shape and one.shape[0] in sizes]
    return [
        (one.name, other.name)
        for one, other in combinations(rows, 2)
        if one.shape == other.shape
        and not (_NUMBERED.search(one.name) and _NUMBERED.search(other.name))
        and not are_equal(one, other)
    ]


def auto_dtype(folder: PretrainedFolder, selection: Selection = WHOLE) -> str:
    """Return the dtype of the model that ``from_pretrained(dtype="auto")`` builds.

    ``auto`` means the first of these dtypes that exists: the library's fixed dtype; the dtype in
    ``config.json``; the dtype in the index of shards; that of the first floating-point tensor in
    the first file of weights (of a safetensors file, the first by name); float32.
    """
    if named := folder.library.fixed_dtype or dtype_of(folder.config):
        return named
    index = index_in(folder.path) if folder.checkpoint == folder.path else folder.checkpoint
    if index.suffix == ".json":
        metadata = read_object(index, RESAVE).get("metadata")
        if isinstance(metadata, dict) and "dtype" in metadata:
            return checked_dtype(metadata["dtype"], index)
    slices = formats.read(folder.checkpoint, selection)
    first = min((one.file.name for one in slices), default="")
    stored = [one for one in slices if one.file.name == first]
    if first.endswith(".safetensors"):
        stored.sort(key=lambda one: one.name)
    return next((one.dtype_name for one in stored if one.dtype_name in MODEL_DTYPES), "float32")


def _ask(request: dict[str, Any]) -> dict[str, Any]:
    """Return the answer of a child process; raise the HarnessError that it sends."""
    command = child_process.module("weighin.models.description", json.dumps(request))
    answer, why = child_process.ask(command, child_process.environment())
    if not answer:
        raise CheckpointError(
            f"{request['path']}: the process that asks transformers for the model's class failed:"
            f" {one_line(why)}",
            f"install transformers again: {install.command('hf')}",
        )
    if answer.pop("event") == "error":
        kind = ConfigError if answer["type"] == ConfigError.__name__ else CheckpointError
        raise kind(answer["message"], answer["repair"])
    return answer


def main() -> None:
    """Answer the request in the argument."""
    end_with_parent()
    parent = Parent()
    request = json.loads(sys.argv[1])
    path, choice = Path(request["path"]), request["choice"]
    try:
        if choice is None:
            parent.send("answer", **described_gguf(path))
        else:
            name, in_code = chosen_class(read_folder(path, FolderChoice(**choice)))
            parent.send("answer", architecture=name, in_code=in_code)
    except HarnessError as error:
        kind = type(error).__name__
        parent.send("error", type=kind, message=error.message, repair=error.repair)


def chosen_class(folder: PretrainedFolder) -> tuple[str, bool]:
    """Return the class that transformers chooses for a folder's model, and whether the folder's code
    defines the class. This function imports transformers.

    Without ``trust_remote_code``, the folder's code may not run. The result is then transformers'
    own class for the model type, if there is one, else ConfigError.
    """
    config, choice, wanted, names = (
        folder.config,
        folder.choice,
        folder.wanted,
        folder.architectures,
    )
    known = _classes_of(config.get("model_type"))
    if wanted in known:
        return next((name for name in names if name in known[wanted]), known[wanted][0]), False
    if names and not choice.model_class:
        if any(wanted in classes for classes in known.values()):
            return wanted, False
        if choice.trust_remote_code:
            return wanted, True  # the caller raises the error, because the code is missing
    if AUTO_MAP in config and not choice.trust_remote_code:
        raise ConfigError(
            f"the model of {folder.path} needs the Python code in this folder ({AUTO_MAP} in config.json)",
            CODE_IS_REFUSED,
        )
    kind, file = config.get("model_type"), folder.path / CONFIG
    what = f"{file} names no class in 'architectures'"
    if choice.model_class:
        what = f"transformers has no {one_line(wanted)} for the model type {one_line(str(kind))}"
    elif kind is None:
        raise ConfigError(f"{file} names neither 'architectures' nor 'model_type'", _NAME_IT)
    if not known:
        raise ConfigError(
            f"{what}, and transformers has no model type {one_line(str(kind))}",
            f"{_NAME_IT}; or save the folder again with model.save_pretrained(FOLDER)",
        )
    classes = list(dict.fromkeys(name for names in known.values() for name in names))
    raise ConfigError(what, f"{_NAME_IT}, one of {few(classes, 6)}")


def _classes_of(model_type: object) -> dict[str, tuple[str, ...]]:
    """Return the classes of transformers for a model type, by the names of its auto classes."""
    try:
        from transformers.models.auto import modeling_auto
    except ImportError as error:
        raise ConfigError(
            f"the package transformers, which chooses the model's class, cannot be imported: {error}",
            install.command("hf"),
        ) from None
    found: dict[str, tuple[str, ...]] = {}
    for name, kind in vars(modeling_auto).items():
        mapping = getattr(kind, "_model_mapping", None) if isinstance(kind, type) else None
        if mapping is not None and isinstance(model_type, str):
            named = mapping._model_mapping.get(model_type) or ()
            classes = (named,) if isinstance(named, str) else tuple(filter(None, named))
            found |= {name.lstrip("_"): classes} if classes else {}
    return found


def described_gguf(file: Path) -> dict[str, Any]:
    """Return the builder's arguments for the model in a GGUF file: the class, and the configuration
    that transformers makes of the file's metadata. This function imports transformers.
    """
    found = gguf.read(file)
    gguf.check_decoded(found)
    if len(parts := found.files) > 1:
        raise CheckpointError(
            f"{file}: one of {len(parts)} parts of a model; transformers reads only whole GGUF"
            " files",
            f"join the parts with llama.cpp: llama-gguf-split --merge {parts[0]} JOINED.gguf",
        )
    try:
        import accelerate  # noqa: F401 (from_pretrained needs it)
        import gguf as package  # noqa: F401
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"{file}: a model in a GGUF file needs the package {error.name}, which is not installed",
            install.command("gguf", "hf"),
        ) from None

    name = gguf.architecture(file)
    try:
        config = transformers.AutoConfig.from_pretrained(
            file.parent, gguf_file=file.name, local_files_only=True
        )
        known = _classes_of(config.model_type)
        autos = ("AutoModelForCausalLM", "AutoModelForSeq2SeqLM", "AutoModel")
        named = config.architectures or [one for auto in autos for one in known.get(auto, ())]
        architecture = str(named[0])  # LookupError: no AutoModel has a class for this type
    except (AttributeError, LookupError, NotImplementedError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{file}: transformers has no configuration for the architecture {name!r}:"
            f" {one_line(f'{type(error).__name__}: {error}')}",
            f"list its tensors: weighin inspect {file}; write their values: weighin convert {file} FOLDER",
        ) from error
    dtype = "float32"  # torch's default dtype
    with suppress(ImportError):  # since 5.20, transformers reads some architectures in other code
        from transformers.integrations.gguf.reader import GgufHeader
        from transformers.integrations.gguf.utils import is_gguf_arch_supported

        if is_gguf_arch_supported(name):
            own = GgufHeader.from_file(str(file)).dtype
            dtype = str(own or "torch.float32").removeprefix("torch.")
    content = json.loads(config.to_json_string(use_diff=False))
    content |= {"architectures": [architecture], "dtype": dtype}
    return {"architecture": architecture, "config": content}


if __name__ == "__main__":
    main()
