"""The prediction for one cell (one load). Sizes are integers in bytes; None means not predicted."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from weighin.cell import Cell
from weighin.units import MIB, format_bytes

_NUMBERS: Final = {1: "one copy", 2: "two copies", 3: "three copies"}
_WORTH_SAYING: Final = 0.03  # a share of the model's size; a smaller remainder is not mentioned
ABOVE_PEAK_BYTES: Final = 16 * MIB
"""The predicted RAM floor (sufficient limit) minus the anonymous peak and page tables.

Measurements of strategies that copy the weights gave 8 to 24 MB.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The predicted peaks of a phase, a load or a use.

    The anonymous peak includes the import of torch, and the peak of mapped files' pages torch's
    libraries. Those of the CUDA allocator are None if the device is the CPU.
    """

    host_anon_peak_bytes: int | None = None
    host_file_peak_bytes: int | None = None
    cuda_requested_bytes: int | None = None
    cuda_allocated_bytes: int | None = None
    cuda_reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class PredictedPhase(Peaks):
    """The predicted peaks in one phase of a strategy; ``weighin.result.Phase`` has the measured ones."""

    name: str


@dataclass(frozen=True, slots=True)
class Work:
    """The work on the host that costs time, from a load's start until every byte was read once."""

    read_bytes: int = 0  # from files, through the page cache
    read_direct_bytes: int = 0  # from files with direct I/O, by several threads
    mapped_bytes: int = 0  # as pages of mapped files
    fresh_bytes: int = 0  # of pages that were written for the first time (since their release)
    written_bytes: int = 0  # by copies, fills and computations
    random_bytes: int = 0  # of the random numbers that constructors draw
    archives: int = 0  # files that torch.load opened
    modules: int = 0  # Python modules that were imported
    cpu_ns: int = 0  # processor time of the symbolic run, whose Python code is that of the load

    @property
    def disk_read_bytes(self) -> int:
        """The bytes read from files; a range counts twice if it is read twice."""
        return self.read_bytes + self.read_direct_bytes + self.mapped_bytes


@dataclass(frozen=True, slots=True)
class PredictedUse(Peaks):
    """The predicted memory of a use (an operation on the loaded model); ``Prediction`` explains it."""

    name: str
    host_anon_least_bytes: int
    host_anon_most_bytes: int
    tensor_peak_bytes: int


@dataclass(frozen=True, slots=True)
class Prediction(Peaks):
    """The predicted peaks of one load, from its start until every byte was read (``touch``)."""

    cell: Cell
    cannot: str = ""  # why the cell has no prediction
    model_bytes: int | None = None  # all parameters and buffers; tied tensors count once
    # The memory before the load, after the import of torch.
    baseline_anon_bytes: int | None = None
    baseline_file_bytes: int | None = None
    # The anonymous peak in a process whose heap reuses the holes that freed large blocks leave, and
    # in one where a small block above freed large blocks keeps them in the heap.
    host_anon_least_bytes: int | None = None
    host_anon_most_bytes: int | None = None
    tensor_peak_bytes: int | None = None  # anonymous and page-locked memory of large tensors
    # The pages that are being read from the disk at once while the model is touched, which the kernel
    # cannot reclaim; 0 if no file stays mapped.
    in_flight_bytes: int = 0
    floor_bytes: int | None = None  # RAM limit under which load and use work in every process
    disk_read_bytes: int | None = None  # if no page of the checkpoint is cached
    work: Work = Work()
    phases: tuple[PredictedPhase, ...] = ()  # with that of the use
    reasons: tuple[str, ...] = ()  # of the peak: "keeps two copies of the weights in memory"
    use: PredictedUse | None = None  # which follows the load
    checkpoint_dtype: str = ""  # of most bytes of the checkpoint that is loaded
    is_mixed: bool = True  # the model may have tied weights, or several floating-point dtypes
    computes_buffers: bool = True  # the model may have buffers that no checkpoint has

    @property
    def strategy(self) -> str:
        return self.cell.strategy

    @property
    def floor_least_bytes(self) -> int | None:
        """The RAM limit that suffices if the heap is reused best and the kernel reads ahead less."""
        if self.floor_bytes is None:
            return None
        least = self.with_use("host_anon_least_bytes") or 0
        most = self.with_use("host_anon_most_bytes") or 0
        return self.floor_bytes - (most - least) - self.in_flight_bytes

    @property
    def above_peak_bytes(self) -> int:
        """The RAM floor minus the highest anonymous peak; ``ABOVE_PEAK_BYTES`` if one is unknown."""
        most = self.host_anon_most_bytes or self.host_anon_peak_bytes
        if self.floor_bytes is None or most is None:
            return ABOVE_PEAK_BYTES
        return self.floor_bytes - max(most, self.use.host_anon_most_bytes if self.use else 0)

    def with_use(self, name: str) -> int | None:
        """Return the larger peak of the load and the use; ``name`` is a field: "cuda_reserved_bytes"."""
        sizes = [getattr(one, name) for one in (self, self.use) if one]
        return max((size for size in sizes if size is not None), default=None)


def from_json(cell: Cell, fields: dict[str, Any]) -> Prediction:
    import msgspec  # here, because the predicting process must not import it

    return msgspec.convert(fields | {"cell": cell}, Prediction, from_attributes=True)


def reasons(
    model_bytes: int, tensor_bytes: int, mapped_bytes: int, cuda_bytes: int | None
) -> Iterator[str]:
    """Yield phrases that explain the peaks of tensors in RAM, mapped pages and GPU requests."""

    def copies(size: int) -> str:
        number = int((size + _WORTH_SAYING * model_bytes) // model_bytes)
        rest = size - number * model_bytes
        words = [_NUMBERS.get(number, f"{number} copies") + " of the weights"] if number else []
        words += [format_bytes(rest)] if rest > _WORTH_SAYING * model_bytes else []
        return " and ".join(words)

    if cuda_bytes:
        yield f"keeps {copies(cuda_bytes)} on the GPU"
    if tensor_bytes >= model_bytes * 0.5:
        yield f"keeps {copies(tensor_bytes)} in memory"
    if mapped_bytes >= model_bytes * 0.5:
        yield f"maps {copies(mapped_bytes)}, which the kernel may drop and read again"
