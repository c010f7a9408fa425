"""Define the settings of a run, and read them from a suite, from options of a command line, or a plan."""

import re
import shlex
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self, TypeVar
from urllib.parse import urlsplit

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
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from weighin.cell import FORWARD, LATEST, Cell, ModelSpec
from weighin.errors import ConfigError, UnknownName
from weighin.install import requirements_in
from weighin.records.floor import COARSEST, Aim
from weighin.records.run_folder import in_shard
from weighin.stream.pretrained_library import FolderChoice, Selection
from weighin.text import printable
from weighin.units import LONGEST_S, MIB, parse_bytes, parse_rate, parse_seconds

DEFAULT_STRATEGIES = ("baseline", "sequential", "meta_copy", "mmap_assign", "per_param", "streaming")  # fmt: skip
DEFAULT_SAVING = ("torch_save", "per_param", "per_module", "sharded", "safetensors", "dcp")
DTYPES = {
    "float32": "float32", "fp32": "float32", "bfloat16": "bfloat16", "bf16": "bfloat16",
    "float16": "float16", "fp16": "float16",
}  # fmt: skip
"""The dtypes that a load may give floating-point tensors, by the names that a user may write."""
_One = TypeVar("_One")
_Kind = TypeVar("_Kind", bound=BaseModel)
IN_PLAN: Final = "plan"
"""The context in which pydantic validates the settings of a plan."""
MODELS: Final = "a model"
COMMANDS: Final = "commands"
WHAT: Final = "What to load"
LIMITS: Final = "Limits"
HOW: Final = "How to measure"
TEXTS: Final[dict[str, dict[str, str]]] = {
    "recommend": {
        "ram": "The RAM that the load may take: 8g.",
        "vram": "The GPU memory that the load may take: 8g. The CUDA context does not count.",
        "disk": "The rate of the checkpoint's disk: 50MB/s. Default: that of a small cloud machine's disk.",
        "disk_latency": "The time that the checkpoint's disk takes to answer a request: 1ms.",
        "ranks": "How many processes load the model at once, as torchrun starts them: 4. --ram and --vram hold for all together.",
        "uses": "What follows the load, and must fit, too: a name of `weighin list uses` such as adamw, a file (./mine.py) with a function use(model), or none.",
    },
    "bisect": {"strategies": "The way of loading: a name of `weighin list strategies`, or a file (./mine.py)."},
    "inspect": {"models": "The checkpoint: a file, a folder, or the Hub id of a downloaded folder."},
}  # fmt: skip
"""The texts in the help of a verb that takes one value of a setting, by the setting's key."""


@dataclass(frozen=True, slots=True)
class Option:
    """Makes a setting an option of these verbs, and not only a key of ``--set KEY=VALUE``."""

    group: str  # of the help
    verbs: str
    metavar: str = ""  # empty for a flag
    names: tuple[str, ...] = ()  # by default the key, with hyphens
    is_repeatable: bool = False


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _listed(value: object) -> list[object]:
    """Return a list; a text is divided at its commas, as in ``8g,none``."""
    if isinstance(value, str):
        return [word.strip() for word in value.split(",") if word.strip()]
    return _as_list(value)


def _by_name(value: object) -> object:
    """Return a list in which an entry that is no mapping, but a name, is {"name": entry}."""
    return [i if isinstance(i, dict | BaseModel) else {"name": i} for i in _as_list(value)]


def _parsed(parse: Callable[[str], _One], text: str) -> _One:
    try:
        return parse(text)
    except ConfigError as error:
        raise ValueError(error.message, error.repair) from None


def _as_number(parse: Callable[[str], int], value: object, info: ValidationInfo) -> object:
    """Read a limit, rate or latency: a text for ``parse``, "none" (no limit), or a number, of a plan in its unit."""
    if value is None or info.context == IN_PLAN:
        return value
    if str(value).lower() == "none":
        return None
    return _parsed(parse, str(value))


