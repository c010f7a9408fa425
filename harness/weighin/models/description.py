"""Describe the model of a Hugging Face folder or of a GGUF file as a ``ModelSpec``.

transformers decides what its model is: the class, and which weights are tied. weighin's own process
imports neither torch nor transformers, so that it asks a child, ``python -m weighin.models.description
REQUEST``, where REQUEST is JSON. The child runs the folder's code only with --trust-remote-code.
"""

import json
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from weighin import child_process, install
from weighin.cell import ModelSpec
from weighin.child_process import Parent, end_with_parent
from weighin.errors import CheckpointError, ConfigError, extra
from weighin.stream import foreign, formats, quantised
from weighin.stream import gguf_files as gguf
from weighin.stream import hugging_face_folder as hf
from weighin.stream.pretrained_library import TRANSFORMERS, WHOLE, FolderChoice, Selection
from weighin.stream.slices import Slice, are_equal
from weighin.text import few, one_line

_NAME_IT: Final = "name the class: --set model_class=CLASS (in Python: model_class='CLASS')"


def spec_of(folder: hf.PretrainedFolder, selection: Selection = WHOLE) -> ModelSpec:
    """Return the ``ModelSpec`` of a folder's model, with the class and configuration as arguments."""
    hf.refuse_adapter(folder.path)
    config, library = folder.config, folder.library
    answer: dict[str, Any] = {"architecture": library.class_in(config)}
    if library is TRANSFORMERS:
        answer = ask(folder.path, choice=asdict(folder.choice), selection=asdict(selection))
        config = {"architectures": None} | config
        dtype = answer.pop("dtype")
        if hf.dtype_of(config) is None:
            config["dtype"] = dtype
    kwargs = {"architecture": answer.pop("architecture"), "config": config, **answer}
    path = folder.path.resolve()
    return ModelSpec(foreign.hub_id(path) or path.name, library.builder, kwargs)


def ask(path: Path, **choices: dict[str, Any]) -> dict[str, Any]:
    """Ask a child for the arguments of a file's or folder's model; raise the HarnessError that it sends."""
    text = json.dumps({"path": str(path), **choices})
    command = child_process.module("weighin.models.description", text)
    answer, why = foreign.once(
        text, lambda: child_process.ask(command, child_process.environment())
    )
    if not answer:
        what = f"{path}: transformers could not be asked for the model's class"
        repair = f"install transformers again: {install.command('hf')}"
        raise CheckpointError(f"{what}: {one_line(why)}", repair)
    return child_process.fields_of(answer)


def main() -> None:
    def answer(path: str, **choices: dict[str, Any]) -> dict[str, Any]:
        if not choices:
            return described_gguf(Path(path))
        choice = FolderChoice(**choices["choice"])
        return described(hf.read_folder(Path(path), choice), Selection(**choices["selection"]))

    end_with_parent()
    Parent().answer("answer", lambda: answer(**json.loads(sys.argv[1])))


def described(folder: hf.PretrainedFolder, selection: Selection) -> dict[str, Any]:
    """Return the arguments for a folder's model, without ``config``, and the dtype of "auto"."""
    architecture, code = chosen_class(folder)
    slices = formats.read(folder.checkpoint, selection)
    dtype = hf.dtype_of(folder.config) or _dtype_in(folder, slices)
    answer: dict[str, Any] = {"architecture": architecture, "dtype": dtype}
    if code:
        answer["code"] = code
    kwargs = {"architecture": architecture, "config": folder.config, "code": code}
    with suppress(Exception, SystemExit):  # what cannot be built, no load builds, and it says why
        if (ties := _ties(kwargs, slices, dtype)) is not None:
            answer["ties"] = ties
    if found := quantised.of_folder(folder.path, folder.config, slices):
        answer["quantised"] = found.as_json()
    return answer


def _dtype_in(folder: hf.PretrainedFolder, slices: Sequence[Slice]) -> str:
    """Return the dtype of transformers if ``config.json`` names none: the index's, or the first tensor's."""
    index = folder.checkpoint
    if index == folder.path:  # shards with the usual index
        index = next(file for file in hf.candidates(index) if file.name.endswith(".index.json"))
    if index.suffix == ".json":
        metadata = foreign.read_object(index, foreign.RESAVE).get("metadata")
        named = metadata.get("dtype") if isinstance(metadata, dict) else None
        if dtype := hf.dtype_of({"dtype": named}, index):
            return dtype
    first = min((one.file.name for one in slices), default="")
    stored = [one for one in slices if one.file.name == first]
    if first.endswith(".safetensors"):
        stored.sort(key=lambda one: one.name)
    return next((one.dtype_name for one in stored if one.dtype_name in hf.MODEL_DTYPES), "float32")


