"""Choose the next cell (measurement) for each free node; this module does not talk to nodes."""

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from weighin.cell import Cell
from weighin.units import format_bytes, format_exact

MOST_LOSSES: Final = 3
"""A cell is not run again if this many nodes were lost while they ran it: the cell may be the reason."""


@dataclass(frozen=True, slots=True)
class Node:
    """A machine that runs cells (measurements), or one of several jobs on this machine.

    Attributes:
        isolations: for each isolation (such as docker), the reason why it does not work on the node;
            empty if it works.
        gpu_bytes: the memory of each GPU.
        no_soft_limit: the reason why the node cannot set a soft RAM limit; empty if it can.
    """

    id: str
    name: str
    ram_bytes: int
    free_ram_bytes: int
    isolations: Mapping[str, str] = field(default_factory=dict)
    gpu_bytes: tuple[int, ...] = ()
    no_soft_limit: str = ""


@dataclass(frozen=True, slots=True)
class Demand:
    """The properties of a cell that decide which nodes can run the cell."""

    ram_limit_bytes: int | None
    device: str
    vram_limit_bytes: int | None

    @classmethod
    def of(cls, cell: Cell) -> "Demand":
        device = "cuda" if cell.needs_gpu and cell.device == "cpu" else cell.device
        return cls(cell.ram_limit_bytes, device, cell.vram_limit_bytes)

    def obstacle(self, node: Node) -> str:
        """Return why ``node`` can never run a cell with this demand; empty if the node can."""
        limit = self.ram_limit_bytes
        if limit is not None and limit > node.ram_bytes:
            return (
                f"{node.name} has {format_bytes(node.ram_bytes)}, less than"
                f" --ram {format_exact(limit)}"
            )
        if self.device == "cpu":
            return ""
        index = int(self.device.partition(":")[2] or 0)
        if index >= len(node.gpu_bytes):
            return f"{node.name} has no {self.device}"
        vram = self.vram_limit_bytes
        if vram is not None and vram > node.gpu_bytes[index]:
            return (
                f"the GPU of {node.name} has {format_bytes(node.gpu_bytes[index])}, less than"
                f" --vram {format_exact(vram)}"
            )
        return ""

    def lacks_now(self, node: Node) -> str:
        """Return why ``node`` cannot run a cell with this demand now; empty if the node can."""
        if reason := self.obstacle(node):
            return reason
        limit = self.ram_limit_bytes
        if limit is not None and limit > node.free_ram_bytes:
            return (
                f"{node.name} has {format_bytes(node.free_ram_bytes)} free, less than"
                f" --ram {format_exact(limit)}"
            )
        return ""


class Scheduler:
    """The cells that wait for a node: a queue, in the plan's order, for each different ``Demand``."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self._cells = cells
        self._waiting: dict[Demand, list[int]] = {}
        self._losses: Counter[int] = Counter()
        for index, cell in enumerate(cells):  # the indices ascend, so that each list is a heap
            self._waiting.setdefault(Demand.of(cell), []).append(index)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def take(self, node: Node) -> int | None:
        """Remove the first waiting cell that the node can run now, and return its index or else None."""
        first = min(
            (
                (indices[0], demand)
                for demand, indices in self._waiting.items()
                if indices and not demand.lacks_now(node)
            ),
            default=None,
            key=lambda pair: pair[0],
        )
        return heapq.heappop(self._waiting[first[1]]) if first else None

    def can_take(self, node: Node) -> bool:
        return any(
            indices and not demand.lacks_now(node) for demand, indices in self._waiting.items()
        )

    def wants(self, node: Node) -> list[int]:
        """Return the indices of the waiting cells that the node can run now or with more free RAM."""
        return [
            index
            for demand, indices in self._waiting.items()
            if not demand.obstacle(node)
            for index in indices
        ]

    def give_back(self, index: int) -> None:
        """Let a cell wait again because its node could not begin the cell."""
        heapq.heappush(self._waiting[Demand.of(self._cells[index])], index)

    def lost(self, index: int) -> bool:
        """Let a cell wait again because its node was lost, and return True.

        After the third lost node, the cell does not wait again, and ``lost`` returns False.
        """
        self._losses[index] += 1
        if self._losses[index] >= MOST_LOSSES:
            return False
        self.give_back(index)
        return True

    def stuck(self, nodes: Iterable[Node]) -> str:
        """Return, for each of ``nodes``, why it cannot run the first waiting cell."""
        index = min(indices[0] for indices in self._waiting.values() if indices)
        demand = Demand.of(self._cells[index])
        return "; ".join(demand.lacks_now(node) for node in nodes)