def _parse_limit(text: str) -> int:
    if (size := parse_bytes(text)) < MIB:
        is_plain = re.fullmatch(r"[\d.]+", text)
        repair = f"did you mean {text}g?" if is_plain else "give at least 1m"
        raise ConfigError(f"{text!r} is less than any process needs", repair)
    return size


def _as_environment(taken: str, value: object, info: ValidationInfo) -> object:
    """Check variables; ``taken`` matches the names that weighin sets itself, which an older plan may have."""
    for name, text in value.items() if isinstance(value, dict) else ():
        if not isinstance(name, str):
            raise ValueError(f"the name {name!r} is not a text", "write the name in quotes")  # noqa: TRY004 (pydantic takes no TypeError)
        if "\0" in str(text):
            raise ValueError(f"the value of {name!r} contains a null byte", "leave that byte out")
        if not re.fullmatch(r"[^=\0]+", name):
            why = f"{name!r} cannot be an environment variable"
            raise ValueError(why, "write as in {MALLOC_ARENA_MAX: 2}")
        if info.context != IN_PLAN and re.fullmatch(taken, name):
            raise ValueError(f"weighin sets {name} itself", f"leave {name} out")
    return value


def _check_address(text: str, info: ValidationInfo) -> str:
    is_right = not text
    with suppress(ValueError):  # of http://[::1 or http://a:99999
        parts = urlsplit(text)
        is_right |= bool(parts.scheme == "http" and parts.hostname and parts.port != 0)
    if not is_right:
        raise ValueError(f"{text!r} is not an HTTP address", "write http://HOST:PORT/PATH")
    if text and info.data.get("ready"):
        raise ValueError("it cannot be combined with --ready", "leave one of the two out")
    return text


def _check_device(text: str) -> str:
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", text):
        raise ValueError(f"{text!r} is no device", "write cpu, cuda or cuda:1")
    return text


def _split(line: object) -> object:
    if not isinstance(line, str):
        return _as_list(line)
    try:
        return shlex.split(line)
    except ValueError as error:  # a quote that is not closed, or nothing after a backslash
        what = f"a shell could not split it into words: {str(error).lower()}"
        raise ValueError(what, "correct it, or write a list of words") from None


def _check_pattern(pattern: str) -> str:
    import regex  # takes 0.02 s

    try:
        regex.compile(pattern)
    except regex.error as error:
        raise ValueError(
            f"{pattern!r} is not a regular expression: {error}",
            "write a backslash before a character that stands for itself: 'loss \\(train\\)'",
        ) from None
    return pattern


def _check_commands(commands: "list[SuiteCommand]") -> "list[SuiteCommand]":
    names = [each.name for each in commands]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise ValueError(f"two commands are called {twice!r}", "rename one of the two")
    return commands


_LOADS: Final = "bench floor predict recommend"
_MEASURED: Final = "bench floor run"
_Dtype = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    BeforeValidator(lambda value: DTYPES.get(value, value) if isinstance(value, str) else value),
]
_Path = Annotated[Path, PlainSerializer(str)]
_Pattern = Annotated[str, AfterValidator(_check_pattern)]
_Device = Annotated[str, AfterValidator(_check_device)]
_Label = Annotated[str, AfterValidator(lambda name: printable(name) or "command")]
_Shard = Annotated[str, AfterValidator(partial(_parsed, lambda text: in_shard((), text) or text))]
_Names = Annotated[list[str], BeforeValidator(_listed)]
_Word = Annotated[str, Field(coerce_numbers_to_str=True)]
_Variables = Annotated[dict[str, _Word], BeforeValidator(partial(_as_environment, ""))]
_OF_LOAD = r"PYTHONPATH|PYTHONDONTWRITEBYTECODE|HOME|WEIGHIN_.*"
_Environment = Annotated[dict[str, _Word], BeforeValidator(partial(_as_environment, _OF_LOAD))]
_Several = Annotated[list[_One], BeforeValidator(_as_list)]
_Some = Annotated[list[_One], BeforeValidator(_listed), Field(min_length=1)]
_Named = Annotated[list[_One], BeforeValidator(_by_name), Field(min_length=1)]
_Seconds = Annotated[float, Field(ge=0, le=LONGEST_S, allow_inf_nan=False)]
_Rates = _Some[Annotated[StrictInt | None, BeforeValidator(partial(_as_number, parse_rate))]]
_Latencies = _Some[Annotated[StrictInt | None, BeforeValidator(partial(_as_number, parse_seconds))]]
_Ranks = Annotated[int, Field(ge=1, le=64)]
_Limits = _Some[Annotated[StrictInt | None, BeforeValidator(partial(_as_number, _parse_limit))]]


