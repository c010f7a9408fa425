"""Check that the machines of a run have enough RAM, the GPU and the isolation: the nodes of a Ray
cluster, or, without nodes, this machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from weighin.cell import Cell
from weighin.errors import ConfigError, IsolationUnavailable
from weighin.isolation import select
from weighin.isolation.base import Isolation
from weighin.probes import environment, gpu_check
from weighin.settings.definition import Settings
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
        ram_bytes, vram_bytes = self.ram_limit_bytes or 0, self.vram_limit_bytes or 0
        if ram_bytes > node.ram_bytes:
            has, ram = format_bytes(node.ram_bytes), format_exact(ram_bytes)
            return f"{node.name} has {has}, less than --ram {ram}"
        if self.device != "cpu":
            index = int(self.device.partition(":")[2] or 0)
            if index >= len(node.gpu_bytes):
                return f"{node.name} has no {self.device}"
            if vram_bytes > node.gpu_bytes[index]:
                has, vram = format_bytes(node.gpu_bytes[index]), format_exact(vram_bytes)
                return f"the GPU of {node.name} has {has}, less than --vram {vram}"
        return ""

    def lacks_now(self, node: Node) -> str:
        """Return why ``node`` cannot run a cell with this demand now; empty if the node can."""
        ram_bytes = self.ram_limit_bytes or 0
        if not (reason := self.obstacle(node)) and ram_bytes > node.free_ram_bytes:
            has, ram = format_bytes(node.free_ram_bytes), format_exact(ram_bytes)
            return f"{node.name} has {has} free, less than --ram {ram}"
        return reason


def choose(settings: Settings, nodes: Sequence[Node]) -> tuple[Isolation, str]:
    """Return an isolation that works on the machines of a run, and a note for the user.

    Raises:
        ConfigError: a RAM limit is too large for every machine, or a GPU option lacks a GPU.
        IsolationUnavailable: no machine has the GPU, or the isolation with all that it must limit.
    """
    check_ram(settings.ram, nodes)
    if settings.device != "cpu":
        check_gpu(settings.device, settings.vram, nodes)
    elif (has_limit := any(limit is not None for limit in settings.vram)) or settings.trace:
        trace = "--trace records the events of the CUDA allocator"
        raise ConfigError(
            f"{'--vram limits GPU memory' if has_limit else trace}, but the device is cpu",
            "add --device cuda, or leave the option out",
        )
    # Commands must ask for a container, because it lacks this machine's programs.
    isolation, note = select.choose(
        "docker" if settings.image else settings.isolation,
        nodes={node.name: node.isolations for node in nodes},
        limited=settings.within is not None or any(limit is not None for limit in settings.ram),
        containers=not settings.commands or settings.isolation != "auto" or bool(settings.image),
        image=settings.image,
    )
    if settings.ram_high is not None:
        if not nodes:
            select.check_soft_limit(isolation)
        for node in nodes:
            if isolation.name != "cgroup" or node.no_soft_limit:
                raise IsolationUnavailable(
                    f"a soft limit (--ram-high) does not work on {node.name}:"
                    f" {node.no_soft_limit or f'the isolation is {isolation.name}'}",
                    "leave out --ram-high, or use nodes with cgroup v2 and --isolation cgroup",
                )
    return isolation, note


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
    for vram in vram_limits if nodes else ():
        reasons = [Demand(None, device, vram).obstacle(node) for node in nodes]
        if all(reasons):
            raise IsolationUnavailable(
                f"no node can run --device {device}: {'; '.join(reasons)}",
                "add a node with a GPU; if Ray does not see the GPU, start Ray on that node"
                " with --num-gpus",
            )
