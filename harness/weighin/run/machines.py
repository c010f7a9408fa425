"""Check, before a run is planned, that its machines have enough RAM, the GPU and the isolation.

If other machines measure, as with Ray, a subclass of ``Machines`` is passed to ``request.start``.
"""

from collections.abc import Sequence
from typing import Final

from weighin.errors import ConfigError
from weighin.isolation import select
from weighin.isolation.base import Isolation
from weighin.probes import environment
from weighin.run import gpu_check
from weighin.units import format_bytes, format_exact


class Machines:
    """The machine or machines that run the cells: in this class, the machine of this process."""

    def check_ram(self, limits: Sequence[int | None]) -> None:
        """Raise ConfigError if a RAM limit is larger than the RAM of every machine."""
        total = environment.total_ram_bytes()
        for limit in limits:
            if limit is not None and limit > total:
                raise ConfigError(
                    f"--ram {format_exact(limit)} is more than this machine has"
                    f" ({format_bytes(total)})",
                    "give a smaller limit, or leave out --ram",
                )

    def check_gpu(self, device: str, vram_limits: Sequence[int | None]) -> None:
        """Raise IsolationUnavailable if no machine has the GPU ``device`` with enough memory."""
        gpu_check.check(device, vram_limits)

    def choose(
        self,
        name: str,
        *,
        limited: bool,
        base_image: str | None = None,
        packages: tuple[str, ...] = (),
        containers: bool = True,
        image: str = "",
    ) -> tuple[Isolation, str]:
        """Return an isolation that works on the machines, and a note for the user.

        The parameters and the errors are those of ``weighin.isolation.select.choose``.
        """
        return select.choose(
            name,
            limited=limited,
            base_image=base_image,
            packages=packages,
            containers=containers,
            image=image,
        )

    def check_soft_limit(self, isolation: Isolation) -> None:
        """Raise IsolationUnavailable if ``isolation`` cannot set memory.high (``--ram-high``)."""
        select.check_soft_limit(isolation)


THIS_MACHINE: Final = Machines()
