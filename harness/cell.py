"""What is to be measured: one cell is one strategy loading one model, under one limit, once."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from harness.units import format_exact

CacheState = Literal["cold", "warm"]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as a function to call: ``builder`` is "package.module:function"."""

    name: str
    builder: str
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement to take. ``ram_limit_bytes`` is None where nothing is limited."""

    model: ModelSpec
    strategy: str
    isolation: str
    ram_limit_bytes: int | None = None
    device: str = "cpu"
    dtype: str = "float32"
    format: str = "pt"
    cache: CacheState = "cold"
    options: dict[str, Any] = field(default_factory=dict)
    repeat: int = 0

    @property
    def series(self) -> str:
        """All that says what is measured, but not which repeat: equal for comparable cells.

        Reads "gpt2-xl/mmap_assign/docker/8GiB/cpu/float32/pt/cold", with a digest of the
        builder's and the strategy's options behind it where there are any.
        """
        limit = "no limit" if self.ram_limit_bytes is None else format_exact(self.ram_limit_bytes)
        words = [self.model.name, self.strategy, self.isolation, limit]
        words += [self.device, self.dtype, self.format, self.cache]
        if self.options:
            words.append(_digest(self.options))
        return "/".join(words)

    @property
    def id(self) -> str:
        """A name for this cell's files, unique within a run."""
        return f"{self.strategy}-{_digest(asdict(self))}-r{self.repeat}"


@dataclass(frozen=True, slots=True)
class Job:
    """A cell with the places of all that its worker reads. Paths are the worker's own.

    ``manifest`` holds the expected tensors with their checksums; ``python_path`` holds the
    folders from which the model's builder is imported, where it is not one of ours.
    """

    cell: Cell
    checkpoint: str
    manifest: str
    strategy_path: str
    python_path: tuple[str, ...] = ()
    timeout_s: float = 600.0


def _digest(value: dict[str, Any]) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
