"""Define the settings of a run, and read them from a suite, from options of a command line, or a plan.

An error names the file and the key. For an unknown key, the error also names the most similar valid
key.
"""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    StrictInt,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from weighin.cell import FORWARD, Cell, ModelSpec
from weighin.errors import ConfigError
from weighin.formats.pretrained_library import FolderChoice, Selection
from weighin.records.floor import COARSEST, Aim
from weighin.records.run_folder import Shard, parse_shard
from weighin.text import printable
from weighin.units import (
    LONGEST_S,
    MIB,
    format_exact,
    parse_bytes,
    parse_rate,
    parse_seconds,
)

DEFAULT_STRATEGIES = (
    "baseline", "sequential", "meta_copy", "mmap_assign", "per_param", "streaming",
)  # fmt: skip
DEFAULT_SAVING = ("torch_save", "per_param", "per_module", "sharded", "safetensors", "dcp")
DTYPES = {
    "float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16",
}  # fmt: skip
"""The dtypes that a load may give floating-point tensors, by the names that a user may write."""


def _as_list(value: object) -> list[object]:
    return value if isinstance(value, list) else [value]


def _read(parse: Callable[[str], int], value: object, info: ValidationInfo) -> object:
    """Read a limit, rate or latency: a number, a text for ``parse``, or "none" (no limit).

    The numbers of a plan are in its own units (``IN_PLAN``).
    """
    if isinstance(value, str) and value.lower() == "none":
        return None
    if isinstance(value, bool) or not isinstance(value, str | int) or info.context == IN_PLAN:
        return value
    try:
        return parse(str(value))
    except ConfigError as error:
        raise ValueError(error.message, error.repair) from None


def _as_environment(value: object, info: ValidationInfo) -> object:
    if info.context == IN_PLAN:  # a command of a command line may set what a suite may not
        return value
    items = value.items() if isinstance(value, dict) else [(value, None)]
    for name, content in items:
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ValueError(
                f"{name!r} is not the name of a variable",
                "write the variables as in {MALLOC_ARENA_MAX: 2}",
            )
        if name in _SET_BY_US or name.startswith("WEIGHIN_"):
            raise ValueError(f"weighin sets {name} itself", f"leave {name} out")
        if isinstance(content, bool) or not isinstance(content, str | int | float):
            raise ValueError(  # noqa: TRY004 (pydantic passes no TypeError on)
                f"the value of {name} is {content!r}, not a text", "write the value in quotes"
            )
        if "\0" in str(content):
            raise ValueError(f"the value of {name} contains a NUL", f"leave {name} out")
    return {name: str(content) for name, content in items}


def matching(pattern: str, what: str, repair: str) -> AfterValidator:
    """Return the validator of a text that must match a regular expression."""

    def check(value: str) -> str:
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{value!r} is not {what}", repair)
        return value

    return AfterValidator(check)


LEAST_RAM = 64 * MIB
"""Less than `import torch` alone needs on any machine: the CPU build takes more than 100 MiB."""
IN_PLAN: Final = "plan"
"""The context in which pydantic validates the settings of a plan."""
MODELS: Final = "a suite of models"
COMMANDS: Final = "a suite of commands"
"""Marks a setting that is also a key of such a suite."""
_OTHER: Final = {MODELS: ("commands", "run"), COMMANDS: ("models", "bench")}
"""For each kind of suite, the key of the other kind, and the verb that measures the other kind."""
_OPTIONS: Final = {"environment": "env", "uses": "use"}
"""The name of an option, where a suite's key differs."""
_One = TypeVar("_One")
_Kind = TypeVar("_Kind", bound=BaseModel)
_Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    BeforeValidator(lambda value: DTYPES.get(value, value) if isinstance(value, str) else value),
]
_Isolation = Literal["auto", "docker", "cgroup", "process"]
_SET_BY_US = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "HOME")
_Environment = Annotated[dict[str, str], BeforeValidator(_as_environment)]
_Limit = Annotated[StrictInt | None, BeforeValidator(partial(_read, parse_bytes))]
_DEVICE: Final = matching(r"cpu|cuda(:\d+)?", "a device", "write cpu, cuda or cuda:1")
_Path = Annotated[Path, PlainSerializer(str)]
_Shard = Annotated[
    Shard,
    BeforeValidator(lambda value: parse_shard(value) if isinstance(value, str) else value),
    PlainSerializer(str),
]
_Ranks = Annotated[int, Field(ge=1, le=64)]
_Some = Annotated[list[_One], BeforeValidator(_as_list), Field(min_length=1)]
_Rate = Annotated[StrictInt | None, BeforeValidator(partial(_read, parse_rate))]
_Seconds = Annotated[float, Field(le=LONGEST_S, allow_inf_nan=False)]
_Latency = Annotated[StrictInt | None, BeforeValidator(partial(_read, parse_seconds))]