def _check_release(choice: str) -> str:
    """Return a choice as series name it: ``pinned`` (what is installed here) is ""."""
    if choice in ("", "pinned", LATEST):
        return choice.removeprefix("pinned")
    from packaging.requirements import InvalidRequirement, Requirement  # few runs choose one

    try:
        asked = [str(Requirement(one)) for one in requirements_in(choice)]
    except InvalidRequirement as error:
        raise ValueError(
            f"{choice!r} names no release: {str(error).splitlines()[0]}",
            f"write --with transformers==4.57.1, or {LATEST}, or pinned",
        ) from None
    return ",".join(sorted(one.replace(" ", "") for one in asked))


class Strict(BaseModel):
    """What people write. An unknown key is an error, except in a plan, which a later weighin may have written."""

    model_config = ConfigDict(
        frozen=True, use_attribute_docstrings=True, validate_by_name=True, validate_by_alias=True
    )

    @classmethod
    def known(cls, _context: str | None) -> Collection[str]:
        return [field.alias or name for name, field in cls.model_fields.items()]

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, content: object, info: ValidationInfo) -> object:
        known = cls.known(info.context)
        for key in content if isinstance(content, dict) and info.context != IN_PLAN else ():
            if key not in known:
                message, repair = "unknown key", UnknownName("key", str(key), known).repair
                if info.context and key in cls.model_fields:
                    message, repair = f"it has no effect on {info.context}", "leave it out"
                raise PydanticCustomError("key", message, {"key": str(key), "repair": repair})
        return content


class SuiteStrategy(Strict):
    name: str
    """A name of `weighin list strategies`, or the path of a file, such as `./mine.py`."""
    options: dict[str, Any] = {}
    """The options of the strategy, as its file declares them."""


