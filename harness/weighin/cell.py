"""Define a cell: one measurement of a strategy that loads or saves a model, or of a command."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from typing import Any, Final, Literal, Self

from weighin.text import one_line, printable
from weighin.units import format_latency, format_rate

CacheState = Literal["cold", "warm", "as found"]
Operation = Literal["load", "save", "command"]

FORWARD: Final = "forward"
"""A use of a loaded model: what a cell can do with it after the load. A user's own use is a Python file with
a function ``use(model)``, whose name without ".py" is that of the use.
"""
NONE: Final = "none"
"""Stands for no use: the measurement ends when the model is loaded."""
TO_DEVICE: Final = "to-device"
SAVE: Final = "save"
FORK: Final = "fork"
USES: Final = {
    FORWARD: "Run forward passes with the model's example inputs (passes).",
    "write": "Write every weight once, in place.",
    "sgd": "Train one step with SGD without momentum (foreach=False).",
    "adamw": "Train one step with AdamW (foreach=False), which creates AdamW's two states per weight.",
    "to-float32": "Convert the model to float32 with model.to(torch.float32).",
    TO_DEVICE: "Move the model from the CPU to the GPU with model.to(device).",
    "deepcopy": "Copy the model with copy.deepcopy.",
    SAVE: "Save the state dict to a new file with torch.save, and remove the file.",
    FORK: "Fork two processes that write every weight.",
}
"""Maps the name of each of weighin's own uses to one line of help."""
TRAINING: Final = ("sgd", "adamw")
"""The uses that need the gradient of every parameter."""

_PHASE: Final = "use: "  # the name of a strategy's phase has no colon

SYNTHESISED: Final = "weighin.models.synthesised:from_tensors"
"""The builder that makes a model from the names and shapes of a checkpoint's tensors."""

LATEST: Final = "latest"
"""Stands for the newest release of each package that the strategy needs."""

BODY_PLUGIN: Final = "weighin-body"
"""The name of the pytest plugin that records phases when a measured process runs a test."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model. ``builder`` names the function that builds it: "package.module:function"."""

    name: str
    builder: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", printable(self.name))  # terminals show the name

    @property
    def title(self) -> str:
        """The name in tables and files: "gpt2-xl", or for a name that is only the builder's function, the
        builder with its arguments: "mynets:build(width=64)".
        """
        is_own = self.name != self.builder.rpartition(":")[2]
        return self.name if is_own else with_arguments(self.builder, self.kwargs)


