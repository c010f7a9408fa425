"""What was predicted for one cell. Bytes are integers; None means that it was not followed."""

from dataclasses import dataclass, field
from typing import Any

from harness.cell import Cell


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
class Prediction:
    """The peaks of one load, from its start until every byte was read (``touch``).

    Attributes:
        model_bytes: of all parameters and buffers, tied ones once.
        baseline_anon_bytes: what the process holds before the load: the import of torch.
        host_anon_peak_bytes: anonymous memory of the process, with that import.
        host_file_peak_bytes: mapped pages of files, with those of torch's libraries.
        floor_bytes: the smallest RAM limit under which the load should work.
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
    host_file_peak_bytes: int | None = None
    floor_bytes: int | None = None
    cuda_requested_bytes: int | None = None
    cuda_allocated_bytes: int | None = None
    cuda_reserved_bytes: int | None = None
    disk_read_bytes: int | None = None
    phases: tuple[PredictedPhase, ...] = ()
    reasons: tuple[str, ...] = field(default_factory=tuple)

    @property
    def strategy(self) -> str:
        """The strategy's name."""
        return self.cell.strategy


def from_json(cell: Cell, fields: dict[str, Any]) -> Prediction:
    """Return the prediction that a child process sent as JSON."""
    phases = tuple(PredictedPhase(**phase) for phase in fields.pop("phases", ()))
    reasons = tuple(fields.pop("reasons", ()))
    return Prediction(cell=cell, phases=phases, reasons=reasons, **fields)