class SuiteModel(Strict):
    """One model of a suite: a name, or a folder, a builder or a checkpoint of the user's own."""

    name: str = ""
    """The model's name in reports. Without `builder` and `folder`, it also chooses the model, as on the command line: `gpt2-medium`."""
    builder: str = ""
    """The function that returns the model: `mypackage.nets:build`, or `path/nets.py:build`."""
    kwargs: dict[str, Any] = {}
    """The arguments of the builder."""
    checkpoint: str = ""
    """The file or folder with the model's weights. Without this key, weighin generates random weights. Without `builder` and `name`, the model consists of the tensors in the checkpoint."""
    key: str = ""
    """The key of the weights in a checkpoint that also holds other data, as `--key`: `model`, `state.net`."""
    strip_prefix: str = ""
    """The prefix that each name in the checkpoint has before the model's name: `module.`."""
    folder: str = ""
    """A Hugging Face folder, in place of `builder`, `kwargs` and `checkpoint`."""
    adapter: str = ""
    """A folder with an adapter of LoRA to merge into the model, as `--adapter`."""
    dtype: _Dtype | None = None
    """The dtype of this model after a load. Default: the suite's `dtype`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not (self.name or self.builder or self.folder or self.checkpoint):
            raise ValueError("a model has no name", "add name, builder, folder or checkpoint")
        if self.folder and (self.builder or self.kwargs or self.checkpoint):
            why = "a folder determines the model's code and weights"
            raise ValueError(why, "leave builder, kwargs and checkpoint out")
        return self

    @property
    def source(self) -> str:
        """The model as a user types it on a command line."""
        return self.builder or self.folder or self.name or f"from:{self.checkpoint}"


class SuiteCommand(Strict):
    """One command of a suite, or the command of a command line."""

    name: Annotated[_Label, Option(HOW, "run floor", "NAME")]
    """What the command is called in reports and baselines; in a suite, no two may share it."""
    command: Annotated[list[_Word], BeforeValidator(_split), Field(min_length=1)]
    """The program and its arguments: a list of words, or one text that is split as a shell splits it."""
    cold: Annotated[_Several[str], Option(HOW, "run floor", "PATH", is_repeatable=True)] = []
    """Drop this file or folder from the page cache before each start. Otherwise, the figures miss pages that another program read before."""
    marks: Annotated[_Several[_Pattern], Option(HOW, "run", "REGEX", ("--mark",), True)] = []
    """Mark each line of output that matches this regular expression on the timeline."""
    environment: Annotated[
        _Variables, Option(HOW, "run floor", "NAME=VALUE", ("--env",), True)
    ] = {}
    """Environment variables of the command: OMP_NUM_THREADS=1."""


class Model(Strict):
    """The models, and which of the files of a model are loaded."""

    models: Annotated[
        _Named[SuiteModel], Option(WHAT, f"{_LOADS} inspect", "NAME", ("--model",))
    ] = []
    """The model: a name of `weighin list models`, a path, from:CHECKPOINT (needs no code), or the function that builds it: package.module:function, path/nets.py:function."""
    checkpoint: Annotated[_Path | None, Option(WHAT, _LOADS, "PATH")] = None
    """Your own weights, a file or folder. Default: random weights."""
    key: Annotated[str, Option(WHAT, f"{_LOADS} inspect convert", "KEY")] = ""
    """Where a training checkpoint holds the model's weights: model, or state.net."""
    adapter: Annotated[str, Option(WHAT, "bench floor predict recommend convert", "FOLDER")] = ""
    """An adapter that peft saved, such as LoRA, to merge into the model."""
    trust_remote_code: Annotated[bool, Option(WHAT, f"{_LOADS} inspect convert")] = False
    """Run the Python code in a Hugging Face folder, with your rights: read it first."""
    kwargs: dict[str, Any] = {}
    """Arguments of the function that builds the model: `--set kwargs.width=64`."""
    strip_prefix: str = ""
    """A prefix to cut off every name in the checkpoint: `module.` (DistributedDataParallel), `_orig_mod.` (torch.compile)."""
    variant: str = ""
    """The variant of a Hugging Face folder's weights: `fp16` loads model.fp16.safetensors."""
    model_class: str = ""
    """The class of transformers that loads a Hugging Face folder. Default: that in config.json, or AutoModel's choice."""
    revision: str = ""
    """The branch, tag or commit of a model in the Hugging Face Hub's cache. Default: main."""


class Command(Strict):
    """The commands, and how they run."""

    commands: Annotated[_Some[SuiteCommand], AfterValidator(_check_commands)] = []
    """The commands: mappings with the keys of a command."""
    image: Annotated[str, Option(HOW, "run floor", "IMAGE")] = ""
    """Run the command in a container of this image, as docker run does: with the image's entrypoint, your user id and the current folder."""
    ready: Annotated[_Pattern, Option(HOW, "run floor", "REGEX")] = ""
    """Measure a server until a line of its output matches this regular expression, and stop it then."""
    ready_url: Annotated[str, AfterValidator(_check_address), Option(HOW, "run floor", "URL")] = ""
    """Measure a server until a GET request to this address is answered with a status below 500, and stop it then."""
    grace_s: _Seconds = 10.0
    """Seconds between SIGTERM and SIGKILL when weighin stops a server, or a process that outlives the command."""
    stacks: Annotated[bool, Option(HOW, "run", names=("--stacks/--no-stacks",))] = False
    """Read the stacks of Python processes near the peak, to name the line that allocated the memory. Each reading stops the command for an instant. With --repeats on the command line, the default is --no-stacks."""


