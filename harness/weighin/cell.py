"""Define a cell: one measurement of a strategy that loads or saves a model, or of a command."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from dataclasses import fields as dataclass_fields
from functools import cached_property
from typing import Any, Final, Literal, Self

from weighin.text import one_line, printable
from weighin.units import format_latency, format_rate
from weighin.uses import FORWARD, NONE, TO_DEVICE

CacheState = Literal["cold", "warm", "as found"]
Operation = Literal["load", "save", "command"]

_LONGEST_ARGUMENTS: Final = 64
_KEPT_ARGUMENTS: Final = 48

SYNTHESISED: Final = "weighin.models.synthesised:from_tensors"
"""The builder that makes a model from the names and shapes of a checkpoint's tensors."""


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
        """The model's name in tables and files: "gpt2-xl", "mynets:build(width=64)".

        If the name is only the name of the builder's function, the title is the builder with its
        arguments, without spaces. A long text of arguments is cut, and a hash of all follows.
        """
        if self.name != self.builder.rpartition(":")[2]:
            return self.name
        return with_arguments(self.builder, self.kwargs)


@dataclass(frozen=True)
class Cell:
    """A measurement to take. Limits are in bytes; None means no limit.

    Attributes:
        ram_high_bytes: the soft limit above which the kernel throttles the cell's processes.
        use: the name of the operation to run on the loaded model: one in ``weighin.uses``, or the
            user's own. If empty, the model runs ``passes`` forward passes.
        ranks: the number of processes that load the model at the same time, all under the same
            limits.
        format: the format of the checkpoint; for a save, the format to write.
        device: the device of the loaded model; for a save, the device that holds the model.
        environment: the environment variables to add for the measured process.
        disk_bytes_per_s: the rate to which the checkpoint's disk is slowed down; None leaves the disk
            as fast as it is.
        disk_latency_ns: the delay of each request to the checkpoint's disk; None for no delay.
        command: the program and its arguments, for a cell that measures a command and not a load.
            Such a cell has the operation "command" and no model, dtype or format. Its ``strategy``
            is the command's label (``of_command``).
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
        """Return the cell that measures a command; ``fields`` sets further fields of the cell."""
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

    @cached_property
    def series(self) -> str:
        """The name that all repeats of this cell share: the strategy, and a hash of the cell's
        fields without ``repeat``.

        The hash leaves out fields that have their default value. Names therefore stay the same when
        a later version of weighin adds a field.
        """
        usual = Cell(ModelSpec("", ""), "", "")
        fields = {
            each.name: value
            for each in dataclass_fields(self)
            if (value := getattr(self, each.name)) != getattr(usual, each.name)
            and each.name != "repeat"
        }
        fields["model"] = {n: getattr(self.model, n) for n in ("name", "builder", "kwargs")}
        text = json.dumps(fields, sort_keys=True, default=str)
        return f"{self.strategy}-{_digest(text)[:10]}"

    @property
    def after_load(self) -> str:
        """The name of the use after the load, such as "sgd"; "none" if the model is not used."""
        return self.use or (FORWARD if self.passes else NONE)

    @property
    def needs_gpu(self) -> bool:
        """Whether the load, the save or the use of the model needs a GPU."""
        return self.device.startswith("cuda") or self.use == TO_DEVICE

    @property
    def settings(self) -> tuple[str, ...]:
        """The cell's environment variables as sorted texts: ("MALLOC_ARENA_MAX=2",)."""
        return tuple(
            one_line(f"{name}={value}") for name, value in sorted(self.environment.items())
        )

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
    """A test or a function that a worker (measured process) runs in place of a load.

    ``pytest_arguments`` select one test; the worker then writes the test's reports to ``path`` as
    JSON. Without ``pytest_arguments``, the file ``path`` has a pickled function, and the arguments
    to call it with.
    """

    path: str
    pytest_arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """A cell, with the files that the cell's measured process (worker) reads. In a container, the
    paths of a job are the paths inside the container.

    Attributes:
        manifest: a file with the names and checksums of the expected tensors.
        python_path: the folders from which the worker imports a user's own modules.
        target: the empty folder into which a save, or the use "save", writes.
        trace: whether PyTorch's CUDA allocator records every allocation and release.
        mounts: further paths of this machine that a container needs.
        body: a test or function to run in place of a load. The worker then loads no model, and reads
            only ``cell``, ``timeout_s`` and ``python_path``.
        rank: the number of this process, from 0, if several processes (ranks) load the model
            together; None for the worker that starts these processes, and for the worker of a
            cell without ranks.
        use_path: the file of a user's own use; empty for one of weighin's uses.
        listener: the socket to which the worker reports.
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
    use_path: str = ""
    listener: str = ""


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
