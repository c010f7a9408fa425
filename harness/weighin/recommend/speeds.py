"""The speeds from which ``weighin recommend`` predicts the times of loads that it has no record of."""

from dataclasses import asdict, dataclass
from typing import Final

from weighin.units import GIB


@dataclass(frozen=True, slots=True)
class Speeds:
    """A machine's speeds in bytes per second, and costs in seconds.

    The defaults are those of a small cloud machine. They order strategies better than speeds that
    are measured on the machine within seconds: such figures differ by a factor of two between two
    measurements (docs/decisions/0023-recommend.md).

    Attributes:
        read_bytes_per_s: reading a file that is not in the page cache: one thread, buffered.
        read_direct_bytes_per_s: reading such a file with direct I/O, by several threads.
        map_bytes_per_s: reading such a file through a mapping.
        fault_bytes_per_s: writing to memory for the first time, without a request for huge pages.
        copy_bytes_per_s: copying memory that was written before.
        init_bytes_per_s: initialising a tensor with random numbers, as constructors do.
        archive_s: opening a file with ``torch.load``.
        module_s: importing one Python module.
    """

    read_bytes_per_s: float = 1.2 * GIB
    read_direct_bytes_per_s: float = 2.3 * GIB
    map_bytes_per_s: float = 1.2 * GIB
    fault_bytes_per_s: float = 1.5 * GIB
    copy_bytes_per_s: float = 8 * GIB
    init_bytes_per_s: float = 0.5 * GIB
    archive_s: float = 0.001
    module_s: float = 0.0009

    def slowed(self, times: float) -> "Speeds":
        """Return the speeds of a machine on which all work takes ``times`` times as long."""
        return Speeds(**{
            name: value / times if name.endswith("_per_s") else value * times
            for name, value in asdict(self).items()
        })  # fmt: skip


USUAL: Final = Speeds()