def _usual_strategies(known: dict[str, Any]) -> list[SuiteStrategy]:
    names = DEFAULT_SAVING if known.get("operation") == "save" else DEFAULT_STRATEGIES
    return [SuiteStrategy(name=name) for name in names]


class Load(Strict):
    """What is done, and which ways of loading are measured."""

    operation: Literal["load", "save"] = "load"
    """Whether the strategies load a checkpoint or save one."""
    strategies: Annotated[
        _Named[SuiteStrategy],
        BeforeValidator(_listed),
        Option(WHAT, "bench floor predict", "NAMES", ("--strategies", "--strategy", "-s"), True),
    ] = Field(default_factory=_usual_strategies)
    """Ways of loading: names of `weighin list strategies`, files (./mine.py), or all. Default: baseline, sequential, meta_copy, mmap_assign, per_param and streaming; for saves, all."""
    device: Annotated[_Device, Option(LIMITS, _LOADS, "DEVICE")] = "cpu"
    """Where the model is loaded to: cpu, cuda or cuda:1."""
    dtype: Annotated[_Dtype, Option(WHAT, _LOADS, "DTYPE")] = "auto"
    """The loaded model's dtype: float32, bfloat16, float16, or auto: the dtype in a Hugging Face folder's config.json, else float32."""
    cache: Annotated[Literal["cold", "warm"], Option(HOW, "bench", "STATE")] = "cold"
    """Whether the checkpoint is evicted from the page cache before the load (cold), or read into it (warm)."""
    format: Annotated[_Names, Option(WHAT, "bench floor predict", "NAMES")] = []
    """Formats of the checkpoint: pt, safetensors, sharded ... Default: that of your checkpoint if the strategy reads it, else the first that the strategy reads."""
    passes: Annotated[int, Field(ge=1)] = 1
    """How many forward passes the use `forward` runs. Every pass reads the file again if the model is mapped from it and larger than the RAM limit."""
    uses: Annotated[_Some[str], Option(HOW, _LOADS, "NAMES", ("--use",))] = [FORWARD]
    """What happens after the load: names of `weighin list uses` such as adamw, files (./mine.py) with a function use(model), or none."""
    ranks: Annotated[_Some[_Ranks], Option(HOW, _LOADS, "NUMBERS")] = [1]
    """How many processes load the model at once, under one limit, as torchrun starts them: 1,4."""
    disk: Annotated[_Rates, Option(LIMITS, "bench recommend", "RATES")] = [None]
    """Slow the checkpoint's disk down to these rates: 50MB/s,none. Needs FUSE and weighin[disk]."""
    disk_latency: Annotated[_Latencies, Option(LIMITS, "recommend", "TIMES")] = [None]
    """Delay each answer of the checkpoint's disk by these times: 1ms,none. Needs FUSE and weighin[disk]."""
    vram: Annotated[_Limits, Option(LIMITS, "recommend", "SIZES")] = [None]
    """Limits of GPU memory, measured one after the other: 8g,none. The CUDA context does not count."""
    environment: _Some[_Environment] = [{}]
    """Environment variables of the load: `--set environment.MALLOC_ARENA_MAX=1`. With a list, each entry is measured."""
    seed: int = 0
    """The random seed of generated weights."""
    storage: _Path | None = None
    """A folder for generated and converted checkpoints, on the disk that you want to measure. Default: weighin's cache ($WEIGHIN_CACHE)."""
    steady: bool = False
    """Write to free memory before each load, so that times vary less in virtual machines."""
    jobs: Annotated[int, Field(ge=1, exclude=True)] = 1
    """How many cells to measure at once on this machine, if only memory matters. That many of the largest RAM limits must fit into the free RAM together."""