class Strict(BaseModel):
    """Base class of what people write: an unknown key is an error.

    In a plan, it is ignored, because a later version of weighin may have written it.
    """

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    @classmethod
    def keys(cls, _context: str | None = None) -> dict[str, bool]:
        """Return the keys, and whether each is needed."""
        return {
            field.alias or name: field.is_required() for name, field in cls.model_fields.items()
        }

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, content: object, info: ValidationInfo) -> object:
        if not isinstance(content, dict) or info.context == IN_PLAN:
            return content
        keys = cls.keys(info.context)
        # An unknown key comes first: often it is a misspelling of the key that is missing.
        if unknown := [str(key) for key in content if key not in keys]:
            from difflib import get_close_matches  # here to save time: most files are right

            near = get_close_matches(unknown[0], keys, n=1)
            message, key = "unknown key", unknown[0]
            hint = f"did you mean {near[0]!r}? " if near else ""
        elif lacking := [
            key for key, is_needed in keys.items() if is_needed and key not in content
        ]:
            message, key, hint = "missing", lacking[0], ""
        else:
            return content
        repair = f"{hint}known keys: {', '.join(keys)}"
        raise PydanticCustomError("key", message, {"key": key, "repair": repair})


class SuiteStrategy(Strict):
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
    dtype: _Dtype | None = None
    """The dtype of this model after a load. Default: the suite's `dtype`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.name or self.builder or self.folder or self.checkpoint):
            raise ValueError(
                "a model of the suite has no name, builder, folder or checkpoint", "add one of them"
            )
        if self.builder and ":" not in self.builder:
            raise ValueError(
                f"{self.builder!r} is not a builder",
                "write package.module:function or file.py:function",
            )
        if self.folder and (self.builder or self.kwargs or self.checkpoint):
            raise ValueError(
                f"the folder {self.folder} already determines the model's code and weights",
                "leave builder, kwargs and checkpoint out",
            )
        return self

    @property
    def source(self) -> str:
        """The model as a user types it on a command line."""
        if self.builder or self.folder:
            return self.builder or self.folder
        return self.name or f"from:{self.checkpoint}"


def _as_command(value: object) -> object:
    """Read a command: a list of words, or a text that is split into words as in a shell."""
    if not isinstance(value, str):
        words = value if isinstance(value, list) else [value]
        return [str(word) if isinstance(word, int | float) else word for word in words]
    try:
        return shlex.split(value)
    except ValueError as error:
        raise ValueError(
            f"{value!r} cannot be split into words: {str(error).lower()}",
            "write a list of words: [python, train.py]",
        ) from None


def _check_name(name: str, info: ValidationInfo) -> str:
    if info.context != IN_PLAN and (not name or printable(name) != name):
        raise ValueError(f"{name!r} is not a name", "write a name of printable characters")
    return name


class SuiteCommand(Strict):
    """One command of a suite, or the command of a command line."""

    name: Annotated[str, AfterValidator(_check_name)]
    """The label of the command in reports and in a baseline. Each command has its own."""
    command: Annotated[list[str], BeforeValidator(_as_command), Field(min_length=1)]
    """The program and its arguments: a list, or one text that is split as a shell splits it."""
    cold: Annotated[list[str], BeforeValidator(_as_list)] = []
    """Files and folders to drop from the page cache before each start, as `--cold`."""
    marks: Annotated[list[str], BeforeValidator(_as_list)] = []
    """Regular expressions: each line of output that contains one is a mark on the timeline, as `--mark`."""
    environment: _Environment = {}
    """Environment variables of the command, such as `{OMP_NUM_THREADS: 1}`."""


def _by_name(value: object) -> object:
    """Read a list of mappings; replace an entry that is no mapping, but a name, by {"name": entry}."""
    return [
        item if isinstance(item, dict | BaseModel) else {"name": item} for item in _as_list(value)
    ]


_NOT_SLOW = "weighin slows the disk down only for a load, not for a save"
_SLOW_OR_WARM = "a warm load reads the page cache, so that the speed of the disk does not matter"
_NO_EFFECT: Final[dict[tuple[str, str], dict[str, tuple[object, str, str]]]] = {
    ("operation", "save"): {
        "cache": (
            "cold",
            "warm does not apply to a save, because a save reads no checkpoint",
            "leave cache out",
        ),
        "uses": (FORWARD, "weighin runs no use of the model after a save", "leave the use out"),
        "passes": (1, "weighin runs no forward pass after a save", "leave passes out"),
        "ranks": (1, "a save runs in one process", "leave ranks out"),
        "disk": (None, _NOT_SLOW, "leave out disk and disk_latency"),
        "disk_latency": (None, _NOT_SLOW, "leave out disk and disk_latency"),
    },
    ("cache", "warm"): {
        "disk": (None, _SLOW_OR_WARM, "leave out cache, or disk and disk_latency"),
        "disk_latency": (None, _SLOW_OR_WARM, "leave out cache, or disk and disk_latency"),
    },
}
"""For a value of a setting, the settings that then have no effect: their only value, the reason, and
the repair.
"""


def _check_commands(commands: list[SuiteCommand]) -> list[SuiteCommand]:
    names = [each.name for each in commands]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(
            f"two commands are called {twice!r}",
            "rename one of the two commands, because a record identifies a command by its name",
        )
    return commands


def _check_limits(value: Any, info: ValidationInfo) -> Any:
    least, than, repair = LEAST_RAM, "`import torch` alone", "64MiB plus the size of the weights"
    if info.data.get("commands"):
        least, than, repair = MIB, "any program", "1MiB"
    for limit in value if isinstance(value, list) else [value]:
        if limit is not None and limit < least:
            raise ValueError(
                f"{format_exact(limit)} is less than {than} needs",
                # Below 1 KiB, the size often lacks its unit.
                f"did you mean {limit}g?" if limit < 1024 else f"give at least {repair}",
            )
    return value


def _check_timeout(value: float, info: ValidationInfo) -> float:
    of_commands = bool(info.data.get("commands"))
    if value < 0 or (value == 0 and not of_commands):
        least = "greater than or equal to 0" if of_commands else "greater than 0"
        raise PydanticCustomError("too_small", "input should be {least}", {"least": least})
    return value


class Settings(Strict):
    """A matrix of measurements (cells), each ``repeats`` times, and how they are measured.

    A suite of models measures each model x limit x strategy x ..., and a suite of commands each
    command x limit. plan.json has all settings, so that a stopped run can be resumed.
    """

    models: Annotated[_Some[SuiteModel], BeforeValidator(_by_name), MODELS] = []
    """Names of `weighin list models`, paths of Hugging Face folders or of checkpoints, `from:PATH`, builders, or mappings with the keys of a model."""
    commands: Annotated[_Some[SuiteCommand], AfterValidator(_check_commands), COMMANDS] = []
    """The commands: mappings with the keys of a command."""
    operation: Annotated[Literal["load", "save"], MODELS] = "load"
    """Whether the strategies load a checkpoint or save one."""
    strategies: Annotated[_Some[SuiteStrategy], BeforeValidator(_by_name), MODELS] = Field(
        default_factory=lambda known: [
            SuiteStrategy(name=name)
            for name in (DEFAULT_SAVING if known.get("operation") == "save" else DEFAULT_STRATEGIES)
        ]
    )
    """Names of `weighin list strategies`, paths of files (`./mine.py`), `all`, or mappings with the keys of a strategy."""
    ram: Annotated[_Some[_Limit], AfterValidator(_check_limits), MODELS, COMMANDS] = [None]
    """RAM limits, such as `[8g, 6500m, none]`."""
    vram: Annotated[_Some[_Limit], AfterValidator(_check_limits), MODELS] = [None]
    """Limits of GPU memory, such as `[8g, none]`."""
    ram_high: Annotated[_Limit, AfterValidator(_check_limits), MODELS] = None
    """Soft RAM limit (cgroup v2), above which the kernel throttles a cell."""
    device: Annotated[str, _DEVICE, MODELS] = "cpu"
    """The device that holds the model: `cpu`, `cuda` or `cuda:1`."""
    isolation: Annotated[_Isolation, MODELS, COMMANDS] = "auto"
    """How a cell is limited and measured; for commands, `auto` takes no container. Name an isolation in a gate: figures of different isolations are not comparable."""
    image: Annotated[str, COMMANDS] = ""
    """The image of the container in which the commands run. Without this key, the commands run on this machine."""
    dtype: Annotated[_Dtype, MODELS] = "auto"
    """The dtype of the loaded model. `auto` is the dtype in a Hugging Face folder's config.json, or else float32."""
    cache: Annotated[Literal["cold", "warm"], MODELS] = "cold"
    """Whether the checkpoint is out of the page cache at the start of a load, or was read beforehand."""
    format: Annotated[list[str], BeforeValidator(_as_list), MODELS] = []
    """The formats of the checkpoint. Without this key, each strategy reads its own format."""
    uses: Annotated[_Some[str], MODELS] = [FORWARD]
    """What is done with the model after a load: names of `weighin list uses`, paths of files (`./mine.py`), or `none`."""
    passes: Annotated[int, MODELS] = 1
    """The number of forward passes of the use `forward`."""
    ranks: Annotated[_Some[_Ranks], MODELS] = [1]
    """The numbers of processes that load the model at once."""
    disk: Annotated[_Some[_Rate], MODELS] = [None]
    """Rates of the checkpoint's disk, such as `[50MB/s, none]`."""
    disk_latency: Annotated[_Some[_Latency], MODELS] = [None]
    """Latencies of the checkpoint's disk, such as `[1ms, none]`."""
    repeats: Annotated[int, Field(ge=1, le=10_000), MODELS, COMMANDS] = 1
    """How many times each cell is measured."""
    environment: Annotated[_Some[_Environment], MODELS] = [{}]
    """Environment variables of the worker, such as `{MALLOC_ARENA_MAX: 2}`."""
    timeout_s: Annotated[_Seconds, AfterValidator(_check_timeout), MODELS, COMMANDS] = Field(
        default_factory=lambda known: 0.0 if known.get("commands") else 600.0
    )
    """Seconds after which a cell is stopped; for commands, 0 for none."""
    stacks: Annotated[bool, COMMANDS] = False
    """Whether the stacks of Python processes are read near the peak. Each reading stops the command for an instant."""
    steady: Annotated[bool, MODELS] = False
    """Whether free memory is written before each load, so that times vary less in virtual machines."""
    description: Annotated[str, MODELS, COMMANDS] = ""
    """One line for `weighin list suites`."""

    kwargs: dict[str, Any] = {}
    """Further arguments of every model's builder (the function that returns the model)."""
    checkpoint: _Path | None = None
    """The user's checkpoint of all models; none for a generated one."""
    key: str = ""
    """The key of the weights in the user's checkpoint."""
    strip_prefix: str = ""
    """The prefix that each name in the user's checkpoint has before the model's name."""
    variant: str = ""
    """The variant of the weights of a Hugging Face folder."""
    model_class: str = ""
    """The class of transformers that loads a Hugging Face folder."""
    revision: str = ""
    """The revision of a model in the Hub's cache."""
    trust_remote_code: bool = False
    """Whether Python code in a Hugging Face folder may run."""
    adapter: str = ""
    """A folder with an adapter of LoRA to merge into the models."""
    seed: int = 0
    """The random seed of generated weights."""
    storage: _Path | None = None
    """The folder for generated and converted checkpoints; none for weighin's cache."""
    mounts: tuple[str, ...] = ()
    """The paths of this machine that a container mounts read-only at the same path."""
    cwd: str = ""
    """The working folder of commands."""
    ready: str = ""
    """A regular expression: a server is ready when a line of its output matches."""
    ready_url: str = ""
    """A server is ready when it answers at this URL with an HTTP status below 500."""
    grace_s: Annotated[_Seconds, Field(ge=0)] = 10.0
    """The seconds from SIGTERM to SIGKILL for a command that weighin stops."""
    within: Annotated[float | None, Field(gt=0, le=COARSEST)] = None
    """The precision of a search of `weighin floor`, as a share of the floor; none for another run."""
    aim: Aim = Aim.ENDS
    """The kind of floor (smallest limit) that is searched."""
    engine: dict[str, Any] = {}
    """The name and settings of the engine that distributes the cells; empty for this machine."""
    shard: _Shard | None = None
    """The part of the plan that this run measures, such as 2/8; none for the whole plan."""

    checkpoints: dict[str, str] = {}
    """The user's checkpoint of each model, by the model's title, if a suite names several."""
    strategy_paths: dict[str, str] = {}
    """The path of each strategy's file, by the strategy's name."""
    use_paths: dict[str, str] = {}
    """The path of each use in a user's file, by the use's name."""
    python_path: tuple[str, ...] = ()
    """The folders of the user's Python modules."""

    @classmethod
    def keys(cls, context: str | None = None) -> dict[str, bool]:
        """Return the keys of a suite of models (``MODELS``) or of commands (``COMMANDS``), or all."""
        needed = {MODELS: "models", COMMANDS: "commands"}.get(context or "")
        return {
            name: name == needed
            for name, field in cls.model_fields.items()
            if not needed or context in field.metadata
        }

    @field_validator(*_NO_EFFECT["operation", "save"])
    @classmethod
    def _check_effect(cls, value: _One, info: ValidationInfo) -> _One:
        given = value if isinstance(value, list) else [value]
        for (name, state), without in _NO_EFFECT.items():
            rule = without.get(info.field_name or "")
            if rule and info.data.get(name) == state and any(each != rule[0] for each in given):
                raise ValueError(*rule[1:])
        return value

    @field_validator("passes")
    @classmethod
    def _check_passes(cls, value: int, info: ValidationInfo) -> int:
        if value < 1:
            raise ValueError(
                "0 forward passes mean no use of the model",
                "write --use none (in a suite, uses: none)",
            )
        if value > 1 and FORWARD not in info.data.get("uses", [FORWARD]):
            raise ValueError(
                "passes applies to the use forward, which is not among the uses", "leave passes out"
            )
        return value

    @property
    def selection(self) -> Selection:
        return Selection(self.key, self.strip_prefix)

    @property
    def choice(self) -> FolderChoice:
        return FolderChoice(
            self.variant, self.model_class, self.revision, self.trust_remote_code, self.adapter
        )

    @property
    def verb(self) -> str:
        """The command of weighin that makes a run with these settings: "bench", "run" or "floor"."""
        if self.within is not None:
            return "floor"
        return "run" if self.commands else "bench"

    def as_json(self) -> dict[str, Any]:
        """Return what plan.json stores: the settings that differ from their defaults."""
        return self.model_dump(exclude_defaults=True, exclude_unset=True)

    def command(self, label: str) -> SuiteCommand:
        return {each.name: each for each in self.commands}[label]

    def checkpoint_of(self, model: ModelSpec) -> Path | None:
        """Return the user's checkpoint of a model; None if weighin generates the checkpoint."""
        own = self.checkpoints.get(model.title)
        return Path(own) if own else self.checkpoint


