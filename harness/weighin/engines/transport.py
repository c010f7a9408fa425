"""The interface between the driver and the nodes: assignments go out, events come back."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from weighin.engines.scheduler import Node


class LostTask(Exception):
    """A task ended without its last event. ``with_node``: because its node was lost."""

    def __init__(self, message: str, *, with_node: bool) -> None:
        super().__init__(message)
        self.message = message
        self.with_node = with_node


class Task(Protocol):
    """An assignment that runs on a node (see ``weighin.engines.node``)."""

    def next_event(self) -> bytes | None:
        """Return the next event of a task that ``Transport.wait`` named; None at its end.

        Raises:
            LostTask: the task's process, or its node, was lost.
        """
        ...

    def cancel(self) -> None:
        """Stop the task; its process removes what it started, and then ends."""
        ...


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What a node can do. ``isolations`` maps each isolation to the reason why it does not work."""

    node: Node
    isolations: Mapping[str, str]
    no_soft_limit: str = ""


class Transport(Protocol):
    """The connection of a driver to its nodes."""

    def submit(self, node: Node, assignment: Mapping[str, Any]) -> Task:
        """Start an assignment on a node that has no other one."""
        ...

    def wait(self, tasks: Sequence[Any], timeout_s: float) -> Sequence[Task]:
        """Return the tasks that have a next event, or have ended, within ``timeout_s``."""
        ...

    def is_alive(self, node: Node) -> bool:
        """Tell whether a node still takes part."""
        ...

    def ask_again(self, nodes: Sequence[Node]) -> Sequence[NodeFacts]:
        """Ask nodes what they can do now; a lost node is missing in the answer."""
        ...

    def joined(self, known: Collection[str]) -> tuple[Sequence[NodeFacts], Sequence[str]]:
        """Return the nodes with other ids than ``known`` that can measure, and a line for each other."""
        ...
