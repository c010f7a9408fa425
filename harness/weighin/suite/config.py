"""Read and validate the YAML files of suites and models.

An error names the file and the key. For an unknown key, the error also names the most similar valid
key.
"""

import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictInt,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import ErrorDetails

from weighin.cell import ModelSpec
from weighin.errors import ConfigError
from weighin.suite.yaml_file import read_mapping
from weighin.units import MIB, format_exact, parse_bytes, parse_rate, parse_seconds
from weighin.uses import FORWARD

DEFAULT_STRATEGIES = (
    "baseline",
    "sequential",
    "meta_copy",
    "mmap_assign",
    "per_param",
    "streaming",
)

DEFAULT_SAVING = ("torch_save", "per_param", "per_module", "sharded", "safetensors", "dcp")


DTYPES = {
    "float32": "float32",
    "fp32": "float32",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
}
"""The dtypes that a load may give floating-point tensors, by the names that a user may write."""


def _as_dtype(value: object) -> object:
    return DTYPES.get(value, value) if isinstance(value, str) else value


def as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _read(parse: Callable[[str], int], value: object) -> object:
    """Read a limit, rate or latency: a number, a text for ``parse``, or "none" (no limit)."""
    if isinstance(value, str) and value.lower() == "none":
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        return value
    try:
        return parse(str(value))
    except ConfigError as error:
        raise ValueError(error.message, error.repair) from None


def _as_environment(value: object) -> object:
    items = value.items() if isinstance(value, dict) else [(value, None)]
    for name, content in items:
        if complaint := _complaint_of_variable(name, content):
            raise ValueError(*complaint)
    return {name: str(content) for name, content in items}


def _complaint_of_variable(name: object, content: object) -> tuple[str, str] | None:
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
        return f"{name!r} is not the name of a variable", "write the variables as in"
        " {MALLOC_ARENA_MAX: 2}"
    if name in _SET_BY_US or name.startswith("WEIGHIN_"):
        return f"weighin sets {name} itself", f"leave {name} out"
    if isinstance(content, bool) or not isinstance(content, str | int | float):
        return f"the value of {name} is {content!r}, not a text", "write the value in quotes"
    return (
        (f"the value of {name} contains a NUL", f"leave {name} out")
        if "\0" in str(content)
        else None
    )


def _as_device(value: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:\d+)?", value):
        raise ValueError(f"{value!r} is not a device", "write cpu, cuda or cuda:1")
    return value


def _as_builder(value: str) -> str:
    if not re.fullmatch(r"[\w.]+:\w+", value):
        raise ValueError(f"{value!r} is not a builder", "write package.module:function")
    return value


MOST_RANKS = 64
LEAST_RAM = 64 * MIB
"""Less than `import torch` alone needs on any machine: the CPU build takes more than 100 MiB."""
_Dtype = Literal["auto", "float32", "bfloat16", "float16"]
_Kind = TypeVar("_Kind", bound=BaseModel)
_SET_BY_US = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "HOME")
Environment = Annotated[dict[str, str], BeforeValidator(_as_environment)]
Limit = Annotated[StrictInt | None, BeforeValidator(partial(_read, parse_bytes))]


def _check_ram(value: int | None) -> int | None:
    """Refuse a limit below ``LEAST_RAM``, under which no load works; often it lacks a unit."""
    if value is None or value >= LEAST_RAM:
        return value
    repair = "give at least 64MiB plus the size of the weights"
    if value < 1024:  # a size without its unit
        repair = f"did you mean {value}g?"
    raise ValueError(f"{format_exact(value)} is less than `import torch` alone needs", repair)


_Rate = Annotated[StrictInt | None, BeforeValidator(partial(_read, parse_rate))]
_Latency = Annotated[StrictInt | None, BeforeValidator(partial(_read, parse_seconds))]
_Ram = Annotated[Limit, AfterValidator(_check_ram)]


