"""Describe a measurement: one strategy loads or saves one model once, or one command runs once."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from typing import Any, Final, Literal, Self

from weighin.text import printable
from weighin.units import format_latency, format_rate
from weighin.uses import FORWARD, NONE, TO_DEVICE

CacheState = Literal["cold", "warm", "as found"]
Operation = Literal["load", "save", "command"]

_LONGEST_ARGUMENTS: Final = 64
_KEPT_ARGUMENTS: Final = 48

SYNTHESISED: Final = "weighin.models.synthesised:from_tensors"
"""The builder of a model from the names and shapes of a checkpoint's tensors."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model and the function that builds it: ``builder`` is "package.module:function"."""

    name: str
    builder: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Clean the name, which outputs show."""
        object.__setattr__(self, "name", printable(self.name))

    @property
    def title(self) -> str:
        """The model's name in every output: "gpt2-xl", "mynets:build(width=64)".

        A model without a name of its own is named after its builder and arguments, without spaces.
        Long arguments are shortened and followed by their digest.
        """
        if self.name != self.builder.rpartition(":")[2]:
            return self.name
        return with_arguments(self.builder, self.kwargs)


class _Named:
    """A place beside a cell's fields, so that its name is computed once."""

    __slots__ = ("_series",)
    _series: str


@dataclass(frozen=True, slots=True)
class Cell(_Named):
    """One measurement to take. Limits are in bytes; None means no limit.

    ``ram_high_bytes`` is the soft limit above which the kernel throttles the cell. ``use`` is
    the use of the ready model, of ``weighin.uses`` or a user's own; if it is empty, the use is
    ``passes`` forward passes. ``ranks`` is the number of
    processes that load the model at once, all under the same limits. For a save, ``format`` is the
    format to write and ``device`` is the device that holds the model. ``environment`` holds the
    variables that are added to the parent's environment when the worker starts.

    ``disk_bytes_per_s`` and ``disk_latency_ns`` slow the disk of the checkpoint down; None leaves it
    as fast as it is.

    The cell of a ``command`` has the operation "command": ``strategy`` is its label, and there is
    no model, dtype or format (``of_command``).
    """

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

    @classmethod
    def of_command(
        cls, label: str, command: tuple[str, ...], isolation: str, **fields: Any
    ) -> Self:
        """Return the cell that runs a command; ``fields`` are further fields of the cell."""
        return cls(
            ModelSpec("", ""),
            label,
            isolation,
            dtype="",
            format="",
            cache=fields.pop("cache", "as found"),
            passes=0,
            operation="command",
            command=command,
            **fields,
        )

    @property
    def series(self) -> str:
        """The name that all repeats of this cell share: a hash of every field except ``repeat``.

        A field that has its default value is left out, so that a new field changes no name.
        """
        if name := getattr(self, "_series", ""):
            return name
        usual = Cell(ModelSpec("", ""), "", "")
        fields = {
            each.name: value
            for each in dataclass_fields(self)
            if (value := getattr(self, each.name)) != getattr(usual, each.name)
            and each.name != "repeat"
        }
        fields["model"] = {n: getattr(self.model, n) for n in ("name", "builder", "kwargs")}
        text = json.dumps(fields, sort_keys=True, default=str)
        object.__setattr__(self, "_series", f"{self.strategy}-{_digest(text)[:10]}")
        return self._series

    @property
    def after_load(self) -> str:
        """The name of what follows the load: a use, or "none"."""
        return self.use or (FORWARD if self.passes else NONE)

    @property
    def needs_gpu(self) -> bool:
        """Whether the model is on a GPU at some time."""
        return self.device.startswith("cuda") or self.use == TO_DEVICE

    @property
    def settings(self) -> tuple[str, ...]:
        """The cell's environment variables as sorted texts: ("MALLOC_ARENA_MAX=2",)."""
        return tuple(f"{name}={value}" for name, value in sorted(self.environment.items()))

    @property
    def disk(self) -> tuple[str, ...]:
        """The rate and the latency of the checkpoint's disk, as texts: ("disk=200MB/s", "disk_latency=5ms")."""
        rate, latency_ns = self.disk_bytes_per_s, self.disk_latency_ns
        return (
            *([f"disk={format_rate(rate)}"] if rate else []),
            *([f"disk_latency={format_latency(latency_ns)}"] if latency_ns else []),
        )

    @property
    def id(self) -> str:
        """The name of this cell and of its files, unique within a run."""
        return f"{self.series}-r{self.repeat}"


@dataclass(frozen=True, slots=True)
class Body:
    """A test or a function that a worker runs in place of a load.

    With ``pytest_arguments``, which select one test, the worker writes the test's reports to
    ``path`` as JSON. Without ``pytest_arguments``, ``path`` is a pickle of a function, its
    arguments and its keyword arguments.
    """

    path: str
    pytest_arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """A cell and the paths of the files that its worker reads, as they are inside the isolation.

    ``manifest`` is a file with the names and checksums of the expected tensors. ``python_path``
    lists the folders from which to import the builder of a user's model. ``use_path`` is the file of
    a user's own use. ``target`` is the empty folder that a save, or the use "save", writes to. ``mounts`` are further paths of this machine that a container must
    see. ``trace`` makes the CUDA allocator record its events. ``rank`` is the number of a process
    in a cell of several ranks, counted from 0; None for the worker that starts these processes, and
    for the worker of any other cell. If there is a ``body``, the worker loads no model and reads only
    ``cell``, ``timeout_s`` and ``python_path``. ``throttled_device`` is the name of the disk below /dev
    whose reads the isolation limits to the cell's rate; empty if it limits none.
    """

    cell: Cell
    checkpoint: str
    manifest: str
    strategy_path: str
    python_path: tuple[str, ...] = ()
    timeout_s: float = 600.0
    target: str = ""
    trace: bool = False
    mounts: tuple[str, ...] = ()
    body: Body | None = None
    rank: int | None = None
    throttled_device: str = ""
    use_path: str = ""


def with_arguments(name: str, kwargs: Mapping[str, Any]) -> str:
    """Return a name followed by arguments, without spaces: "nets:build(width=64)"."""
    text = ",".join(f"{key}={_short(kwargs[key])}" for key in sorted(kwargs))
    if len(text) > _LONGEST_ARGUMENTS:
        text = f"{text[:_KEPT_ARGUMENTS]}...{_digest(text)[:8]}"
    return f"{name}({text})" if text else name


def _short(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _digest(text: str) -> str:
    import hashlib  # loads OpenSSL, 4 MiB, which the worker does not need

    return hashlib.sha256(text.encode()).hexdigest()
