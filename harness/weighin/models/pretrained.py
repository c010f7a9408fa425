"""Build a model of the transformers library from its configuration, as ``from_pretrained`` does."""

import contextlib
import json
import os
import re
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weighin import install
from weighin.errors import CheckpointError, ConfigError, HarnessError, extra
from weighin.stream import hugging_face_folder
from weighin.stream.foreign import misfit
from weighin.stream.hugging_face_folder import AUTO_MAP, CONFIG
from weighin.stream.pretrained_library import (
    ADAPTER,
    ARGUMENT,
    DIFFUSERS,
    TRANSFORMERS,
    Library,
    module_in_pipelines,
)
from weighin.stream.quantised import dequantising
from weighin.stream.tensors import storage_key, untie
from weighin.text import one_line


def from_config(
    architecture: str,
    config: Mapping[str, Any],
    code: Mapping[str, str] | None = None,
    ties: Sequence[Sequence[str]] | None = None,
    **_: object,  # load_pretrained dequantises and merges
) -> torch.nn.Module:
    """Return the model in evaluation mode, in torch's default dtype, and with the constructor's dtypes of buffers.

    ``code`` is the folder with the class's code and its digest, if the class is not in transformers.
    ``ties`` are the names that share a weight, where the files untie some that the class ties.
    """
    kind = pretrained_class(architecture, code, config)
    hugging_face_folder.dtype_of(config)  # raises for a dtype that transformers cannot read
    dtype = torch.get_default_dtype()
    model = kind._from_config(_settings(kind, config), dtype=dtype)
    if ties is not None:
        untie(model, ties)
    _keep_in_float32(model, dtype)
    if dtype != torch.float32:  # from_pretrained computes what no checkpoint has in float32
        computed = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
        state = model.state_dict(keep_vars=True).items()
        kept = [one for name, one in state if not any(re.search(each, name) for each in computed)]
        _initialise(model, kept)
    model.keeps_dtypes = True
    model.eval()
    return cast(torch.nn.Module, model)


def _settings(kind: Any, config: Mapping[str, Any]) -> Any:
    """Return a class's configuration object, from ``config.json`` or its part for the class."""
    with tempfile.TemporaryDirectory(prefix="weighin-") as folder:
        # Names of other files, of which this folder has none.
        plain = {key: value for key, value in config.items() if key != "configuration_files"}
        (Path(folder) / CONFIG).write_text(json.dumps(plain))
        return kind.config_class.from_pretrained(folder, local_files_only=True)