class Strict(BaseModel):
    """Base class of the pydantic models for YAML files: an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)


class _ModelFile(Strict):
    name: str
    builder: Annotated[str, AfterValidator(_as_builder)]
    kwargs: dict[str, Any] = {}
    description: str = ""


class SuiteStrategy(Strict):
    """One strategy of a suite, with its options."""

    name: str
    """A name of `weighin list strategies`, or the path of a file, such as `./mine.py`."""
    options: dict[str, Any] = {}
    """The options of the strategy, as its file declares them."""


class SuiteModel(Strict):
    """One model of a suite: a name, or a folder, a builder or a checkpoint of the user's own."""

    name: str = ""
    """The name of the model in reports. Without `builder` and `folder`, a model as on the command line: `gpt2-medium`."""
    builder: str = ""
    """The function that returns the model: `mypackage.nets:build`, or `path/nets.py:build`."""
    kwargs: dict[str, Any] = {}
    """The arguments of the builder."""
    checkpoint: str = ""
    """The file or folder with the model's weights. Without this key, weighin generates random weights. Without `builder` and `name`, the model consists of the tensors in the checkpoint."""
    key: str = ""
    """The key of the weights in a checkpoint that also holds other data, as `--key`: `model`, `state.net`."""
    strip_prefix: str = ""
    """The prefix that each name in the checkpoint has before the model's name, as `--strip-prefix`: `module.`."""
    folder: str = ""
    """A Hugging Face folder, in place of `builder`, `kwargs` and `checkpoint`."""
    adapter: str = ""
    """A folder with an adapter of LoRA to merge into the model, as `--adapter`."""
    dtype: Annotated[_Dtype | None, BeforeValidator(_as_dtype)] = None
    """The dtype of this model after a load. Default: the suite's `dtype`."""

    @property
    def source(self) -> str:
        """The model as a user types it on a command line."""
        if self.builder or self.folder:
            return self.builder or self.folder
        return self.name or f"from:{self.checkpoint}"

    @property
    def title(self) -> str:
        """The name of the model in a report, or in the name of a run's folder."""
        return self.name or self.source


def _by_name(value: object) -> object:
    """Read a list of mappings; replace an entry that is no mapping, but a name, by {"name": entry}."""
    return [
        item if isinstance(item, dict | BaseModel) else {"name": item} for item in as_list(value)
    ]


def _check_model(model: SuiteModel) -> SuiteModel:
    if not (model.name or model.builder or model.folder or model.checkpoint):
        raise ValueError(
            "a model of the suite has no name, builder, folder or checkpoint", "add one of them"
        )
    if model.builder and ":" not in model.builder:
        raise ValueError(
            f"{model.builder!r} is not a builder",
            "write package.module:function or file.py:function",
        )
    if model.folder and (model.builder or model.kwargs or model.checkpoint):
        raise ValueError(
            f"the folder {model.folder} already determines the model's code and weights",
            "leave builder, kwargs and checkpoint out",
        )
    return model


def _check_cache(value: str, info: ValidationInfo) -> str:
    if value == "warm" and info.data.get("operation") == "save":
        raise ValueError(
            "warm does not apply to a save, because a save reads no checkpoint", "leave cache out"
        )
    return value


def _check_uses(value: list[str], info: ValidationInfo) -> list[str]:
    if value != [FORWARD] and info.data.get("operation") == "save":
        raise ValueError("weighin runs no use of the model after a save", "leave the use out")
    return value


def _check_passes(value: int, info: ValidationInfo) -> int:
    if value > 1 and info.data.get("operation") == "save":
        raise ValueError("weighin runs no forward pass after a save", "leave passes out")
    if value < 1:
        raise ValueError(
            "0 forward passes mean no use of the model", "write --use none (in a suite, uses: none)"
        )
    if value > 1 and FORWARD not in info.data.get("uses", [FORWARD]):
        raise ValueError(
            "passes applies to the use forward, which is not among the uses", "leave passes out"
        )
    return value


def _as_number(value: object) -> object:
    return int(value) if isinstance(value, str) and value.strip().isdigit() else value


def _check_ranks(value: list[int], info: ValidationInfo) -> list[int]:
    if max(value) > 1 and info.data.get("operation") == "save":
        raise ValueError("a save runs in one process", "leave ranks out")
    return value


