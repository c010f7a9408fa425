"""The prediction for one cell. Bytes are integers; None means not predicted."""

from dataclasses import dataclass, field
from typing import Any, Final

from weighin.cell import Cell
from weighin.units import MIB

ABOVE_PEAK_BYTES: Final = 16 * MIB
"""The floor of a copying strategy less its anonymous peak and page tables; measured: 8 to 24 MB."""


@dataclass(frozen=True, slots=True)
class PredictedPhase:
    """The predicted peaks inside one phase of a strategy; ``record.Phase`` has the measured ones."""

    name: str
    host_anon_peak_bytes: int
    host_file_peak_bytes: int
    cuda_requested_bytes: int | None = None
    cuda_allocated_bytes: int | None = None
    cuda_reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a load on the host until it is ready: everything that costs time.

    Attributes:
        read_bytes: read from files through the page cache.
        read_direct_bytes: read from files with direct I/O, by several threads.
        mapped_bytes: read as pages of mapped files.
        fresh_bytes: pages touched for the first time, or again after they were released.
        written_bytes: written by copies, fills and computations.
        random_bytes: random numbers that constructors draw.
        archives: how often ``torch.load`` opened a file.
        modules: how many Python modules were imported.
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
        """Bytes read from files; a range that is read twice counts twice."""
        return self.read_bytes + self.read_direct_bytes + self.mapped_bytes


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted peaks of one load, from its start until every byte was read (``touch``).

    Attributes:
        model_bytes: size of all parameters and buffers; tied ones count once.
        baseline_anon_bytes: anonymous memory before the load, after the import of torch.
        host_anon_peak_bytes: anonymous memory of the process, including that import.
        host_anon_least_bytes: the same in processes whose heap reuses the holes that freed large
            blocks leave; equal if there are no such holes.
        host_anon_most_bytes: the same in processes where a small block lies above freed large
            blocks, so that the kernel does not get them back; equal if there are none.
        tensor_peak_bytes: the part of the anonymous memory that tensors hold.
        host_file_peak_bytes: resident pages of mapped files, including torch's libraries.
        in_flight_bytes: pages of a mapped file that the disk is reading while the model is touched;
            the kernel cannot reclaim them. Depends on the disk's read-ahead; 0 if nothing stays
            mapped.
        floor_bytes: the smallest RAM limit under which the load should work in every process.
        cuda_requested_bytes, cuda_allocated_bytes, cuda_reserved_bytes: None if the device is the
            CPU.
        disk_read_bytes: read from the checkpoint, if nothing of it is cached.
        reasons: phrases that explain the peak: "keeps two copies of the weights".
        cannot: why the cell could not be predicted; empty if it could. If set, no figure is given.
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
        """The smallest RAM limit under which the load should work in at least some processes.

        Leaves out ``in_flight_bytes``: a kernel that is short of memory may read ahead less.
        """
        if self.floor_bytes is None:
            return None
        differs = (self.host_anon_most_bytes or 0) - (self.host_anon_least_bytes or 0)
        return self.floor_bytes - differs - self.in_flight_bytes

    @property
    def above_peak_bytes(self) -> int:
        """The floor less the highest anonymous peak; ``ABOVE_PEAK_BYTES`` if one is unknown."""
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
