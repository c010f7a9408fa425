"""What is to be measured: one strategy loads (or saves) one model, under one limit, once."""

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

CacheState = Literal["cold", "warm"]
Operation = Literal["load", "save"]

_LONGEST_ARGUMENTS: Final = 64
_KEPT_ARGUMENTS: Final = 48
_FORMER_PACKAGE: Final = "harness."  # what this package was called in records before 0.2
_OUR_MODELS: Final = "weighin.models."


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as a function to call: ``builder`` is "package.module:function"."""

    name: str
    builder: str
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Read a builder of ours by the name that its package had before 0.2."""
        former = _OUR_MODELS.replace("weighin.", _FORMER_PACKAGE)
        if self.builder.startswith(former):
            object.__setattr__(self, "builder", _OUR_MODELS + self.builder.removeprefix(former))

    @property
    def title(self) -> str:
        """What this model is called wherever it is named: "gpt2-xl", "mynets:build(width=64)".

        A model without a name of its own is called after its builder and arguments, without spaces;
        long arguments are cut, and told apart by a digest.
        """
        if self.name != self.builder.rpartition(":")[2]:
            return self.name
        text = ",".join(f"{key}={_short(self.kwargs[key])}" for key in sorted(self.kwargs))
        if len(text) > _LONGEST_ARGUMENTS:
            text = f"{text[:_KEPT_ARGUMENTS]}...{_digest(text)[:8]}"
        return f"{self.builder}({text})" if text else self.builder


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement to take. The limits, in bytes, are None where nothing is limited.

    ``ram_high_bytes`` is the soft limit, above which the kernel slows the cell down; None is none.
    ``passes`` is how many forward passes use the model once it is ready; 0 is none. Of a save,
    ``format`` is what is written, and ``device`` is where the model is.
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

    @property
    def series(self) -> str:
        """A name for all that is measured here, but not for which repeat: equal for equal cells."""
        fields = asdict(self)
        del fields["repeat"]
        if self.model.builder.startswith(_OUR_MODELS):  # records of before 0.2 keep their names
            fields["model"]["builder"] = self.model.builder.replace("weighin.", _FORMER_PACKAGE, 1)
        for name in ("vram_limit_bytes", "ram_high_bytes"):
            if fields[name] is None:
                del fields[name]  # records of before there was one keep their names
        text = json.dumps(fields, sort_keys=True, default=str)
        return f"{self.strategy}-{_digest(text)[:10]}"

    @property
    def id(self) -> str:
        """A name for this very cell and its files, unique within a run."""
        return f"{self.series}-r{self.repeat}"


@dataclass(frozen=True, slots=True)
class Body:
    """A test's body, or a function, that a worker runs in place of a load.

    ``pytest_arguments`` name the one test, and its reports go to ``path`` as JSON; where there are
    none, ``path`` holds a pickle of a function, its arguments and its keyword arguments.
    """

    path: str
    pytest_arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """A cell with the places of all that its worker reads. Paths are the worker's own.

    ``manifest`` holds the expected tensors with their checksums; ``python_path`` holds the
    folders from which the model's builder is imported, where it is not one of ours. ``target`` is
    the empty folder that a save writes to. ``trace`` is
    whether the CUDA allocator notes its every event. With a ``body`` there is no load: of the rest only the cell, the time and ``python_path`` count.
    """

    cell: Cell
    checkpoint: str
    manifest: str
    strategy_path: str
    python_path: tuple[str, ...] = ()
    timeout_s: float = 600.0
    target: str = ""
    trace: bool = False
    body: Body | None = None


def _short(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str)


def _digest(text: str) -> str:
    import hashlib  # OpenSSL takes 4 MiB: the worker, which needs no names, does not pay for it

    return hashlib.sha256(text.encode()).hexdigest()