def _check_disk(value: list[int | None], info: ValidationInfo) -> list[int | None]:
    """Refuse a slow disk for a save, and for a warm load, which reads only the page cache."""
    if all(each is None for each in value):
        return value
    if info.data.get("operation") == "save":
        raise ValueError(
            "weighin slows the disk down only for a load, not for a save",
            "leave out disk and disk_latency",
        )
    if info.data.get("cache") == "warm":
        raise ValueError(
            "a warm load reads the page cache, so that the speed of the disk does not matter",
            "leave out cache, or disk and disk_latency",
        )
    return value


def _default_strategies(operation: str) -> list[SuiteStrategy]:
    names = DEFAULT_SAVING if operation == "save" else DEFAULT_STRATEGIES
    return [SuiteStrategy(name=name) for name in names]


class Suite(Strict):
    """A matrix of measurements (cells): each model x limit x strategy x ..., ``repeats`` times."""

    models: Annotated[
        list[Annotated[SuiteModel, AfterValidator(_check_model)]],
        BeforeValidator(_by_name),
        Field(min_length=1),
    ]
    """Names of `weighin list models`, paths of Hugging Face folders or of checkpoints, `from:PATH`, builders, or mappings with the keys of a model."""
    operation: Literal["load", "save"] = "load"
    """Whether the strategies load a checkpoint or save one."""
    strategies: Annotated[list[SuiteStrategy], BeforeValidator(_by_name)] = Field(
        default_factory=lambda known: _default_strategies(known.get("operation", "load")),
        min_length=1,
    )
    """Names of `weighin list strategies`, paths of files (`./mine.py`), `all`, or mappings with the keys of a strategy."""
    ram: Annotated[list[_Ram], BeforeValidator(as_list), Field(min_length=1)] = [None]
    """RAM limits, such as `[8g, 6500m, none]`."""
    vram: Annotated[list[_Ram], BeforeValidator(as_list), Field(min_length=1)] = [None]
    """Limits of GPU memory, such as `[8g, none]`."""
    ram_high: _Ram = None
    """Soft RAM limit (cgroup v2), above which the kernel throttles a cell."""
    device: Annotated[str, AfterValidator(_as_device)] = "cpu"
    """The device that holds the model: `cpu`, `cuda` or `cuda:1`."""
    isolation: Literal["auto", "docker", "cgroup", "process"] = "auto"
    """How a cell is limited and measured. Name an isolation in a gate: figures of different isolations are not comparable."""
    dtype: Annotated[_Dtype, BeforeValidator(_as_dtype)] = "auto"
    """The dtype of the loaded model. `auto` is the dtype in a Hugging Face folder's config.json, or else float32."""
    cache: Annotated[Literal["cold", "warm"], AfterValidator(_check_cache)] = "cold"
    """Whether the checkpoint is out of the page cache at the start of a load, or was read beforehand."""
    format: Annotated[list[str], BeforeValidator(as_list)] = []
    """The formats of the checkpoint. Without this key, each strategy reads its own format."""
    uses: Annotated[
        list[str], BeforeValidator(as_list), AfterValidator(_check_uses), Field(min_length=1)
    ] = [FORWARD]
    """What is done with the model after a load: names of `weighin list uses`, paths of files (`./mine.py`), or `none`."""
    passes: Annotated[int, AfterValidator(_check_passes)] = 1
    """The number of forward passes of the use `forward`."""
    ranks: Annotated[
        list[Annotated[int, BeforeValidator(_as_number), Field(ge=1, le=MOST_RANKS)]],
        BeforeValidator(as_list),
        AfterValidator(_check_ranks),
        Field(min_length=1),
    ] = [1]
    """The numbers of processes that load the model at once."""
    disk: Annotated[
        list[_Rate], BeforeValidator(as_list), AfterValidator(_check_disk), Field(min_length=1)
    ] = [None]
    """Rates of the checkpoint's disk, such as `[50MB/s, none]`."""
    disk_latency: Annotated[
        list[_Latency], BeforeValidator(as_list), AfterValidator(_check_disk), Field(min_length=1)
    ] = [None]
    """Latencies of the checkpoint's disk, such as `[1ms, none]`."""
    repeats: int = Field(1, ge=1, le=10_000)
    """How many times each cell is measured."""
    environment: Annotated[list[Environment], BeforeValidator(as_list), Field(min_length=1)] = [{}]
    """Environment variables of the worker, such as `{MALLOC_ARENA_MAX: 2}`."""
    timeout_s: float = Field(600, gt=0, allow_inf_nan=False)
    """Seconds after which a cell is stopped."""
    steady: bool = False
    """Whether free memory is written before each load, so that times vary less in virtual machines."""
    trace: bool = False
    """Whether every event of PyTorch's CUDA allocator is recorded."""
    description: str = ""
    """One line for `weighin list suites`."""

    @property
    def sources(self) -> list[str]:
        return [model.source for model in self.models]


