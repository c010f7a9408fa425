"""In a prediction, replace code that reads files without torch operations; the new code only
updates the ledger of predicted memory.

``torch.load`` reads files in C++, and ``load_streaming`` in its own threads, so that no torch
operation can be intercepted. ``trunc_normal_`` is patched because it reads values, which a
prediction does not have. Code that this module does not patch runs unchanged.
"""

import json
import mmap
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from weighin.predict.dispatch import CannotFollow
from weighin.predict.ledger import Ledger
from weighin.units import MIB

_CERTAIN_DEVIATIONS: Final = 8  # a normal distribution exceeds 8 standard deviations once in 1e15
_OF_A_STEP_BYTES: Final = 2 * MIB  # the codes, float32 values and result of 64 Ki elements
_POPULATE_READ: Final = 22  # MADV_POPULATE_READ, which Python's mmap does not name


@contextmanager
def declared(ledger: Ledger) -> Iterator[None]:
    """Replace functions that read a checkpoint by functions that only update the ledger."""
    with ExitStack() as stack:
        for place in (
            _archives(ledger),
            _maps(ledger),
            _legacy(ledger),
            _streaming(ledger),
            _trim(ledger),
            _prefetches(),
            _truncated(),
        ):
            stack.enter_context(place)
        yield


@contextmanager
def safetensors_reads(ledger: Ledger, names: dict[str, Any]) -> Iterator[None]:
    """In a strategy's globals ``names``, patch safetensors' functions that read a file in Rust.

    The strategy must import safetensors itself, because the import's memory is part of the load.
    """
    module = sys.modules.get("safetensors.torch")
    if module is None:
        yield
        return
    mapped = module.load_file

    def load_file(filename: Any, device: Any = "cpu", *, backend: str = "mmap") -> Any:
        if backend != "pread":
            return mapped(filename, device=device)
        state = _empty_tensors(Path(filename), module._TYPES)
        for tensor in state.values():
            _filled(ledger, tensor)
        return {name: tensor.to(device) for name, tensor in state.items()}

    def load(data: _FileBytes) -> dict[str, torch.Tensor]:
        state = _empty_tensors(data.path, module._TYPES)
        for tensor in state.values():
            ledger.write(tensor)
        return state

    def read_bytes(self: Path) -> Any:
        if self.suffix != ".safetensors":
            return original(self)
        return _FileBytes(self, _read_storage(ledger, self.stat().st_size))

    original = Path.read_bytes
    fakes = {module.load: load, module.load_file: load_file}
    found = {
        name: fakes[value]
        for name, value in names.items()
        if any(
            value is function for function in fakes
        )  # some values cannot be hashed, so a lookup would fail
    }
    with patch.dict(names, found), patch.object(Path, "read_bytes", read_bytes):
        yield


@dataclass(frozen=True, slots=True)
class _FileBytes:
    """A stand-in for the content of a file: ``memory`` has the file's size, but no values."""

    path: Path
    memory: torch.Tensor