class _ModelFile(Strict):
    name: str
    builder: Annotated[str, matching(r"[\w.]+:\w+", "a builder", "write package.module:function")]
    kwargs: dict[str, Any] = Field({})
    description: str = ""


def read_model(path: Path) -> ModelSpec:
    """Read a model's YAML file; raise ConfigError if the file, a key or a value in it is invalid."""
    from weighin.settings.yaml_file import read_mapping  # `weighin run` does without yaml

    model = validate(_ModelFile, read_mapping(path), str(path))
    return ModelSpec(model.name, model.builder, model.kwargs)


def read_suite(path: Path, kind: str = MODELS) -> Settings:
    """Read a suite's YAML file; raise ConfigError as ``read_model``, or if it is of the other kind."""
    from weighin.settings.yaml_file import read_mapping

    content = read_mapping(path)
    if {"models", "commands"} <= content.keys():
        raise ConfigError(f"{path}: a suite has models or commands, not both", "write two suites")
    other, verb = _OTHER[kind]
    if other in content:
        raise ConfigError(
            f"{path} is a suite of {other}",
            f"measure the suite with weighin {verb}: weighin {verb} --suite {shlex.quote(str(path))}",
        )
    return validate(Settings, content, str(path), kind)


def check_suite(options: Mapping[str, Any]) -> Settings:
    return validate(Settings, options, "")


