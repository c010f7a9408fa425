"""Talk to a Ray cluster: list its nodes, read the state of their memory monitors, start tasks on a node."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from weighin import child_process, install
from weighin.engines.ray import relay
from weighin.engines.transport import LostTask
from weighin.errors import ConfigError, extra
from weighin.protocol import decode_event, encode_event
from weighin.text import one_line

with extra("ray", "--engine ray"):
    import ray
    from ray import ObjectRefGenerator, cloudpickle
    from ray.exceptions import NodeDiedError, RayError

SLOT: Final = "weighin_slot"
START: Final = f"""RAY_memory_monitor_refresh_ms=0 ray start --resources '{{"{SLOT}": 1}}'"""
"""The command that starts a node; add --head for the first node, and --address for the others."""
_NODE_ID: Final = "ray.io/node-id"
_PROBE_S: Final = 120.0

Relay = Callable[[bytes], Iterator[bytes]]
"""A function that Ray runs on a node: it takes an assignment, and yields the assignment's events."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node of a Ray cluster that is alive and has the custom resource ``SLOT``."""

    id: str
    name: str
    gpus: float
    labels: Mapping[str, str]


class RayTask:
    """A ``weighin.engines.transport.Task``: an assignment that runs on a node of a Ray cluster."""

    def __init__(self, stream: "ObjectRefGenerator") -> None:
        self.stream = stream

    def next_event(self) -> bytes | None:
        try:
            event: bytes = ray.get(next(self.stream))
        except StopIteration:
            return None
        except RayError as error:
            message = one_line(str(error), 200)
            raise LostTask(message, with_node=isinstance(error, NodeDiedError)) from None
        return event

    def cancel(self) -> None:
        ray.cancel(self.stream)


def answer(
    node: RayNode, task: RayTask, kind: str, say: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Wait for a task's end, and return its event ``kind``; ``say`` gets a line for each step.

    Raises:
        LostTask: the task's process, or its node, was lost.
        ConfigError: the task ended without this event, as on a node without weighin.
    """
    answers = {}
    for event in filter(None, map(decode_event, iter(task.next_event, None))):
        answers[event["event"]] = event
        if event["event"] == "preparing":
            say(f"{node.name}: {event['text']}")
    if kind not in answers:
        problem = answers.get("error", {}).get("message") or answers["ended"]["stderr"]
        raise ConfigError(
            f"weighin does not run on the node {node.name}: {problem}",
            f"install weighin on that node, in Ray's environment: {install.command('ray', anywhere=True)}",
        )
    return answers[kind]


def no_slot() -> ConfigError:
    return ConfigError(
        f"no node of the cluster has the resource {SLOT} and all labels of --label",
        f"start Ray with this resource on each machine on which weighin is to measure: {START}"
        " --address HOST:6379",
    )


class Cluster:
    """A connection to a Ray cluster, made by ``connected``."""

    def __init__(self, labels: Mapping[str, str], run: Relay = relay.relay) -> None:
        self._labels = dict(labels)
        for module in (relay, child_process):
            cloudpickle.register_pickle_by_value(module)
        self._relay = ray.remote(max_retries=0, num_cpus=0)(run)
        self._look = ray.remote(max_retries=0, num_cpus=0)(relay.look)

    def nodes(self) -> list[RayNode]:
        """Return the living nodes that have the resource ``SLOT`` and the labels of --label."""
        described = [
            RayNode(
                each["NodeID"],
                each["NodeManagerHostname"],
                each["Resources"].get("GPU", 0),
                each.get("Labels", {}),
            )
            for each in ray.nodes()
            if each["Alive"] and each["Resources"].get(SLOT)
        ]
        names = [each.name for each in described]
        return [
            replace(each, name=f"{each.name}/{each.id[:8]}") if names.count(each.name) > 1 else each
            for each in described
            if self._labels.items() <= each.labels.items()
        ]

    def monitor(self, node: RayNode) -> tuple[bool, str]:
        """Return whether Ray's memory monitor (it kills tasks) is on at a node, and the setting as text."""
        configured = ray._private.state.state.get_system_config().get("memory_monitor_refresh_ms")
        if configured is not None:
            return int(configured) > 0, f"the cluster's system config: {configured}"
        value = self.look(node)["refresh_ms"]
        if value is None:
            return True, "RAY_memory_monitor_refresh_ms is not set: Ray's default"
        return value.strip() != "0", f"RAY_memory_monitor_refresh_ms={value}"

    def look(self, node: RayNode) -> dict[str, Any]:
        """Return a node's setting of Ray's memory monitor, and the time of the node's clock.

        Raises:
            LostTask: the node was lost, or did not answer within 120 s.
        """
        at_node = self._look.options(label_selector=self._at(node))
        try:
            facts: dict[str, Any] = ray.get(at_node.remote(), timeout=_PROBE_S)
        except RayError as error:
            raise LostTask(one_line(str(error), 200), with_node=True) from None
        return facts

    def submit(self, node: RayNode, assignment: Mapping[str, Any]) -> RayTask:
        """Start an assignment on a node; because of ``SLOT``, Ray runs one assignment at a time there."""
        line = encode_event({"event": "assignment", **assignment}).rstrip(b"\n")
        resources = {SLOT: 1.0}
        options = {"resources": resources, "num_gpus": node.gpus, "label_selector": self._at(node)}
        return RayTask(self._relay.options(**options).remote(line))

    def wait(self, tasks: Sequence[RayTask], timeout_s: float) -> list[RayTask]:
        streams = {id(task.stream): task for task in tasks}
        ready, _ = ray.wait(
            [task.stream for task in tasks],
            num_returns=len(tasks) if timeout_s == 0 else 1,
            timeout=timeout_s,
        )
        return [streams[id(stream)] for stream in ready]

    def _at(self, node: RayNode) -> dict[str, str]:
        return {_NODE_ID: node.id, **self._labels}


@contextmanager
def connected(
    address: str, labels: Mapping[str, str], run: Relay = relay.relay
) -> Iterator[Cluster]:
    """Connect this process to the cluster, and disconnect it at the end.

    Raises:
        ConfigError: no cluster answers at the address, or it is a ``ray://`` address.
    """
    if address.startswith("ray://"):
        raise ConfigError(
            f"--address {address} is the address of Ray's client server, through which weighin"
            " cannot receive the events of a measurement",
            "run weighin on a machine of the cluster, with --address auto or HOST:6379",
        )
    # Ray prints on standard output that a node was lost; the driver says so itself, on standard error.
    ray._private.worker.print_to_stdstream = lambda *_, **__: None
    # Ray would end this process at SIGTERM with exit code 15, and without its clean-up.
    ray._private.utils.set_sigterm_handler = lambda _: None
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"no Ray cluster answers at --address {address}: {one_line(str(error), 200)}",
            f"start a Ray cluster: {START.replace('ray start', 'ray start --head')}",
        ) from None
    try:
        yield Cluster(labels, run)
    finally:
        ray.shutdown()
