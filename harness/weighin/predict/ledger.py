"""The ledger of a symbolic run: it counts the memory that each storage would use in a real load.

A symbolic run executes a strategy on tensors that only reserve address space. The tensors have real storages,
because some code needs addresses, views or sharing. Large storages are never written, and so use no
memory. The ledger adds up the memory that they would use in a real load.
"""

import ctypes
import mmap
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import torch

from weighin.predict.allocators import Block, CachingAllocator, Extents, Heap
from weighin.predict.prediction import PredictedPhase
from weighin.probes.process import memory_of, read_status
from weighin.result import Memory
from weighin.stream.bytes import MAP_NORESERVE
from weighin.stream.tensors import extent as extent_in_storage
from weighin.units import KIB

Place = Literal["host", "pinned", "file", "cuda", "meta"]

SMALL_BYTES: Final = 64 * KIB
"""Storages up to this size are really written, because code may read their values."""

_ATTRIBUTE: Final = "_weighin_block"  # of a storage: its MemoryBlock


@dataclass(slots=True, eq=False)
class MemoryBlock:
    """The memory that a storage would use in a real load. It is an attribute of the storage, and ends with it."""

    ledger: "Ledger"
    place: Place
    address: int
    nbytes: int
    chunks: tuple[Block, ...] = ()  # in the ledger's heaps
    real: bool = False  # really written, and so memory of this process
    known: bool = True  # the values are the same as in a real load
    pages: Extents = field(default_factory=Extents)
    cuda: Block | None = None

    def __del__(self) -> None:
        self.ledger.freed(self)


@dataclass(slots=True, eq=False)
class MappedFile:
    """A private mapping of a file, and those of its pages that were read."""

    address: int
    nbytes: int
    pages: Extents = field(default_factory=Extents)


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the address of a tensor's first byte, and the number of bytes up to its last byte."""
    start, end = extent_in_storage(tensor)
    return tensor.data_ptr(), end - start


def anon_bytes() -> int:
    """Return the anonymous memory of this process now: imports, objects, small tensors."""
    return memory_of(read_status()).anon_bytes