@dataclass(frozen=True)
class Cell:
    """A measurement to take; results/README.md documents the fields. A limit of None is no limit."""

    model: ModelSpec
    strategy: str
    isolation: str
    ram_limit_bytes: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    format: str = "pt"
    cache: CacheState = "cold"
    options: dict[str, Any] = field(default_factory=dict)
    passes: int = 1
    ram_high_bytes: int | None = None
    repeat: int = 0
    operation: Operation = "load"
    vram_limit_bytes: int | None = None
    environment: dict[str, str] = field(default_factory=dict)
    ranks: int = 1
    command: tuple[str, ...] = ()
    disk_bytes_per_s: int | None = None
    disk_latency_ns: int | None = None
    use: str = ""
    releases: str = ""

    @classmethod
    def of_command(
        cls, label: str, command: tuple[str, ...], isolation: str, **fields: Any
    ) -> Self:
        """Return the cell that measures a command; ``fields`` sets further fields of the cell."""
        fields = {"operation": "command", "cache": "as found", "passes": 0, **fields}
        fields |= {"dtype": "", "format": "", "command": command}
        return cls(ModelSpec("", ""), label, isolation, **fields)

    @cached_property
    def series(self) -> str:
        """The name that all repeats of this cell share: the strategy, and a hash of the fields that do
        not have their default value. It stays the same when a later version of weighin adds a field.
        """
        usual = vars(Cell(ModelSpec("", ""), "", ""))
        own = {name: getattr(self, name) for name in usual}  # msgspec sets no missing field
        fields = {name: value for name, value in own.items() if value != usual[name]}
        fields.pop("repeat", None)
        fields["model"] = {n: getattr(self.model, n) for n in ("name", "builder", "kwargs")}
        return f"{self.strategy}-{_digest(json.dumps(fields, sort_keys=True, default=str))[:10]}"

    @property
    def after_load(self) -> str:
        return self.use or (FORWARD if self.passes else NONE)

    @property
    def needs_gpu(self) -> bool:
        return self.device.startswith("cuda") or self.use == TO_DEVICE

    @property
    def settings(self) -> tuple[str, ...]:
        """The cell's releases and environment variables as texts: ("with=torch==2.9", "MALLOC_ARENA_MAX=2")."""
        given = {"with": self.releases} if self.releases else {}
        given |= dict(sorted(self.environment.items()))
        return tuple(one_line(f"{name}={one}") for name, one in given.items())

    @property
    def disk(self) -> tuple[str, ...]:
        """The slowed disk's rate and latency as texts: ("disk=200MB/s", "disk_latency=5ms")."""
        rate, latency_ns = self.disk_bytes_per_s, self.disk_latency_ns
        return (
            *([f"disk={format_rate(rate)}"] if rate else []),
            *([f"disk_latency={format_latency(latency_ns)}"] if latency_ns else []),
        )

    @property
    def id(self) -> str:
        """The name of the cell and of the cell's files; no other cell of the run has this name."""
        return f"{self.series}-r{self.repeat}"


@dataclass(frozen=True, slots=True)
class Body:
    """A test or a function that a worker (measured process) runs in place of a load: the test that
    ``pytest_arguments`` select, with its reports in ``path``, or the pickled function in ``path``.
    """

    path: str
    pytest_arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """A cell, with the files that its worker (measured process) reads: their paths as the worker sees
    them. ``rank`` is None for the worker that starts several ranks, or is alone. ``parent`` is the pid of the
    worker's parent; 0 in a container, which has pids of its own. ``files_manifest`` lists the tensors as the files
    have them, for another release of a library, whose models may have other tensors than here.
    """

    cell: Cell
    checkpoint: str
    manifest: str
    strategy_path: str
    python_path: tuple[str, ...] = ()
    target: str = ""
    mounts: tuple[str, ...] = ()
    body: Body | None = None
    rank: int | None = None
    use_path: str = ""
    parent: int = 0
    files_manifest: str = ""


def with_arguments(name: str, kwargs: Mapping[str, Any]) -> str:
    """Return a name followed by arguments, without spaces: "nets:build(width=64)"."""
    short = partial(json.dumps, sort_keys=True, separators=(",", ":"), default=str)
    text = ",".join(f"{key}={short(kwargs[key])}" for key in sorted(kwargs))
    if len(text) > 64:
        text = f"{text[:48]}...{_digest(text)[:8]}"
    return f"{name}({text})" if text else name


def _digest(text: str) -> str:
    import hashlib  # loads OpenSSL, 4 MiB, which the worker does not need

    return hashlib.sha256(text.encode()).hexdigest()


def encode_job(job: Job) -> str:
    return json.dumps(asdict(job))


def decode_job(text: str) -> Job:
    fields: dict[str, Any] = json.loads(text)
    cell, body = fields.pop("cell"), fields.pop("body")
    cell |= {"model": ModelSpec(**cell["model"]), "command": tuple(cell["command"])}
    fields |= {name: tuple(fields[name]) for name in ("python_path", "mounts")}
    body = Body(body["path"], tuple(body["pytest_arguments"])) if body else None
    return Job(cell=Cell(**cell), body=body, **fields)


def phase_of(use: str) -> str:
    return use if use == FORWARD else _PHASE + use


def is_of_use(phase: str) -> bool:
    return phase == FORWARD or phase.startswith(_PHASE)
