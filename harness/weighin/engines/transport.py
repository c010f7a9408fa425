"""The interface between the driver and the nodes: the driver sends assignments, and nodes send events."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from weighin.plan.nodes import Node


class LostTask(Exception):
    """A task ended without its last event; ``with_node`` tells whether its node was lost, too."""

    def __init__(self, message: str, *, with_node: bool) -> None:
        super().__init__(message)
        self.message = message
        self.with_node = with_node


class Task(Protocol):
    """An assignment that runs on a node, in a process of ``weighin.engines.node``."""

    def next_event(self) -> bytes | None:
        """Return the next event of the task; None after its last event.

        The caller first waits until ``Transport.wait`` returns the task.

        Raises:
            LostTask: the task's process, or its node, was lost.
        """

    def cancel(self) -> None:
        """Stop the task: the task's process removes everything that it started, and ends."""


class Transport(Protocol):
    """The connection of a driver to its nodes."""

    def submit(self, node: Node, assignment: Mapping[str, Any]) -> Task:
        """Start an assignment on a node that runs no other assignment."""

    def wait(self, tasks: Sequence[Any], timeout_s: float) -> Sequence[Task]:
        """Return the tasks with a next event or an end; wait at most ``timeout_s`` s for the first one."""

    def is_alive(self, node: Node) -> bool:
        """Tell whether a node still belongs to the cluster."""

    def ask_again(self, nodes: Sequence[Node]) -> Sequence[Node]:
        """Return ``nodes``, each with its present free RAM; leave out nodes that were lost."""

    def joined(self, known: Collection[str]) -> tuple[Sequence[Node], Sequence[str]]:
        """Return the nodes that joined the cluster and can measure, and lines of text.

        Nodes with an id in ``known`` are left out. A line says why a new node cannot measure.
        """
