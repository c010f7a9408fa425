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
    """The work on the host that costs time, from a load's start until every byte was read once.

    Attributes:
        read_bytes: the bytes read from files through the page cache.
        read_direct_bytes: the bytes read from files with direct I/O, by several threads.
        mapped_bytes: the bytes read as pages of mapped files.
        fresh_bytes: the size of pages that were written for the first time (since their release).
        written_bytes: the bytes written by copies, fills and computations.
        random_bytes: the size of the random numbers that constructors draw.
        archives: the number of files that ``torch.load`` opened.
        modules: the number of Python modules that were imported.
        cpu_ns: the processor time of the symbolic run, whose Python code is that of the load.
    """

    read_bytes: int = 0
    read_direct_bytes: int = 0
    mapped_bytes: int = 0
    fresh_bytes: int = 0
    written_bytes: int = 0
    random_bytes: int = 0
    archives: int = 0
    modules: int = 0
    cpu_ns: int = 0

    @property
    def disk_read_bytes(self) -> int:
        """The bytes read from files; a range counts twice if it is read twice."""
        return self.read_bytes + self.read_direct_bytes + self.mapped_bytes


@dataclass(frozen=True, slots=True)
class PredictedUse(Peaks):
    """The predicted memory of a use (an operation on the loaded model), from its start to its end.

    ``children_private_bytes`` is the private memory of each forked process at its end, and
    ``tensor_peak_bytes`` includes the weights that they write; ``Prediction`` explains the others.
    """

    name: str
    host_anon_least_bytes: int
    host_anon_most_bytes: int
    tensor_peak_bytes: int
    children_private_bytes: tuple[int, ...] = ()

    @property
    def all_peak_bytes(self) -> int:
        """The peak of the anonymous memory of the process and its forked processes."""
        return (self.host_anon_peak_bytes or 0) + sum(self.children_private_bytes)

    @property
    def all_least_bytes(self) -> int:
        """The sum of ``host_anon_least_bytes`` and the private memory of forked processes."""
        return self.host_anon_least_bytes + sum(self.children_private_bytes)

    @property
    def all_most_bytes(self) -> int:
        """The sum of ``host_anon_most_bytes`` and the private memory of forked processes."""
        return self.host_anon_most_bytes + sum(self.children_private_bytes)


@dataclass(frozen=True, slots=True)
class Prediction(Peaks):
    """The predicted peaks of one load, from its start until every byte was read (``touch``).

    Attributes:
        use: the use that follows the load, if any. Only ``floor_bytes`` and ``phases`` include it.
        checkpoint_dtype: the dtype of most bytes of the checkpoint that is loaded.
        model_bytes: the size of all parameters and buffers; tied tensors count once.
        baseline_anon_bytes, baseline_file_bytes: the memory before the load, after the import of torch.
        host_anon_least_bytes: the anonymous peak in a process whose heap reuses the holes that freed
            large blocks leave: the lowest case.
        host_anon_most_bytes: this peak in a process where a small block above freed large blocks
            keeps them in the heap: the highest case.
        tensor_peak_bytes: the peak of anonymous and page-locked memory that large tensors use.
        in_flight_bytes: the size of the pages that are being read from the disk at once while the
            model is touched, which the kernel cannot reclaim. 0 if no file stays mapped.
        floor_bytes: the smallest RAM limit under which load and use should work in every process.
        disk_read_bytes: the bytes read from the checkpoint if no page of it is cached.
        reasons: phrases that explain the peak, such as "keeps two copies of the weights".
        is_mixed: whether the model may have tied weights, or several floating-point dtypes.
        computes_buffers: whether the model may have buffers that no checkpoint has.
        cannot: the reason why the cell has no prediction; empty if the cell was predicted.
    """

    cell: Cell
    cannot: str = ""
    model_bytes: int | None = None
    baseline_anon_bytes: int | None = None
    baseline_file_bytes: int | None = None
    host_anon_least_bytes: int | None = None
    host_anon_most_bytes: int | None = None
    tensor_peak_bytes: int | None = None
    in_flight_bytes: int = 0
    floor_bytes: int | None = None
    disk_read_bytes: int | None = None
    work: Work = Work()
    phases: tuple[PredictedPhase, ...] = ()
    reasons: tuple[str, ...] = ()
    use: PredictedUse | None = None
    checkpoint_dtype: str = ""
    is_mixed: bool = True
    computes_buffers: bool = True

    @property
    def strategy(self) -> str:
        return self.cell.strategy

    @property
    def floor_least_bytes(self) -> int | None:
        """The RAM limit that should suffice in some processes; the kernel may read ahead less then."""
        if self.floor_bytes is None:
            return None
        least, most = self.host_anon_least_bytes or 0, self.host_anon_most_bytes or 0
        if self.use:
            least, most = max(least, self.use.all_least_bytes), max(most, self.use.all_most_bytes)
        return self.floor_bytes - (most - least) - self.in_flight_bytes

    @property
    def above_peak_bytes(self) -> int:
        """The RAM floor minus the highest anonymous peak; ``ABOVE_PEAK_BYTES`` if one is unknown."""
        most = self.host_anon_most_bytes or self.host_anon_peak_bytes
        if self.floor_bytes is None or most is None:
            return ABOVE_PEAK_BYTES
        return self.floor_bytes - max(most, self.use.all_most_bytes if self.use else 0)

    @property
    def use_floor_bytes(self) -> int | None:
        """The smallest RAM limit that suffices for the use alone, without the load before it."""
        return self.use.all_peak_bytes + self.above_peak_bytes if self.use else None

    @property
    def tensors_with_use_bytes(self) -> int:
        """The larger of the load's and the use's ``tensor_peak_bytes``."""
        return max(self.tensor_peak_bytes or 0, self.use.tensor_peak_bytes if self.use else 0)

    def cuda_with_use(self, name: str) -> int | None:
        """Return the larger of the load's and the use's peak ("cuda_reserved_bytes")."""
        sizes = [getattr(self, name), getattr(self.use, name) if self.use else None]
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
