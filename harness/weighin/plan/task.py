"""Define a run: its cells, settings and folder, and the machines with the RAM, GPU and isolation that it needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weighin.cell import Cell
from weighin.errors import ConfigError, IsolationUnavailable
from weighin.isolation import select
from weighin.isolation.base import Isolation
from weighin.probes import environment, gpu_memory
from weighin.records import run_folder
from weighin.records.floor import Aim, Floor
from weighin.records.verdict import Reference, reference_of
from weighin.result import SCHEMA, Outcome, Result
from weighin.settings.definition import Settings
from weighin.stream.pretrained_library import Selection
from weighin.units import format_bytes, format_exact

if TYPE_CHECKING:
    from weighin.suite.registry import StrategyInfo


@dataclass(frozen=True, slots=True)
class Planned:
    """A planned cell, why it is not to be run (``skip``), and the strategy of a load or save."""

    cell: Cell
    info: StrategyInfo | None = None
    skip: str = ""

    @property
    def strategy(self) -> StrategyInfo:
        assert self.info
        return self.info

    @property
    def selection(self) -> Selection:
        """The part of the user's checkpoint that the strategy's own options select."""
        options = self.cell.options if self.cell.operation == "load" else {}
        return Selection(options.get("key", ""), options.get("strip_prefix", ""))


@dataclass(frozen=True, slots=True)
class Progress:
    preparing: Callable[[str, float | None], None] = lambda _step, _share_done: None
    starting: Callable[[Cell], None] = lambda _: None
    phase: Callable[[str], None] = lambda _name: None
    narrowed: Callable[[str], None] = lambda _said_of_a_search: None
    finished: Callable[[Result], None] = lambda _: None


@dataclass(frozen=True, slots=True)
class Run:
    folder: Path
    planned: Sequence[Planned]
    isolation: Isolation
    settings: Settings = field(default_factory=Settings)
    is_new: bool = False
    patience_s: float = 0  # the longest wait for another run on this machine
    is_probed: bool = False  # an earlier run with the same limits has tested a worker here
    more_limits: Sequence[tuple[int | None, int]] = ()  # and ranks, for the test of a worker
    results: list[Result] = field(default_factory=list)  # when the run has begun

    def prepare(self) -> None:
        with run_folder.writing(samples := self.folder / "samples"):
            samples.mkdir(exist_ok=True)

    def environment(self) -> dict[str, Any]:
        about = {"isolation": self.isolation.describe()}
        return environment.machine() | environment.code() | about

    def begin(self) -> list[Result]:
        """Set ``results`` to those of the earlier records of a resumed run, and return it."""
        self.results[:] = [] if self.is_new else run_folder.read(self.folder).results
        return self.results

    def unlimited_result(self, cell: Cell) -> Result | None:
        is_limited = cell.ram_limit_bytes is not None
        return Floor(cell, self.results, self.settings.aim).first if is_limited else None

    def reference_for(self, cell: Cell) -> Reference | None:
        """Return the figures without a limit, which show thrashing; None if it is allowed, or no floor is searched."""
        if self.settings.within is None or self.settings.aim is Aim.ENDS:
            return None
        return reference_of(self.unlimited_result(cell))


def skipped(planned: Planned, known_environment: dict[str, Any]) -> Result:
    cell, now = planned.cell, datetime.now(UTC).isoformat(timespec="milliseconds")
    known: dict[str, Any] = {"started_at": now, "environment": known_environment}
    return Result(SCHEMA, cell, Outcome.SKIPPED, planned.skip, **known)


@dataclass(frozen=True, slots=True)
class Node:
    id: str
    name: str
    ram_bytes: int
    free_ram_bytes: int
    isolations: Mapping[str, str] = field(default_factory=dict)  # why each fails; empty: it works
    gpu_bytes: tuple[int, ...] = ()  # of each GPU


@dataclass(frozen=True, slots=True)
class Demand:
    ram_limit_bytes: int | None = None
    device: str = "cpu"
    vram_limit_bytes: int | None = None

    @classmethod
    def of(cls, cell: Cell) -> Demand:
        device = "cuda" if cell.needs_gpu and cell.device == "cpu" else cell.device
        return cls(cell.ram_limit_bytes, device, cell.vram_limit_bytes)

    def obstacle(self, node: Node, *, is_now: bool = False) -> str:
        """Return why ``node`` can never (or not now) run a cell with this demand; empty if it can."""
        ram_bytes, vram_bytes = self.ram_limit_bytes or 0, self.vram_limit_bytes or 0
        ram, has = f"--ram {format_exact(ram_bytes)}", f"{node.name} has"
        if ram_bytes > node.ram_bytes:
            return f"{ram} is more than {has} ({format_bytes(node.ram_bytes)})"
        if self.device != "cpu":
            index = int(self.device.partition(":")[2] or 0)
            if index >= len(node.gpu_bytes):
                return f"{has} no {self.device}"
            if vram_bytes > (gpu_bytes := node.gpu_bytes[index]):
                limit = format_exact(vram_bytes)
                return f"the GPU of {has} {format_bytes(gpu_bytes)}, less than vram={limit}"
        if is_now and ram_bytes > node.free_ram_bytes:
            return f"{has} {format_bytes(node.free_ram_bytes)} free, less than {ram}"
        return ""


def choose(settings: Settings, nodes: Sequence[Node]) -> tuple[Isolation, str]:
    """Return an isolation that works on the run's machines, with a note; refuse limits that fit no machine."""
    if settings.device == "cpu" and any(limit is not None for limit in settings.vram):
        why = "vram limits GPU memory, but the device is cpu"
        raise ConfigError(why, "add --device cuda, or leave vram out")
    check_machines(map(Demand, settings.ram), nodes)
    if settings.device != "cpu":
        check_machines((Demand(None, settings.device, limit) for limit in settings.vram), nodes)
    # Commands must ask for a container, in which they lack this machine's folders and variables.
    return select.choose(
        "docker" if settings.image else settings.isolation,
        nodes={node.name: node.isolations for node in nodes},
        limited=settings.within is not None or any(limit is not None for limit in settings.ram),
        containers=not settings.commands or settings.isolation != "auto" or bool(settings.image),
        image=settings.image,
    )


def check_machines(demands: Iterable[Demand], nodes: Sequence[Node]) -> None:
    """Raise an error if a demand fits none of the nodes, or without nodes not this machine."""
    for demand in demands:
        able = nodes or [_this_machine(demand.device)]
        if all(reasons := [demand.obstacle(node) for node in able]):
            kind = ConfigError if demand.device == "cpu" else IsolationUnavailable
            raise kind("; ".join(reasons), "give a smaller limit, or another device or machine")


def _this_machine(device: str) -> Node:
    gpus: Sequence[gpu_memory.Gpu] = ()
    if device != "cpu" and not (gpus := (seen := gpu_memory.look()).gpus):
        raise IsolationUnavailable(f"--device {device}: {seen.why}", seen.repair)
    total = environment.total_ram_bytes()
    sizes = tuple(gpu.total_bytes for gpu in gpus)
    return Node("", "this machine", total, total, gpu_bytes=sizes)
