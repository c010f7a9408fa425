"""What was predicted for one cell. Bytes are integers; None means that it was not followed."""

from dataclasses import dataclass, field
from typing import Any, Final

from weighin.cell import Cell
from weighin.units import MIB

ABOVE_PEAK_BYTES: Final = 16 * MIB
"""From the anonymous peak of what copies to its floor, without page tables; 8 to 24 MB, measured."""


@dataclass(frozen=True, slots=True)
class PredictedPhase:
    """The highest figures inside one phase of a strategy, as ``record.Phase`` has them measured."""

    name: str
    host_anon_peak_bytes: int
    host_file_peak_bytes: int
    cuda_requested_bytes: int | None = None
    cuda_allocated_bytes: int | None = None
    cuda_reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """What a load does on the host until it is ready, as far as it costs time.

    Attributes:
        read_bytes: of files, through the page cache into memory.
        read_direct_bytes: of files, around the page cache, by several threads.
        mapped_bytes: of files, as pages of a map.
        fresh_bytes: pages that are touched for the first time, again where they were given back.
        written_bytes: by copies, fills and whatever else computes values.
        random_bytes: drawn, as constructors do.
        archives: how often a file was opened by ``torch.load``.
        modules: how many of Python's modules were imported.
    """

    read_bytes: int = 0
    read_direct_bytes: int = 0
    mapped_bytes: int = 0
    fresh_bytes: int = 0
    written_bytes: int = 0
    random_bytes: int = 0
    archives: int = 0
    modules: int = 0

    @property
    def disk_read_bytes(self) -> int:
        """Of files, each stretch as often as it would come from the disk."""
        return self.read_bytes + self.read_direct_bytes + self.mapped_bytes


@dataclass(frozen=True, slots=True)
class Prediction:
    """The peaks of one load, from its start until every byte was read (``touch``).

    Attributes:
        model_bytes: of all parameters and buffers, tied ones once.
        baseline_anon_bytes: what the process holds before the load: the import of torch.
        host_anon_peak_bytes: anonymous memory of the process, with that import.
        host_anon_least_bytes: the same in those processes whose heap happens to use again what large
            blocks left; equal where there is nothing of that kind.
        host_anon_most_bytes: the same in those processes where a small block happens to lie above
            large ones, and keeps what they leave from the kernel; equal where they leave nothing.
        tensor_peak_bytes: what of the anonymous memory tensors hold, at most.
        host_file_peak_bytes: mapped pages of files, with those of torch's libraries.
        in_flight_bytes: pages of a mapped file that are being read while the model is touched, which
            a limit cannot take back; 0 where nothing stays mapped. How many, is the disk's setting.
        floor_bytes: the smallest RAM limit under which the load should work in every process.
        cuda_requested_bytes, cuda_allocated_bytes, cuda_reserved_bytes: None where the device is
            the CPU.
        disk_read_bytes: of the checkpoint, where nothing of it is cached.
        reasons: phrases that explain the peak: "keeps two copies of the weights".
        cannot: why it could not be followed, empty where it could; then no figure is given.
    """

    cell: Cell
    cannot: str = ""
    model_bytes: int | None = None
    baseline_anon_bytes: int | None = None
    host_anon_peak_bytes: int | None = None
    host_anon_least_bytes: int | None = None
    host_anon_most_bytes: int | None = None
    tensor_peak_bytes: int | None = None
    host_file_peak_bytes: int | None = None
    in_flight_bytes: int = 0
    floor_bytes: int | None = None
    cuda_requested_bytes: int | None = None
    cuda_allocated_bytes: int | None = None
    cuda_reserved_bytes: int | None = None
    disk_read_bytes: int | None = None
    work: Work = Work()
    phases: tuple[PredictedPhase, ...] = ()
    reasons: tuple[str, ...] = field(default_factory=tuple)

    @property
    def floor_least_bytes(self) -> int | None:
        """The smallest RAM limit under which it should work in some processes, if not in every one.

        A kernel that is short of memory may read less ahead.
        """
        if self.floor_bytes is None:
            return None
        differs = (self.host_anon_most_bytes or 0) - (self.host_anon_least_bytes or 0)
        return self.floor_bytes - differs - self.in_flight_bytes

    @property
    def above_peak_bytes(self) -> int:
        """How far the floor is above the anonymous peak: at least, where that is not known."""
        most = self.host_anon_most_bytes or self.host_anon_peak_bytes
        if self.floor_bytes is None or most is None:
            return ABOVE_PEAK_BYTES
        return self.floor_bytes - most

    @property
    def strategy(self) -> str:
        """The strategy's name."""
        return self.cell.strategy


def from_json(cell: Cell, fields: dict[str, Any]) -> Prediction:
    """Return the prediction that a child process sent as JSON."""
    phases = tuple(PredictedPhase(**phase) for phase in fields.pop("phases", ()))
    reasons = tuple(fields.pop("reasons", ()))
    work = Work(**fields.pop("work", {}))
    return Prediction(cell=cell, phases=phases, reasons=reasons, work=work, **fields)
