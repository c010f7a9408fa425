"""Read a LoRA adapter that peft saved: two matrices and a factor for each module that it changes.

A plain adapter adds a scaled product of two matrices to some weights. This module refuses any other
adapter, because peft merges other adapters by other formulas. Which modules change, and by which
factor, is peft's decision: see ``weighin.loader.merge``. Without peft, this module reads only
adapters whose settings leave nothing to decide.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from math import nan, sqrt
from pathlib import Path
from typing import Any, Final

from weighin import formats
from weighin.cell import ModelSpec
from weighin.errors import CheckpointError, ConfigError
from weighin.formats.base import TensorSlice
from weighin.formats.foreign import read_object
from weighin.formats.pretrained_folder import adapter_of
from weighin.formats.pretrained_library import ADAPTER, ARGUMENT, TRANSFORMERS
from weighin.text import first_names, one_line, short

WEIGHTS: Final = ("adapter_model.safetensors", "adapter_model.bin")
_PREFIX: Final = "base_model.model."
_BASE: Final = ".base_layer.weight"
_NEUTRAL: Final = frozenset({
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "lora_alpha", "lora_dropout", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r",
    "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
})  # fmt: skip
"""The keys of ``adapter_config.json`` that do not change the merge, or that ``read`` respects."""
_DECIDING: Final = (
    "alpha_pattern", "exclude_modules", "layers_pattern", "layers_to_transform", "rank_pattern",
)  # fmt: skip
_PLAIN_TASKS: Final = (None, "CAUSAL_LM", "FEATURE_EXTRACTION", "SEQ_2_SEQ_LM")
"""The tasks for which peft trains no further module, such as a classifier."""
_KEY: Final = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.weight)?")


@dataclass(frozen=True, slots=True)
class Addition:
    """The change of one module's weight by an adapter: add the product of b and a, times ``scaling``.

    ``scaling`` is NaN until peft has chosen it. ``base`` is the weight before the change, if the adapter's file has this weight; else None. peft
    saves this weight for embeddings that the training changed, for example.
    """

    module: str
    a: TensorSlice
    b: TensorSlice
    scaling: float
    is_embedding: bool
    base: TensorSlice | None = None


def read(adapter: Path) -> dict[str, Addition]:
    """Return what the adapter in a folder adds to the weights, by the names of the changed modules.

    Raises:
        CheckpointError: the folder is damaged, or has no adapter of plain LoRA.
    """
    config = _config(adapter / ADAPTER)
    file = next((adapter / name for name in WEIGHTS if (adapter / name).is_file()), None)
    if file is None:
        raise CheckpointError(
            f"--adapter {adapter}: holds {ADAPTER}, but no weights: neither {' nor '.join(WEIGHTS)}",
            "give the folder that peft's save_pretrained wrote",
        )
    found: dict[tuple[str, bool], dict[str, TensorSlice]] = {}
    bases: dict[str, TensorSlice] = {}
    others = []
    for where in formats.read(file)[1]:
        name = where.name.removeprefix(_PREFIX)
        match = _KEY.fullmatch(name)
        if name.endswith(_BASE):
            bases[name.removesuffix(_BASE)] = where
        elif match is None or not where.name.startswith(_PREFIX) or len(where.shape) != 2:
            others.append(where.name)
        else:
            found.setdefault((match[1], bool(match[2])), {})[match[3]] = where
    others += [where.name for name, where in bases.items() if name not in {key for key, _ in found}]
    others += [
        f"{module}: one matrix of two" for (module, _), pair in found.items() if len(pair) < 2
    ]
    if others:
        raise _other(file, first_names(others))
    additions = {
        module: Addition(module, pair["A"], pair["B"], nan, is_embedding, bases.get(module))
        for (module, is_embedding), pair in found.items()
    }
    if find_spec("peft"):
        return additions
    scaling = _plain_scaling(adapter, config, additions)
    return {module: replace(one, scaling=scaling) for module, one in additions.items()}


def merged_into(spec: ModelSpec, adapter: Path) -> ModelSpec:
    """Return a copy of ``spec`` whose model has the adapter in a folder merged into its weights.

    Raises:
        CheckpointError: as for ``read``.
        ConfigError: ``spec`` is no model of transformers; weighin merges into no other model.
    """
    if spec.builder != TRANSFORMERS.builder:
        raise ConfigError(
            f"{spec.title} is no model of transformers, so --adapter={adapter} would be ignored",
            "leave --adapter out",
        )
    read(adapter)  # raises the error for another adapter before anything is measured
    kwargs = {**spec.kwargs, ARGUMENT: str(adapter.absolute())}
    return replace(spec, name=f"{spec.name}+{adapter.absolute().name}", kwargs=kwargs)


def files_of(spec: ModelSpec) -> list[Path]:
    """Return the files of the adapter to merge into a model; none for a model without an adapter."""
    adapter = adapter_of(spec)
    if adapter is None:
        return []
    return [file for name in (ADAPTER, *WEIGHTS) if (file := adapter / name).is_file()]


def _config(file: Path) -> Mapping[str, Any]:
    config = read_object(file, "give the folder that peft's save_pretrained wrote")
    if config.get("peft_type") != "LORA":
        raise _other(file, f"peft_type {config.get('peft_type')}")
    settings = [
        f"{key} = {value!r}"
        for key, value in config.items()
        if (key not in _NEUTRAL and value) or (key == "bias" and value != "none")
    ]
    if config.get("init_lora_weights") not in (True, False, "gaussian", None):
        settings.append(f"init_lora_weights = {config['init_lora_weights']!r}")
    if settings:
        raise _other(file, ", ".join(settings[:3]))
    return config


def _other(file: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"--adapter {file}: weighin merges plain LoRA only, and this adapter has {what}",
        "merge it with peft: PeftModel.from_pretrained(model, ADAPTER).merge_and_unload()",
    )


def _plain_scaling(
    adapter: Path, config: Mapping[str, Any], additions: Mapping[str, Addition]
) -> float:
    """Return the factor of all products; raise CheckpointError if the settings need peft."""
    chosen: Any = map(config.get, ("r", "lora_alpha", "target_modules"))
    rank, alpha, names = chosen
    is_list = isinstance(names, list) and all(isinstance(one, str) for one in names)
    is_plain = {
        "r": type(rank) is int and rank > 0,
        "lora_alpha": type(alpha) in (int, float),
        "target_modules": is_list,
        "task_type": config.get("task_type") in _PLAIN_TASKS,
        "init_lora_weights": config.get("init_lora_weights", True) in (True, "gaussian"),
    } | {key: config.get(key) in (None, [], {}, "") for key in _DECIDING}
    wrong = [f"{key} = {short(config.get(key))}" for key, value in is_plain.items() if not value]
    for module, one in additions.items() if not wrong else ():
        if one.a.shape[0] != rank or not f".{module}".endswith(tuple(f".{one}" for one in names)):
            wrong.append(f"matrices for {module} that r or target_modules do not mean")
    if wrong:
        raise CheckpointError(
            f"--adapter {adapter}: has {', '.join(wrong[:3])}: peft decides what to merge here, and is"
            " not installed",
            "pip install peft",
        )
    return float(alpha / sqrt(rank) if config.get("use_rslora") else alpha / rank)


def failed(adapter: Path | str, reason: str) -> CheckpointError:
    """Return the error for an adapter that peft cannot load into a model."""
    return CheckpointError(
        f"--adapter {adapter}: peft fails: {one_line(reason)}",
        f"correct {ADAPTER}, or give the model that the adapter was trained for",
    )


def missing(file: Path, modules: Sequence[str], model: str) -> CheckpointError:
    """Return the error for an adapter whose modules a model lacks, or has with other sizes."""
    return CheckpointError(
        f"--adapter {file}: adds to {first_names(modules)}, but this {model} has no linear layer or"
        " embedding of this name and these sizes",
        "give the model that the adapter was trained for, or merge it with peft",
    )
