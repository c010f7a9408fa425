"""Choose the next cell (measurement) for each free node; this module does not talk to nodes."""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Final

from weighin.cell import Cell
from weighin.plan.nodes import Demand, Node

MOST_LOSSES: Final = 3
"""A cell is not run again if this many nodes were lost while they ran it: the cell may be the reason."""


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