class Measure(Strict):
    """How each cell is limited, measured and repeated."""

    ram: Annotated[_Limits, Option(LIMITS, "bench run recommend", "SIZES")] = [None]
    """RAM limits, measured one after the other: 8g,6500m,none."""
    isolation: Annotated[
        Literal["auto", "docker", "cgroup", "process"], Option(LIMITS, _MEASURED, "NAME")
    ] = "auto"
    """What enforces the limits: docker, cgroup, process (no limit), or auto, the first that works; for commands, auto takes no container. For weighin check, name one: their figures differ."""
    repeats: Annotated[int, Field(ge=1, le=10_000), Option(HOW, "bench run", "N")] = 1
    """How often to measure each cell. Every cell is measured once before any is measured again."""
    releases: Annotated[
        _Several[Annotated[str, AfterValidator(_check_release)]],
        Option(HOW, _MEASURED, "RELEASES", ("--with",), True),
        Field(alias="with", min_length=1),
    ] = [""]
    """Measure with other releases, which weighin installs in a folder of their own: transformers==4.57.1; several packages: A==1,B==2; latest: the newest of what the strategy needs; pinned: what is installed here. Each --with is measured by itself."""
    timeout_s: Annotated[_Seconds, Option(LIMITS, _MEASURED, "SECONDS", ("--timeout",))] = Field(
        default_factory=lambda known: 0.0 if known.get("commands") else 600.0
    )
    """Seconds after which a measured process is killed; 0 for never."""
    mounts: Annotated[tuple[str, ...], BeforeValidator(_as_list)] = ()
    """Files and folders that a container may read, at the same path: `--set mounts=[/data]`."""
    description: str = ""
    """One line for `weighin list suites`."""
    engine: Annotated[
        dict[str, Any],
        BeforeValidator(lambda value: {"name": value} if isinstance(value, str) else value),
        Option(HOW, "bench run", "NAME"),
    ] = {}
    """Where to measure: local, on this machine, or ray, on a Ray cluster's nodes with the resource weighin_slot."""
    address: Annotated[str, Field(exclude=True)] = ""
    """With the engine ray, the cluster's HOST:PORT. Default: auto, this machine's cluster."""
    labels: Annotated[dict[str, str], Field(exclude=True)] = {}
    """With the engine ray, labels that a node must have: `ray.io/accelerator-type=H100`."""
    shard: _Shard = ""
    """Measure only a part of the cells: 2/8 is every eighth cell, beginning with the second."""
    wait: Annotated[bool, Field(exclude=True)] = False
    """If another run measures on this machine, wait for its end instead of exiting with code 4."""


_ONLY_OF_LOADS: Final[dict[str, object]] = {
    "cache": "cold", "uses": FORWARD, "passes": 1, "ranks": 1, "disk": None, "disk_latency": None,
}  # fmt: skip
"""Settings without an effect on a save, each with the only value that it may have there."""
KEYS: Final[dict[str, tuple[str, ...]]] = {
    MODELS: (*Model.known(None), *Load.known(None), *Measure.known(None)),
    COMMANDS: (*Command.known(None), *Measure.known(None)),
}
"""The keys of a suite of models, and of one of commands."""