def _ties(kwargs: dict[str, Any], slices: Sequence[Slice], dtype: str) -> list[list[str]] | None:
    """Return the names that share a weight in the model that ``from_pretrained`` loads; None if as the class says.

    ``from_pretrained`` ties no two weights that the file has with different values in ``dtype``.
    """
    import torch
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    from weighin.stream.bytes import mapped
    from weighin.stream.construct import build_skeleton, resolve_builder
    from weighin.stream.tensors import tied_names, untie
    from weighin.stream.transformers_reader import ties_equal_values

    def are_same(one: Slice, other: Slice) -> bool:
        if one.dtype_name == other.dtype_name:
            return are_equal(one, other)
        values = (mapped(each).to(getattr(torch, dtype)) for each in (one, other))
        return torch.equal(*values)

    model: Any = build_skeleton(resolve_builder(hf.BUILDER), kwargs, real_buffers="non_persistent")
    if not (by_class := tied_names(model)):
        return None
    mapping = get_model_conversion_mapping(model)
    renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
    converters = [one for one in mapping if isinstance(one, WeightConverter)]
    wanted = model.state_dict(keep_vars=True)
    stored: dict[str, Slice] = {}
    for each in slices:
        name, _ = rename_source_key(
            each.name, renamings, converters, model.base_model_prefix, wanted
        )
        if name not in wanted and each.name in wanted:
            name, _ = rename_source_key(each.name, [], [], model.base_model_prefix, wanted)
        stored[name] = each
    missing = wanted.keys() - stored
    for target, source in list(model.all_tied_weights_keys.items()):
        one, other = stored.get(target), stored.get(source)
        if one and other and ties_equal_values() and are_same(one, other):
            missing.add(target)
        elif one and other:
            del model.all_tied_weights_keys[target]
        elif one:
            stored[source] = one
    untie(model, ())
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    return None if (ties := tied_names(model)) == by_class else ties


def chosen_class(folder: hf.PretrainedFolder) -> tuple[str, dict[str, str] | None]:
    """Return the class of a folder's model, and the folder and digest of its code if this defines the class.

    Without ``trust_remote_code``, the folder's code may not run. The result is then transformers'
    own class for the model type, if there is one, else ConfigError.
    """
    config, choice, wanted = folder.config, folder.choice, folder.wanted
    if choice.trust_remote_code:
        for auto, reference in hf.models_in_code(config).items():
            if wanted in (auto, name := reference.rpartition(".")[2]):
                path = folder.path.absolute()
                return name, {"folder": str(path), "sha256": hf.digest(path)}
    has_code = hf.AUTO_MAP in config and not choice.model_class
    if not (has_code or re.match("Auto[A-Z]", wanted)):
        return wanted, None
    kind = config.get("model_type")
    known = _classes_of(kind)
    if wanted in known:
        named = (name for name in folder.architectures if name in known[wanted])
        return next(named, known[wanted][0]), None
    if has_code and any(wanted in classes for classes in known.values()):
        return wanted, None
    if hf.AUTO_MAP in config and not choice.trust_remote_code:
        raise ConfigError(
            f"the model of {folder.path} needs Python code of this folder ({hf.AUTO_MAP} in config.json)",
            "read the code; if you trust it, add --trust-remote-code to run it (bench, floor, predict,"
            " recommend, convert; in Python: trust_remote_code=True)",
        )
    if has_code:
        hf.auto_class(config, wanted)  # raises the error, because the code is missing
    file, shown = folder.path / hf.CONFIG, one_line(str(kind))
    what = f"{file} has the model type {shown}, for which transformers has no {one_line(wanted)}"
    if kind is None and not folder.architectures and not choice.model_class:
        what = f"{file} has neither 'architectures' nor 'model_type'"
    classes = list(dict.fromkeys(name for names in known.values() for name in names))
    raise ConfigError(what, f"{_NAME_IT}, one of {few(classes, 6)}" if classes else _NAME_IT)


def _classes_of(model_type: object) -> dict[str, tuple[str, ...]]:
    """Return the classes of transformers for a model type, by the names of its auto classes."""
    from weighin.models.pretrained import imported

    modeling_auto = imported(TRANSFORMERS).models.auto.modeling_auto
    found: dict[str, tuple[str, ...]] = {}
    for name, kind in vars(modeling_auto).items():
        mapping = getattr(kind, "_model_mapping", None) if isinstance(kind, type) else None
        if mapping is not None and isinstance(model_type, str):
            named = mapping._model_mapping.get(model_type) or ()
            classes = (named,) if isinstance(named, str) else tuple(filter(None, named))
            found |= {name.lstrip("_"): classes} if classes else {}
    return found


def described_gguf(file: Path) -> dict[str, Any]:
    """Return the arguments for a GGUF file's model, as transformers reads the metadata."""
    found = gguf.read(file)
    gguf.check_decoded(found)
    if len(parts := found.files) > 1:
        what = f"one of {len(parts)} parts of a model, but transformers reads only whole GGUF files"
        repair = f"join the parts with llama.cpp: llama-gguf-split --merge {parts[0]} JOINED.gguf"
        raise CheckpointError(f"{file}: {what}", repair)
    with extra("gguf,hf", f"{file}: a model in a GGUF file"):
        import accelerate  # noqa: F401 (from_pretrained needs it)
        import gguf as package  # noqa: F401
        import transformers
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
        what = f"{file}: transformers has no configuration for the architecture {name!r}"
        reason = one_line(f"{type(error).__name__}: {error}")
        repair = f"to list the tensors: weighin inspect {file}; to write them: weighin convert {file} FOLDER"
        raise CheckpointError(f"{what}: {reason}", repair) from error
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
