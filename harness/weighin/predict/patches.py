"""Patches where a load bypasses torch's operations: each records in the ledger what is done there.

``torch.load`` reads files in C++, and ``load_streaming`` reads them in its own threads; no operation
sees either. All other code of a strategy runs unchanged.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from weighin.predict.ledger import Ledger


@contextmanager
def declared(ledger: Ledger) -> Iterator[None]:
    """Patch every function that reads tensors of a checkpoint: it updates the ledger, and reads no bytes."""
    with ExitStack() as stack:
        for place in (
            _archives(ledger),
            _maps(ledger),
            _legacy(ledger),
            _streaming(ledger),
            _trim(ledger),
        ):
            stack.enter_context(place)
        yield


def _archives(ledger: Ledger) -> Any:
    """Patch ``torch.load`` of a zip file: it reads each record into a storage of its own."""
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
    """Record that a tensor was filled from a file."""
    ledger.write(tensor)
    ledger.work["read_bytes"] += tensor.nbytes


def _maps(ledger: Ledger) -> Any:
    """Patch ``torch.load(mmap=True)`` and safetensors: they create a private map of the whole file."""

    def from_file(filename: Any, shared: bool = False, nbytes: int = 0) -> Any:  # noqa: ARG001 (torch's names)
        return ledger.map_file(str(filename), nbytes)

    return patch.object(torch.UntypedStorage, "from_file", staticmethod(from_file))


def _legacy(ledger: Ledger) -> Any:
    """Patch ``torch.load`` of files older than torch 1.6: it creates all storages, then fills them."""

    def set_from_file(
        self: torch.UntypedStorage, file: Any, offset: Any, _direct: bool, _element_size: int
    ) -> torch.UntypedStorage:
        if offset is not None:
            file.seek(offset)
        file.seek(8 + self.nbytes(), 1)  # skips the number of elements and the elements
        whole = torch.empty(0, dtype=torch.uint8).set_(self)
        _filled(ledger, whole)
        return self

    return patch.object(torch.UntypedStorage, "_set_from_file", set_from_file, create=True)


def _streaming(ledger: Ledger) -> Any:
    """Patch ``load_streaming``: its threads read into memory that was allocated before."""
    from weighin.loader import fill
    from weighin.loader.reads import Fillable

    @contextmanager
    def being_filled(stretches: Sequence[Fillable], threads: int | None) -> Iterator[None]:
        yield
        with ledger.holding(fill.buffer_bytes(stretches, threads, gpu=ledger.cuda is not None)):
            for stretch in stretches:
                fresh = ledger.work["fresh_bytes"]
                for tensor in stretch.members:
                    ledger.write(tensor)
                # Huge pages cause few faults. Zeroing them costs time: it counts as written bytes.
                ledger.work["fresh_bytes"] = fresh
                ledger.work["written_bytes"] += stretch.memory.nbytes
                ledger.work["read_direct_bytes"] += stretch.source_bytes

    return patch.object(fill, "being_filled", being_filled)


def _trim(ledger: Ledger) -> Any:
    """Patch ``give_back_heap``: the ledger must know that ``malloc_trim`` released pages."""
    from weighin.models import skeleton

    original: Callable[[], None] = skeleton.give_back_heap

    def give_back_heap() -> None:
        original()
        ledger.trimmed()

    return patch.object(skeleton, "give_back_heap", give_back_heap)
