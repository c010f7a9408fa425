"""Check, before a run is planned, that its machines have enough RAM, the GPU and the isolation.

A run has the nodes of a Ray cluster, or, without nodes, this machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weighin.cell import Cell
from weighin.errors import ConfigError, IsolationUnavailable
from weighin.isolation import select
from weighin.isolation.base import Isolation
from weighin.probes import environment, gpu_check
from weighin.units import format_bytes, format_exact


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


def check_ram(limits: Sequence[int | None], nodes: Sequence[Node]) -> None:
    """Raise ConfigError if a RAM limit is larger than the RAM of every machine."""
    if nodes:
        most, who, repair = max(node.ram_bytes for node in nodes), "any node", "add a larger node"
    else:
        most, who, repair = environment.total_ram_bytes(), "this machine", "leave out --ram"
    for limit in limits:
        if limit is not None and limit > most:
            raise ConfigError(
                f"--ram {format_exact(limit)} is more than {who} has ({format_bytes(most)})",
                f"give a smaller limit, or {repair}",
            )


def check_gpu(device: str, vram_limits: Sequence[int | None], nodes: Sequence[Node]) -> None:
    """Raise IsolationUnavailable if no machine has the GPU ``device`` with enough memory."""
    if not nodes:
        gpu_check.check(device, vram_limits)
        return
    for vram in vram_limits:
        reasons = [Demand(None, device, vram).obstacle(node) for node in nodes]
        if all(reasons):
            raise IsolationUnavailable(
                f"no node can run --device {device}: {'; '.join(reasons)}",
                "add a node with a GPU; if Ray does not see the GPU, start Ray on that node"
                " with --num-gpus",
            )


def choose_isolation(
    name: str,
    nodes: Sequence[Node],
    *,
    limited: bool,
    containers: bool = True,
    image: str = "",
) -> tuple[Isolation, str]:
    """Return an isolation that works on the machines, and a note for the user.

    The parameters and the errors are those of ``weighin.isolation.select.choose``. For ``auto``,
    every node must have the isolation. For any other ``name``, one node suffices, and the note names
    the nodes without the isolation.
    """
    if not nodes:
        return select.choose(name, limited=limited, containers=containers, image=image)
    refused = []
    tried = select.NAMES if containers else select.NAMES[1:]
    for candidate in tried if name == "auto" else [name]:
        isolation = select.named(candidate, image)
        if limited and not isolation.limits:
            refused.append(f"{candidate} cannot enforce a RAM limit")
            continue
        broken = [node for node in nodes if node.isolations[candidate]]
        reasons = "; ".join(
            f"{candidate} on {node.name}: {node.isolations[candidate]}" for node in broken
        )
        if not broken:
            return isolation, f"isolation {candidate}: {'; '.join(refused)}" if refused else ""
        if name != "auto" and len(broken) < len(nodes):
            return isolation, f"these nodes take no part in the run: {reasons}"
        refused.append(reasons)
    raise IsolationUnavailable(
        f"no isolation (docker, cgroup, process) works on every node: {'; '.join(refused)}",
        "name an isolation that works on some nodes, and weighin measures only on those"
        " nodes: --isolation cgroup. To find the fault of the others: weighin doctor --engine"
        " ray",
    )


def check_soft_limit(isolation: Isolation, nodes: Sequence[Node]) -> None:
    """Raise IsolationUnavailable if ``isolation`` cannot set memory.high (``--ram-high``)."""
    if not nodes:
        select.check_soft_limit(isolation)
    for node in nodes:
        if isolation.name != "cgroup" or node.no_soft_limit:
            raise IsolationUnavailable(
                f"a soft limit (--ram-high) does not work on {node.name}:"
                f" {node.no_soft_limit or f'the isolation is {isolation.name}'}",
                "leave out --ram-high, or use nodes with cgroup v2 and --isolation cgroup",
            )