class Settings(Measure, Load, Command, Model):
    """A matrix of measurements (cells), each ``repeats`` times, and how they are measured.

    plan.json has all settings, so that a stopped run can be resumed. Nobody writes those below: a run finds them.
    """

    cwd: str = ""
    """The working folder of commands."""
    within: Annotated[float | None, Field(gt=0, le=COARSEST)] = None
    """How precisely `weighin floor` finds the floor, as a share of it; other commands have no such setting."""
    aim: Aim = Aim.ENDS
    """The kind of floor (smallest limit) that is searched."""
    checkpoints: dict[str, str] = {}
    """The user's checkpoint of each model, by the model's title, if a suite names several."""
    strategy_paths: dict[str, str] = {}
    """The path of each strategy's file, by the strategy's name."""
    use_paths: dict[str, str] = {}
    """The path of each use in a user's file, by the use's name."""
    python_path: tuple[str, ...] = ()
    """The folders of the user's Python modules."""

    @classmethod
    def known(cls, context: str | None) -> Collection[str]:
        return KEYS.get(context or "") or super().known(context)

    @field_validator(*_ONLY_OF_LOADS)
    @classmethod
    def _check_effect(cls, value: Any, info: ValidationInfo) -> Any:
        usual = _ONLY_OF_LOADS[info.field_name or ""]
        if info.data.get("operation") == "save" and any(each != usual for each in _as_list(value)):
            raise ValueError("it has no effect with operation save", "leave it out")
        return value

    @property
    def selection(self) -> Selection:
        return Selection(self.key, self.strip_prefix)

    @property
    def choice(self) -> FolderChoice:
        return FolderChoice(
            self.variant, self.model_class, self.revision, self.trust_remote_code, self.adapter
        )

    def as_json(self) -> dict[str, Any]:
        """Return what plan.json stores: the settings that differ from their defaults."""
        return self.model_dump(exclude_defaults=True, exclude_unset=True)

    def command(self, label: str) -> SuiteCommand:
        return {each.name: each for each in self.commands}[label]

    def checkpoint_of(self, model: ModelSpec) -> Path | None:
        """Return the user's checkpoint of a model; None if weighin generates the checkpoint."""
        own = self.checkpoints.get(model.title)
        return Path(own) if own else self.checkpoint


_OF_A_MEASUREMENT: Final = {
    "ram", "vram", "disk", "disk_latency", "cache", "operation", "repeats", "passes",
    "steady", "jobs", "engine", "shard",
}  # fmt: skip
"""Keys that a search for a floor sets itself, or does without."""


def used_by(verb: str, kind: str = MODELS) -> set[str]:
    """Return the settings that have an effect on a verb; ``kind`` is MODELS or COMMANDS."""
    keys = {*KEYS[kind]}
    if verb == "floor":
        return keys - _OF_A_MEASUREMENT
    if verb in ("bench", "run", "bisect"):
        return keys
    # Of the keys that are no option of any verb, these verbs use only those of a model.
    typed = {key for key, _, _ in options()}
    own = {key for key, _, _ in options(verb)} | (Model.model_fields.keys() - typed)
    if verb == "predict":
        own |= {"environment", "seed"}
    if verb == "convert":  # which builds no model
        own.remove("kwargs")
    return own


def options(verb: str = "") -> Iterator[tuple[str, FieldInfo, Option]]:
    """Yield the settings that are options of ``verb`` (of any, if it is empty); a command's own as "commands.KEY"."""
    verb = "floor" if verb == "bisect" else verb
    for kind in (Measure, Load, Model, Command, SuiteCommand):
        for name, field in kind.model_fields.items():
            for each in field.metadata:
                if isinstance(each, Option) and (not verb or verb in each.verbs.split()):
                    key = f"commands.{name}" if kind is SuiteCommand else field.alias or name
                    yield key, field, each


def names_of(key: str, option: Option) -> tuple[str, ...]:
    return option.names or (f"--{key.rpartition('.')[2].replace('_', '-')}",)


def typed_as(key: str, verb: str = "") -> str:
    """Return how a setting is typed: ``--ram``, or ``--set passes`` if the verb has no such option."""
    for name, _, option in options(verb):
        if key == name:
            return names_of(name, option)[0].partition("/")[0]
    outer, dot, inner = key.rpartition(".")
    return f"{typed_as(outer, verb)}.{inner}" if dot else f"--set {key}"