def read_model(path: Path) -> ModelSpec:
    """Read a model's YAML file.

    Raises:
        ConfigError: the file is unreadable or not YAML, or a key or value in it is invalid.
    """
    model = validate(_ModelFile, read_mapping(path), str(path))
    return ModelSpec(model.name, model.builder, model.kwargs)


def read_suite(path: Path) -> Suite:
    """Read a suite's YAML file.

    Raises:
        ConfigError: as in ``read_model``, or the suite has commands.
    """
    content = read_mapping(path)
    refuse_both(path, content)
    if "commands" in content:
        raise ConfigError(
            f"{path} is a suite of commands",
            f"measure the suite with weighin run: weighin run --suite {quote(str(path))}",
        )
    return validate(Suite, content, str(path))


def refuse_both(path: Path, content: dict[str, Any]) -> None:
    if {"models", "commands"} <= content.keys():
        raise ConfigError(f"{path}: a suite has models or commands, not both", "write two suites")


def check_suite(options: dict[str, Any]) -> Suite:
    """Return a suite that was given as options; raise ConfigError that names an invalid option."""
    return validate(Suite, options, "")


def validate(kind: type[_Kind], content: dict[str, Any], file: str) -> _Kind:
    """Validate ``content`` and return it as an instance of ``kind``.

    ``file`` is the file that error messages name; empty for options of a command line.

    Raises:
        ConfigError: a key or its value is invalid. The message names the key, and for an unknown
            key the most similar valid key.
    """
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        # An unknown key comes first: often it is a misspelling of the key that is missing.
        first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")
    key = ".".join(part for part in first["loc"] if isinstance(part, str)) or str(first["loc"][-1])
    message, repair = _complaint(first, _kind_at(kind, first["loc"][:-1]))
    if file:
        raise ConfigError(f"{file}: {key}: {message}", repair)
    option = f"--{_OPTIONS.get(key, key.removesuffix('_s').replace('_', '-'))}"
    raise ConfigError(f"{option}: {message}", repair, option=option)


def _kind_at(kind: type[BaseModel], place: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the pydantic model of the mapping at ``place`` (keys and indexes) inside a ``kind``."""
    for part in place:
        if isinstance(part, str) and part in kind.model_fields:
            kind = next(_models_in(kind.model_fields[part].annotation), kind)
    return kind


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from _models_in(inner)


_OPTIONS = {"environment": "env", "uses": "use"}  # an option's name, where a suite's key differs


def _complaint(error: ErrorDetails, kind: type[BaseModel]) -> tuple[str, str]:
    keys = [field.alias or name for name, field in kind.model_fields.items()]
    known = f"known keys: {', '.join(keys)}"
    if error["type"] == "value_error":
        message, repair = error["ctx"]["error"].args
        return message, repair
    if error["type"] == "missing":
        return "missing", known
    if error["type"] == "too_short":
        return "empty", "write at least one value, or leave the key out"
    if error["type"] in ("extra_forbidden", "invalid_key"):
        near = get_close_matches(str(error["loc"][-1]), keys, n=1)
        return "unknown key", f"did you mean {near[0]!r}? {known}" if near else known
    return f"{error['msg'][0].lower()}{error['msg'][1:]}, got {error['input']!r}", ""