def pretrained_class(
    architecture: str,
    code: Mapping[str, str] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Any:
    """Return the model class ``architecture``: of a folder's ``code``, if it has any, else of transformers or diffusers."""
    transformers = imported(TRANSFORMERS)
    if code:
        return _class_in(code, architecture, config or {})
    with importing(TRANSFORMERS):
        kind = getattr(transformers, architecture, None)
        base = transformers.PreTrainedModel
    if kind is None and find_spec(DIFFUSERS.name):
        with importing(DIFFUSERS):
            kind = class_of_pipelines(architecture)  # for example StableDiffusionSafetyChecker
    if not isinstance(kind, type) or not issubclass(kind, base):
        raise ConfigError(
            f"transformers {transformers.__version__} has no model class {architecture!r}",
            "install the version in config.json's transformers_version, or a newer one",
        )
    return kind


def class_of_pipelines(name: str) -> Any:
    """Return a class in a module of diffusers' pipelines, such as ``StableDiffusionSafetyChecker``, or None."""
    imported(DIFFUSERS)
    module = module_in_pipelines(name)
    return getattr(import_module(module), name) if module else None


def imported(library: Library) -> Any:
    """Import a library. In a process that weighin started, switch off its network access and its log."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    is_own_process = spec is not None and spec.name.partition(".")[0] == "weighin"
    if is_own_process:
        os.environ["HF_HUB_OFFLINE"] = "1"  # huggingface_hub reads it at its import
    with importing(library):
        package: Any = import_module(library.name)
    if is_own_process and library in (TRANSFORMERS, DIFFUSERS):
        package.utils.logging.set_verbosity_error()
        package.utils.logging.disable_progress_bar()
    return package


@contextlib.contextmanager
def importing(library: Library) -> Iterator[None]:
    """Turn a failed import into our error: a package is missing, or doesn't fit another one."""
    try:
        yield
    except (ImportError, RuntimeError) as error:
        first: BaseException = error
        while (earlier := first.__cause__ or first.__context__) is not None:
            first = earlier
        repair = install.command(library.extra)
        if "torchvision" in str(first):  # such as an operator that another build did not define
            repair = "install the torchvision that was built for this torch, or remove it: pip uninstall torchvision"
        what = f"this model needs the package {library.name}, which cannot be imported"
        reason = one_line(f"{type(first).__name__}: {first}")
        raise ConfigError(f"{what}: {reason}", repair) from error


@contextlib.contextmanager
def says(what: str, repair: str) -> Iterator[None]:
    """Turn an error of a library into ours, which quotes the library."""
    try:
        yield
    except (HarnessError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if isinstance(error, ImportError):
            repair = "install the packages that the library names"
        reason = f"{type(error).__name__}: {one_line(str(error))}"
        raise CheckpointError(f"{what} fails: {reason}", repair) from error


def reference(
    kwargs: Mapping[str, Any], checkpoint: Path, dtype: torch.dtype | str, **options: Any
) -> tuple[torch.nn.Module, list[str]]:
    """Return the model that ``from_pretrained`` loads, and the names of weights that the checkpoint lacks."""
    kind = pretrained_class(kwargs["architecture"], kwargs.get("code"), kwargs.get("config"))
    arguments = hugging_face_folder.from_pretrained_arguments(checkpoint)
    repair = (
        "install another version of transformers, or correct config.json; or load the tensors without"
        f" the model's class: --model from:{checkpoint}"
    )
    arguments |= {"ignore_mismatched_sizes": True, "output_loading_info": True}
    with says(f"{checkpoint}: {kind.__name__}.from_pretrained", repair):
        arguments |= arguments_to_dequantise(checkpoint)
        model, info = kind.from_pretrained(**arguments, dtype=dtype, **options)
    if mismatched := sorted(str(name) for name, *_ in info["mismatched_keys"]):
        raise misfit(checkpoint, kind.__name__, {"of another shape": mismatched})
    if adapter := kwargs.get(ARGUMENT):
        model = merged(model, adapter)
    return model, sorted(info["missing_keys"])


def arguments_to_dequantise(checkpoint: Path) -> dict[str, Any]:
    """Return the arguments with which ``from_pretrained`` dequantises on every device, if it can."""
    if not (named := dequantising(hugging_face_folder.folder_of(checkpoint))):
        return {}
    auto: Any = import_module("transformers.quantizers.auto")
    return {"quantization_config": auto.AutoQuantizationConfig.from_dict(named)}


def merged(model: Any, adapter: Path | str) -> Any:
    """Let peft merge the adapter in the folder ``adapter`` into ``model``, and return the result."""
    hugging_face_folder.adapter_files(Path(adapter))
    what = f"--adapter {adapter}: peft"
    repair = f"correct {ADAPTER}, or give the model for which the adapter was trained"
    with extra("hf", f"--adapter {adapter}"):
        from peft import PeftModel
    with says(what, repair), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loaded = PeftModel.from_pretrained(model, str(adapter))
        made = loaded.merge_and_unload()
    drawn = getattr(loaded.active_peft_config, "init_lora_weights", True) in (False, "orthogonal")
    for text in (str(one.message) for one in said):
        pairs = Counter(name.split(".lora_")[0] for name in re.findall(r"'([^']+)'", text))
        if "missing adapter keys" in text and (drawn or 1 in pairs.values()):
            reason = f"the file lacks matrices: {one_line(text)}"
            raise CheckpointError(f"{what} fails: {reason}", repair)
    return made


def _class_in(code: Mapping[str, str], architecture: str, config: Mapping[str, Any]) -> Any:
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    folder = Path(code["folder"])
    if hugging_face_folder.digest(folder) != code["sha256"]:
        what = f"{folder}: the model's code changed after this run began"
        repair = "restore the code with which the run began, or start a new run"
        raise ConfigError(what, repair)
    named = str(config[AUTO_MAP][hugging_face_folder.auto_class(config, architecture)])
    reference = named.rpartition("--")[2]  # after a repository's name
    file = folder / f"{reference.partition('.')[0]}.py"
    if not re.fullmatch(r"\w+\.\w+", reference) or not file.is_file():
        raise ConfigError(
            f"{folder}: '{AUTO_MAP}' in config.json names the model's class {one_line(named, 80)!r},"
            " but this folder lacks its module",
            "add the module, and those that it imports, to the folder; weighin does not download them",
        )
    try:
        return get_class_from_dynamic_module(reference, str(folder), local_files_only=True)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ConfigError(
            f"{folder}: the model's code cannot be imported: {error}",
            "install the packages that the code imports, or the version of transformers for which"
            " the code was written (transformers_version in config.json)",
        ) from error


def import_class(kwargs: Mapping[str, Any]) -> None:
    """Import the class that ``from_config`` builds, so that no later phase of a load imports it."""
    pretrained_class(kwargs["architecture"], kwargs.get("code"), kwargs["config"])
    if kwargs.get(ARGUMENT):
        with contextlib.suppress(Exception):  # the merge says why
            import_module("peft")


def written_after_load(model: Any) -> set[str]:
    """Return the tensors that ``from_pretrained`` changes after the load (a padding token's row)."""
    tensors = model.state_dict(keep_vars=True)
    writes = _Writes({storage_key(tensor) for tensor in tensors.values()})
    with torch.random.fork_rng(devices=[]), writes:
        _initialise(model, [*model.parameters(), *model.buffers()])
    return {name for name, tensor in tensors.items() if storage_key(tensor) in writes.written}


class _Writes(TorchDispatchMode):
    """Skips each operation that would write to one of ``storages``, and records that storage."""

    def __init__(self, storages: set[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[Any] = set()
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            key = storage_key(args[0])
            if key in self._storages:
                self.written.add(key)
                return args[0]
        return func(*args, **(kwargs or {}))


def _initialise(model: Any, loaded: Sequence[torch.Tensor]) -> None:
    """Let transformers initialise each module in float32, as after a load of ``loaded``, by its own flag."""
    flag = "_is_hf_initialized"  # transformers sets this attribute
    for tensor in loaded:
        setattr(tensor, flag, True)
    for module in model.modules():
        module.__dict__.pop(flag, None)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        model.initialize_weights()
    finally:
        torch.set_default_dtype(dtype)
        for tensor in loaded:
            tensor.__dict__.pop(flag, None)


def _keep_in_float32(model: Any, dtype: torch.dtype) -> None:
    """Set float32 for the tensors that the class keeps in it, before they have values."""
    from transformers.core_model_loading import build_glob_alternation

    before_5_1 = not hasattr(model, "_get_dtype_plan")
    plan = model.dtype_plan if before_5_1 else model._get_dtype_plan(dtype)
    if not plan:  # an empty pattern would match every name
        return
    pattern, names, _ = build_glob_alternation(list(plan))
    for name, tensor in model.state_dict(keep_vars=True).items():
        if match := pattern.search(name):
            kept = plan[names[match.lastgroup or ""]]
            if kept != tensor.dtype:
                tensor.data = torch.empty_like(tensor.data, dtype=kept)


def example_inputs(
    architecture: str, config: Mapping[str, Any], code: Mapping[str, str] | None = None, **_: object
) -> dict[str, torch.Tensor] | None:
    """Return small inputs for one forward pass; None unless these are text, sound or images."""
    kind = pretrained_class(architecture, code, config)
    settings = _settings(kind, config)
    name = kind.main_input_name
    inputs: dict[str, torch.Tensor] = {}
    if name == "input_ids":
        of_text = getattr(settings, "get_text_config", lambda: settings)()  # since 4.45
        words = getattr(of_text, "vocab_size", 2)
        inputs[name] = torch.arange(1, 9).unsqueeze(0) % max(2, words)
    elif name == "input_values":
        inputs[name] = torch.linspace(-1, 1, 16_000).unsqueeze(0)  # one second of sound
    elif name == "input_features" and hasattr(settings, "num_mel_bins"):
        frames = 2 * getattr(settings, "max_source_positions", 1500)
        inputs[name] = torch.zeros(1, settings.num_mel_bins, frames)
    elif name != "pixel_values":
        return None
    sees = hasattr(kind, "get_text_features") and hasattr(kind, "get_image_features")
    if sees or name == "pixel_values":
        vision = getattr(settings, "vision_config", settings)
        size, channels = getattr(vision, "image_size", 224), getattr(vision, "num_channels", 3)
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        inputs["pixel_values"] = torch.zeros(1, channels, height, width)
    if getattr(settings, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = torch.ones(1, 2, dtype=torch.long)
    return inputs