def _empty_tensors(path: Path, dtypes: dict[str, torch.dtype]) -> dict[str, torch.Tensor]:
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {
        name: torch.empty(entry["shape"], dtype=dtypes[entry["dtype"]])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _archives(ledger: Ledger) -> Any:
    """Replace ``torch.load``'s reads of records in zip files by new storages without values."""
    original = torch._C.PyTorchFileReader

    class Reader(original):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            ledger.work["archives"] += 1

        def get_storage_from_record(self, _name: str, nbytes: int, _kind: Any) -> torch.Tensor:
            return _read_storage(ledger, nbytes)

    return patch.object(torch._C, "PyTorchFileReader", Reader)


def _read_storage(ledger: Ledger, nbytes: int) -> torch.Tensor:
    bytes_ = torch.empty(nbytes, dtype=torch.uint8)
    _filled(ledger, bytes_)
    return bytes_


def _filled(ledger: Ledger, tensor: torch.Tensor) -> None:
    ledger.write(tensor)
    ledger.work["read_bytes"] += tensor.nbytes


def _maps(ledger: Ledger) -> Any:
    """In a prediction, let the ledger map files and count their resident pages.

    ``torch.load(mmap=True)`` and safetensors map files with ``UntypedStorage.from_file``.
    """

    def from_file(filename: Any, shared: bool = False, nbytes: int = 0) -> Any:  # noqa: ARG001 (torch's names)
        return ledger.map_file(str(filename), nbytes)

    return patch.object(torch.UntypedStorage, "from_file", staticmethod(from_file))


def _legacy(ledger: Ledger) -> Any:
    """In a prediction, replace the reads of ``torch.load`` from files in the legacy format: torch
    creates all storages first, and the reads then fill them.
    """

    def set_from_file(
        self: torch.UntypedStorage, file: Any, offset: Any, _direct: bool, _element_size: int
    ) -> torch.UntypedStorage:
        if offset is not None:
            file.seek(offset)
        file.seek(8 + self.nbytes(), 1)  # skips the number of elements, and the elements
        whole = torch.empty(0, dtype=torch.uint8).set_(self)
        _filled(ledger, whole)
        return self

    return patch.object(torch.UntypedStorage, "_set_from_file", set_from_file, create=True)


@contextmanager
def _streaming(ledger: Ledger) -> Iterator[None]:
    """In a prediction, replace the reads of ``load_streaming``. They fill tensors that exist
    already, so that only their buffers need further memory.
    """
    from weighin.loader import fill
    from weighin.loader.direct_io import PIECE_BYTES, DiskReaders
    from weighin.loader.memory import Fill

    @contextmanager
    def being_filled(stretches: Sequence[Fill], disk: DiskReaders) -> Iterator[None]:
        yield
        buffers = fill.buffer_bytes(stretches, disk.threads, gpu=False)
        all_buffers = fill.buffer_bytes(stretches, disk.threads, gpu=ledger.cuda is not None)
        pinned = (all_buffers - buffers) // PIECE_BYTES
        with ledger.holding(buffers), ledger.pinning(pinned, PIECE_BYTES):
            for stretch in stretches:
                fresh = ledger.work["fresh_bytes"]
                for tensor in stretch.members:
                    ledger.write(tensor)
                # Huge pages cause few page faults, but zeroing them takes as long as a write.
                ledger.work["fresh_bytes"] = fresh
                ledger.work["written_bytes"] += stretch.memory.nbytes
                ledger.work["read_direct_bytes"] += stretch.source_bytes

    def compute(fills: Sequence[Fill], _threads: int | None) -> None:
        with ledger.holding(fill.cache_threads() * _OF_A_STEP_BYTES if fills else 0):
            for one in fills:
                ledger.write(one.memory)
                ledger.work["read_direct_bytes"] += one.source.storage_bytes

    def fill_groups(groups: Sequence[fill.Group], disk: DiskReaders) -> None:
        with ledger.holding(fill.group_buffer_bytes(groups, disk.threads)):
            for group in groups:
                for tensor in group.tensors:
                    ledger.write(tensor)
                    ledger.work["read_direct_bytes"] += tensor.nbytes

    with (
        patch.object(fill, "being_filled", being_filled),
        patch.object(fill, "fill_groups", fill_groups),
        patch.object(fill, "compute", compute),
    ):
        yield


def _prefetches() -> Any:
    """Patch ``mmap`` to skip prefetches into the page cache, whose size is not predicted."""

    class Mapping(mmap.mmap):
        def madvise(self, option: int, *stretch: int) -> None:
            if option != _POPULATE_READ:
                super().madvise(option, *stretch)

    return patch.object(mmap, "mmap", Mapping)


def _truncated() -> Any:
    """In a prediction, let ``trunc_normal_`` skip its check that no drawn value is outside the
    bounds.

    The check is skipped only for bounds so far from the mean that no value can be outside.
    """
    original = torch.nn.init._no_grad_trunc_normal_

    def trunc_normal(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, **others: Any
    ) -> torch.Tensor:
        try:
            return original(tensor, mean, std, a, b, **others)
        except CannotFollow:
            if min(mean - a, b - mean) < _CERTAIN_DEVIATIONS * std:
                raise
            return tensor

    return patch.object(torch.nn.init, "_no_grad_trunc_normal_", trunc_normal)


def _trim(ledger: Ledger) -> Any:
    """Patch ``give_back_heap`` to record in the ledger that ``malloc_trim`` released pages."""
    from weighin.construction import skeleton

    original: Callable[[], None] = skeleton.give_back_heap

    def give_back_heap() -> None:
        original()
        ledger.trimmed()

    return patch.object(skeleton, "give_back_heap", give_back_heap)