def read_plan(settings: Mapping[str, Any], cells: Sequence[Cell], place: Path) -> Settings:
    """Return the settings of a plan, also of an older weighin; ignore keys of a later one."""
    content = {name: value for name, value in settings.items() if value is not None}
    # An older weighin stored the settings of commands in an object of their own, and by label what
    # differs between the commands.
    if isinstance(old := content.pop("command", None), dict):
        own = old.pop("own", {})
        content |= {name: value for name, value in old.items() if name not in ("cold", "marks")}
        content["cwd"] = old.get("folder", "")
        content["commands"] = [
            {
                "name": cell.strategy,
                "command": list(cell.command),
                "environment": cell.environment,
                **{key: old.get(key, []) for key in ("cold", "marks")},
                **own.get(cell.strategy, {}),
            }
            for cell in {cell.strategy: cell for cell in cells}.values()
        ]
    return validate(Settings, content, str(place), IN_PLAN)


def validate(
    kind: type[_Kind], content: Mapping[str, Any], file: str, context: str | None = None
) -> _Kind:
    """Validate ``content`` as a ``kind``; raise ConfigError that names an invalid key or value.

    ``file`` is the file that error messages name; empty for options of a command line.
    """
    try:
        return kind.model_validate(content, context=context)
    except ValidationError as error:
        first = error.errors()[0]
    more, repair = first.get("ctx", {}), ""
    key = ".".join(part for part in (*first["loc"], more.get("key")) if isinstance(part, str))
    if first["type"] == "value_error":
        message, repair = more["error"].args
    elif first["type"] == "key":
        message, repair = first["msg"], more["repair"]
    elif first["type"] == "too_short":
        message, repair = "empty", "write at least one value, or leave the key out"
    else:
        message = f"{first['msg'][0].lower()}{first['msg'][1:]}, got {first['input']!r}"
    if file:
        raise ConfigError(f"{file}: {key}: {message}", repair)
    option = f"--{_OPTIONS.get(key, key.removesuffix('_s').replace('_', '-'))}"
    raise ConfigError(f"{option}: {message}", repair, option=option)