Place = Callable[[str], str]
"""Says of a key where it was written: in a file, or as what was typed."""


def in_file(path: object) -> Place:
    return lambda key: f"{path}: {key}"


def validate(
    kind: type[_Kind], content: Mapping[str, Any], place: Place, context: str | None = None
) -> _Kind:
    """Validate ``content`` as a ``kind``; raise ConfigError that names an invalid key or value."""
    try:
        return kind.model_validate(content, context=context)
    except ValidationError as error:
        first = error.errors()[0]
    more, given = first.get("ctx", {}), first["input"]
    key = ".".join(part for part in (*first["loc"], more.get("key")) if isinstance(part, str))
    message, repair = f"{first['msg'][0].lower()}{first['msg'][1:]}", more.get("repair", "")
    if first["type"] == "value_error":
        message, *repairs = more["error"].args
        repair = "".join(repairs)
    elif first["type"] == "missing":
        message, repair = "it is missing", f"add {key.rpartition('.')[2]}"
    elif first["type"] == "too_short":
        message, repair = "it is empty", "give at least one"
    elif not repair:
        message += f", got {given!r}"
        # YAML reads 3, yes and 2026-01-01 as a number, as true and as a date.
        if first["type"] == "string_type" and not isinstance(given, list | dict | None):
            repair = "write the value in quotes"
    raise ConfigError(f"{place(key)}: {message}", repair)


def check_suite(options: Mapping[str, Any]) -> Settings:
    return validate(Settings, options, typed_as)


def merge(sources: Sequence[tuple[Place, Mapping[str, Any]]], kind: str = MODELS) -> Settings:
    """Return the settings of several sources, of which a later one overrides the earlier ones.

    A source that names models takes none of the other keys of ``Model`` from the earlier ones, because
    a checkpoint or an argument is one model's own. A missing key is reported at the first source's place.
    """
    content: dict[str, Any] = {}
    written: dict[str, Place] = {}
    for place, given in sources:
        for name in Model.model_fields if "models" in given else ():
            content.pop(name, None)
        content |= given
        written |= dict.fromkeys(map(str, given), place)

    def named(key: str) -> str:
        return (written.get(key) or written[key.partition(".")[0]])(key)

    settings = validate(Settings, content, named, kind)
    if not (settings.models or settings.commands):
        place, key = sources[0][0], KEYS[kind][0]
        raise ConfigError(f"{place(key)}: the suite names none", f"add the key {key} to the suite")
    return settings


def read_suite_file(path: Path, kind: str) -> dict[str, Any]:
    from weighin.settings.yaml_file import read_mapping  # `weighin run` does without yaml

    content = read_mapping(path)
    other, verb = ("commands", "run") if kind == MODELS else ("models", "bench")
    if other in content:
        raise ConfigError(
            f"{path} is a suite of {other}",
            f"measure it with weighin {verb} --suite {shlex.quote(str(path))}; a suite has models or"
            " commands, not both",
        )
    if "trust_remote_code" in content:
        why = f"{path}: trust_remote_code is a permission, which no file can give"
        raise ConfigError(why, "give it on the command line: --trust-remote-code")
    return content


def read_plan(settings: Mapping[str, Any], cells: Sequence[Cell], place: Path) -> Settings:
    """Return the settings of a plan, also of an older weighin; ignore keys of a later one."""
    content = {name: value for name, value in settings.items() if value is not None}
    # An older weighin stored the settings of commands in an object of their own.
    if isinstance(old := content.pop("command", None), dict):
        own = {"cold": old.get("cold", []), "marks": old.get("marks", [])}
        words = {each.strategy: (each.command, each.environment) for each in cells}
        content |= old | {"cwd": old.get("folder", "")}
        content["commands"] = [
            own | {"name": name, "command": list(command), "environment": environment}
            for name, (command, environment) in words.items()
        ]
    return validate(Settings, content, in_file(place), IN_PLAN)