class Ledger:
    """The current sums and the peaks of one symbolic run, in bytes."""

    def __init__(self, cuda: CachingAllocator | None, baseline: Memory, own_bytes: int = 0) -> None:
        self.cuda = cuda
        self.baseline = baseline
        self.work: Counter[str] = Counter()  # by the field names of Work
        self.peaks: Counter[str] = Counter()  # by the field names of Prediction
        self.phases: list[PredictedPhase] = []
        self.other_anon_bytes = own_bytes  # of this process, which a real load would not need
        self.pinned_bytes = 0
        self.has_values = False  # whether the files are the user's own, and no files of holes
        self.forced_place: Place | None = None  # of new storages; None for the usual place
        self._files: list[MappedFile] = []
        self.heaps = Heap(), Heap(reuses=True), Heap(pinned=True)
        self._free_pinned: Counter[int] = Counter()
        self._mapped_anon_bytes = 0
        self._phase_peaks: Counter[str] = Counter()

    def block_of(self, tensor: torch.Tensor, *, allocated: bool = False) -> MemoryBlock:
        """Return the block of a tensor's storage. A new one grows the heap only if just ``allocated`` by torch."""
        storage = tensor.untyped_storage()
        known: MemoryBlock | None = getattr(storage, _ATTRIBUTE, None)
        if known:
            return known
        address, nbytes = storage.data_ptr(), storage.nbytes()
        place = "file" if self._file_at(address) else self.forced_place or "host"
        real = nbytes <= SMALL_BYTES and place != "file"
        block = MemoryBlock(self, place, address, nbytes, real=real)
        if place == "cuda" and nbytes and self.cuda is not None:
            block.cuda = self.cuda.malloc(nbytes)
        elif place == "pinned":
            self._pin(nbytes)
        elif place == "host" and allocated and not real:
            block.chunks = tuple(heap.malloc(nbytes) for heap in self.heaps)
        setattr(storage, _ATTRIBUTE, block)
        return block

    def place_of(self, tensor: torch.Tensor) -> Place:
        """Return where a tensor would be in a real load: "host", "pinned", "file", "cuda" or "meta"."""
        return "meta" if tensor.is_meta else self.block_of(tensor).place

    @contextmanager
    def placed(self, place: Place | None) -> Iterator[None]:
        """Put new storages in the memory ``place`` until the context exits; None changes nothing."""
        before = self.forced_place
        self.forced_place = place or before
        try:
            yield
        finally:
            self.forced_place = before

    def freed(self, block: MemoryBlock) -> None:
        if block.cuda is not None:
            assert self.cuda
            self.cuda.free(block.cuda)
        elif block.place == "pinned":
            self._free_pinned[_pinned_size(block.nbytes)] += 1
        else:
            for heap, chunk in zip(self.heaps, block.chunks, strict=False):
                heap.free(chunk)
            # Without the heap, whose freed pages may stay resident.
            self._mapped_anon_bytes -= block.pages.nbytes

    def _file_at(self, address: int) -> MappedFile | None:
        inside = (f for f in self._files if f.address <= address < f.address + f.nbytes)
        return next(inside, None)

    def _pin(self, nbytes: int) -> None:
        """Count page-locked memory; torch's CachingHostAllocator reuses freed blocks of the same size."""
        size = _pinned_size(nbytes)
        if self._free_pinned[size]:
            self._free_pinned[size] -= 1
        else:
            self.pinned_bytes += size

    def write(self, tensor: torch.Tensor) -> None:
        """Record a write to all elements of a tensor; really fill a small tensor with zeros."""
        block = self.block_of(tensor)
        block.known = False
        start, length = extent(tensor)
        if block.real:
            ctypes.memset(start, 0, length)
        elif block.place == "host" and block.chunks and block.chunks[0].in_heap:
            fresh, *_ = (
                heap.pages.add(start - block.address + chunk.address, length)
                for heap, chunk in zip(self.heaps, block.chunks, strict=True)
            )
            self.work["fresh_bytes"] += fresh
        elif block.place in ("host", "file"):  # a written page of a private mapping is anonymous
            new = block.pages.add(start, length)
            self._mapped_anon_bytes += new
            self.work["fresh_bytes"] += new
        self.update()

    def read(self, tensor: torch.Tensor) -> None:
        """Record a read of all elements of a tensor, which makes pages of a mapped file resident."""
        if self.block_of(tensor).place == "file":
            start, length = extent(tensor)
            file = self._file_at(start)
            assert file
            self.work["mapped_bytes"] += file.pages.add(start, length)
            self.update()

    @contextmanager
    def pinning(self, count: int, nbytes: int) -> Iterator[None]:
        """Count ``count`` page-locked buffers in the context, for real code that is not run here."""
        for _ in range(count):
            self._pin(nbytes)
        yield
        self._free_pinned[_pinned_size(nbytes)] += count

    @contextmanager
    def holding(self, nbytes: int) -> Iterator[None]:
        """Count ``nbytes`` more of anonymous memory in the context, for code that is not run."""
        self._mapped_anon_bytes += nbytes
        self.update()
        try:
            yield
        finally:
            self._mapped_anon_bytes -= nbytes

    def adopt(self, nbytes: int) -> None:
        """Count ``nbytes`` of this process's memory as the predicted load's, no longer as other memory."""
        self.other_anon_bytes -= nbytes

    def reserve(self, nbytes: int) -> torch.UntypedStorage:
        """Return a storage without resident memory, which may be larger than the machine's RAM.

        safetensors really writes to pinned storages, in Rust. They are shared memory, as in a real
        load, so that ``anon_bytes`` does not count them again.
        """
        kind = mmap.MAP_SHARED if self.forced_place == "pinned" else mmap.MAP_PRIVATE
        area = mmap.mmap(-1, nbytes, flags=kind | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
        return torch.frombuffer(area, dtype=torch.uint8).untyped_storage()

    def map_file(self, path: str, nbytes: int) -> torch.UntypedStorage:
        """Return a storage on a private mapping of a file, as ``UntypedStorage.from_file`` does."""
        flags, prot = mmap.MAP_PRIVATE | MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
        with Path(path).open("rb") as file:
            mapped = mmap.mmap(file.fileno(), nbytes, flags=flags, prot=prot)
        storage = torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()
        mapped_file = MappedFile(storage.data_ptr(), nbytes)
        self._files.append(mapped_file)
        weakref.finalize(mapped, self._files.remove, mapped_file).atexit = False
        return storage

    @property
    def tensor_bytes(self) -> int:
        """The memory of large tensors, anonymous and page-locked; ``anon_bytes`` counts small tensors."""
        return self.heaps[0].pages.nbytes + self._mapped_anon_bytes + self.pinned_bytes

    @property
    def shared_bytes(self) -> int:
        """The shared memory of the process now, which takes RAM as anonymous memory does."""
        return self.baseline.shmem_bytes + self.pinned_bytes

    def update(self) -> None:
        """Raise the peaks to the current sums; the kernel counts page-locked memory as shared."""
        outside = anon_bytes() - self.other_anon_bytes + self._mapped_anon_bytes
        usual, reusing, pinned = (outside + heap.pages.nbytes for heap in self.heaps)
        sums = {
            "host_anon_peak_bytes": usual,
            "host_anon_least_bytes": reusing,
            "host_anon_most_bytes": pinned,
            "tensor_peak_bytes": self.tensor_bytes,
            "host_file_peak_bytes": self.baseline.file_bytes
            + sum(file.pages.nbytes for file in self._files),
        }
        for peaks in (self.peaks, self._phase_peaks):
            for name, size in sums.items():
                peaks[name] = max(peaks[name], size)

    def restart_peaks(self) -> None:
        self.peaks.clear()
        self.update()

    @property
    def figures(self) -> dict[str, Any]:
        """The host's peaks, of which the usual one lies between the least and the most."""
        usual = self.peaks["host_anon_peak_bytes"]
        least = min(self.peaks["host_anon_least_bytes"], usual)
        most = max(self.peaks["host_anon_most_bytes"], usual)
        return dict(self.peaks, host_anon_least_bytes=least, host_anon_most_bytes=most)

    @property
    def cuda_peaks(self) -> dict[str, int]:
        """The allocator's peaks since the last phase began; empty without a GPU."""
        peaks = self.cuda.peak if self.cuda else {}
        return {f"cuda_{kind}_bytes": size for kind, size in peaks.items()}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Record a phase of this name, with the peaks until the context exits."""
        self._phase_peaks.clear()
        self.update()
        if self.cuda:
            self.cuda.reset_peaks()
        yield
        self.update()
        names = ("host_anon_peak_bytes", "host_file_peak_bytes")
        host = {key: self._phase_peaks[key] for key in names}
        self.phases.append(PredictedPhase(name, **host, **self.cuda_peaks))


def _pinned_size(nbytes: int) -> int:
    """Round a size up to a power of two, as torch does for page-locked memory."""
    return 1 << max(nbytes - 1, 0).bit_length()
