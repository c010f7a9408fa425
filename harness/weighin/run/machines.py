"""Check before a run is planned that its machines have the RAM, the GPU and the isolation.

An engine that measures on other machines passes its own ``Machines`` to ``request.start``.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol

from weighin.errors import ConfigError
from weighin.isolation import select
from weighin.isolation.base import Isolation
from weighin.probes import environment
from weighin.run import gpu_check
from weighin.units import format_bytes, format_exact


class Machines(Protocol):
    """The machine or machines that run the cells."""

    def check_ram(self, limits: Sequence[int | None]) -> None:
        """Raise ConfigError if a RAM limit is larger than the RAM of every machine."""

    def check_gpu(self, device: str, vram_limits: Sequence[int | None]) -> None:
        """Raise ConfigError if no machine has the GPU that ``device`` names."""

    def choose(
        self,
        name: str,
        *,
        limited: bool,
        base_image: str | None,
        packages: tuple[str, ...],
        containers: bool = True,
        image: str = "",
    ) -> tuple[Isolation, str]:
        """Return an isolation that works on the machines, and a note for the user.

        The parameters and the errors are those of ``weighin.isolation.select.choose``.
        """

    def check_soft_limit(self, isolation: Isolation) -> None:
        """Raise IsolationUnavailable if ``isolation`` cannot set memory.high (``--ram-high``)."""


class ThisMachine:
    """The machine of this process."""

    def check_ram(self, limits: Sequence[int | None]) -> None:
        total = environment.total_ram_bytes()
        for limit in limits:
            if limit is not None and limit > total:
                raise ConfigError(
                    f"--ram {format_exact(limit)} is more than this machine has"
                    f" ({format_bytes(total)})",
                    "give a smaller limit, or leave out --ram for no limit",
                )

    def check_gpu(self, device: str, vram_limits: Sequence[int | None]) -> None:
        gpu_check.check(device, vram_limits)

    def choose(self, name: str, **asked: Any) -> tuple[Isolation, str]:
        return select.choose(name, **asked)

    def check_soft_limit(self, isolation: Isolation) -> None:
        select.check_soft_limit(isolation)


THIS_MACHINE: Final = ThisMachine()
