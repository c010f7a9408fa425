"""In a prediction, replace code that reads files without torch operations, and torch's GPU; the new
code only updates the ledger of predicted memory. Code that is not replaced runs unchanged.

``torch.load`` reads files in C++, and ``load_streaming`` in its own threads, so that no torch operation
can be intercepted.

Torch without CUDA refuses to create a tensor on "cuda", or to move a tensor to "cuda". A call that
names the device "cuda" is therefore executed on the CPU, and the ledger records "cuda" as the place
(kind of memory) of the call's results. For a tensor that the ledger places on the GPU, the attribute
``device`` is "cuda".
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
from torch.overrides import TorchFunctionMode
from torch.utils import _device

from weighin.cell import ModelSpec
from weighin.predict.dispatch import CannotFollow
from weighin.predict.ledger import Ledger
from weighin.stream.tensors import storage_key
from weighin.units import MIB

_OF_A_STEP_BYTES: Final = 2 * MIB  # the codes, float32 values and result of 64 Ki elements
_SHAPE_BYTES: Final = 64  # 8 dimensions
_CUDA: Final = torch.device("cuda", 0)


@contextmanager
def declared(ledger: Ledger, model: ModelSpec) -> Iterator[None]:
    """Replace functions that read a checkpoint by functions that only update the ledger."""
    reads = (*_torch_files(ledger), *_streaming(ledger), _prefetches())
    with ExitStack() as stack:
        for patched in (*reads, _truncated(), *_comparison(model)):
            stack.enter_context(patched)
        yield


@contextmanager
def safetensors_reads(ledger: Ledger, names: dict[str, Any]) -> Iterator[None]:
    """In a strategy's globals, patch safetensors' functions that read a file in Rust."""
    module = sys.modules.get("safetensors.torch")
    if module is None:
        yield
        return
    mapped = module.load_file

    def load_file(filename: Any, device: Any = "cpu", *, backend: str = "mmap") -> Any:
        if backend != "pread":
            return mapped(filename, device=device)
        state = _empty_tensors(Path(filename), module._TYPES)
        read = {name: _filled(ledger, tensor) for name, tensor in state.items()}
        return {name: tensor.to(device) for name, tensor in read.items()}

    def load(data: _FileBytes) -> dict[str, torch.Tensor]:
        state = _empty_tensors(data.path, module._TYPES)
        for tensor in state.values():
            ledger.write(tensor)
        return state

    def read_bytes(self: Path) -> Any:
        if self.suffix != ".safetensors":
            return original(self)
        content = torch.empty(self.stat().st_size, dtype=torch.uint8)
        return _FileBytes(self, _filled(ledger, content))

    original = Path.read_bytes
    fakes = ((module.load, load), (module.load_file, load_file))
    # Some values cannot be hashed, so a lookup would fail.
    found = {name: fake for name, value in names.items() for real, fake in fakes if value is real}
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


def _filled(ledger: Ledger, tensor: torch.Tensor) -> torch.Tensor:
    ledger.write(tensor)
    ledger.work["read_bytes"] += tensor.nbytes
    return tensor


def _torch_files(ledger: Ledger) -> Iterator[Any]:
    """Let ``torch.load`` read no values: from records of zip files, mapped files and legacy files."""
    original = torch._C.PyTorchFileReader

    class Reader(original):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            ledger.work["archives"] += 1

        def get_storage_from_record(self, _name: str, nbytes: int, _kind: Any) -> torch.Tensor:
            return _filled(ledger, torch.empty(nbytes, dtype=torch.uint8))

    def from_file(filename: Any, shared: bool = False, nbytes: int = 0) -> Any:  # noqa: ARG001 (torch's names)
        return ledger.map_file(str(filename), nbytes)

    def set_from_file(
        self: torch.UntypedStorage, file: Any, offset: Any, _direct: bool, _element_size: int
    ) -> torch.UntypedStorage:
        if offset is not None:
            file.seek(offset)
        file.seek(8 + self.nbytes(), 1)  # skips the number of elements, and the elements
        _filled(ledger, torch.empty(0, dtype=torch.uint8).set_(self))
        return self

    yield patch.object(torch._C, "PyTorchFileReader", Reader)
    yield patch.object(torch.UntypedStorage, "from_file", staticmethod(from_file))
    yield patch.object(torch.UntypedStorage, "_set_from_file", set_from_file, create=True)


def _streaming(ledger: Ledger) -> Iterator[Any]:
    """Skip the reads of ``load_streaming``: they fill tensors that exist, and only their buffers count."""
    from weighin.stream import construct, filling
    from weighin.stream.bytes import ALIGNMENT, DISK_THREADS, HUGE_PAGE_BYTES, PIECE_BYTES, Disk
    from weighin.stream.slices import Fill

    original: Callable[[], None] = construct.give_back_heap
    original_fill = filling.fill

    def fill(fills: Sequence[Fill], disk: Disk) -> None:
        stored = [one for one in fills if not one.where.fill]
        computed = [one for one in fills if one.where.fill]
        threads, used_bytes = disk.threads or DISK_THREADS, 0
        for where, out in stored:
            is_straight = out.dtype == where.dtype and out.nbytes > PIECE_BYTES and not where.parts
            used_bytes += 4 * ALIGNMENT if is_straight else where.nbytes
        piece_bytes = filling.piece_bytes_of(sum(one.where.nbytes for one in stored), threads)
        buffers_bytes = min(threads * (piece_bytes + 3 * ALIGNMENT), used_bytes)
        pinned = 2 * threads if stored and ledger.cuda is not None else 0
        with ledger.holding(buffers_bytes), ledger.pinning(pinned, piece_bytes):
            for where, out in stored:
                fresh = ledger.work["fresh_bytes"]
                ledger.write(out)
                # Libraries read shapes that quantised weights have as small tensors.
                block = ledger.block_of(out)
                is_shape = (
                    out.nbytes == block.nbytes <= _SHAPE_BYTES and not out.is_floating_point()
                )
                if ledger.has_values and is_shape:
                    original_fill([Fill(where, out)], disk)
                    block.known = True
                if out.nbytes >= HUGE_PAGE_BYTES:
                    # Huge pages cause few page faults, but zeroing them takes as long as a write.
                    ledger.work["fresh_bytes"] = fresh
                    ledger.work["written_bytes"] += out.nbytes
                ledger.work["read_direct_bytes"] += where.nbytes
        with ledger.holding(filling.cache_threads() * _OF_A_STEP_BYTES if computed else 0):
            for where, out in computed:
                ledger.write(out)
                ledger.work["read_direct_bytes"] += where.storage_bytes

    def give_back_heap() -> None:
        original()
        for heap in ledger.heaps:
            heap.trim()

    yield patch.object(filling, "fill", fill)
    yield patch.object(construct, "give_back_heap", give_back_heap)


def _prefetches() -> Any:
    """Skip prefetches into the page cache, whose size is not predicted."""

    class Mapping(mmap.mmap):
        def madvise(self, option: int, *stretch: int) -> None:
            if option != 22:  # MADV_POPULATE_READ, which Python's mmap does not name
                super().madvise(option, *stretch)

    return patch.object(mmap, "mmap", Mapping)


def _comparison(model: ModelSpec) -> Iterator[Any]:
    """Answer ``from_pretrained``, which compares two names that the class ties if the files have both.

    The answer is known: ``models.description`` has compared the values in the user's files.
    """

    def are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
        return model.kwargs.get("ties") is None or storage_key(one) == storage_key(other)

    utils, name = sys.modules.get("transformers.modeling_utils"), "_tied_params_are_equal"
    if hasattr(utils, name):  # older releases call torch.equal, which cannot be followed
        yield patch.object(utils, name, are_equal)


def _truncated() -> Any:
    """Let ``trunc_normal_`` read no drawn value if its bounds are so far that none can be outside."""
    original = torch.nn.init._no_grad_trunc_normal_

    def trunc_normal(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, **others: Any
    ) -> torch.Tensor:
        try:
            return original(tensor, mean, std, a, b, **others)
        except CannotFollow:
            if min(mean - a, b - mean) < 8 * std:  # a normal distribution exceeds this once in 1e15
                raise
            return tensor

    return patch.object(torch.nn.init, "_no_grad_trunc_normal_", trunc_normal)


class Devices(TorchFunctionMode):
    """Rewrites calls that name "cuda", and answers device queries of tensors on the simulated GPU."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._own: dict[Any, Callable[..., Any]] = {
            torch.Tensor.device.__get__: self._device,
            torch.Tensor.is_cuda.__get__: self._is_cuda,  # type: ignore[attr-defined]
            torch.Tensor.is_cpu.__get__: lambda one: self._device(one).type == "cpu",  # type: ignore[attr-defined]
            torch.Tensor.get_device: lambda one: 0 if self._is_cuda(one) else -1,
            torch.Tensor.to: self._to,
            torch.Tensor.cuda: lambda one, device=None, *_, **__: self._to(
                one, _CUDA if device is None else device
            ),
            torch.Tensor.cpu: lambda one, *_, **__: self._to(one, torch.device("cpu")),
            torch.Tensor.pin_memory: self._pin_memory,
            torch._C._nn._parse_to: self._parsed,  # Module.to() calls it, and it creates no tensor
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = self._own.get(func)
        if own is not None:
            return own(*args, **kwargs)
        target = kwargs.get("device")
        if target is None and func in _device._device_constructors():
            target = _device.CURRENT_DEVICE  # this mode runs before that of "with torch.device()"
        if target is None:
            return func(*args, **kwargs)
        if not _is_cuda(target):
            with self._ledger.placed("host" if torch.device(target).type == "cpu" else None):
                return func(*args, **kwargs)
        with self._ledger.placed("cuda"):
            return func(*args, **{**kwargs, "device": "cpu"})

    def _device(self, tensor: torch.Tensor) -> torch.device:
        return _CUDA if self._is_cuda(tensor) else torch.device("meta" if tensor.is_meta else "cpu")

    def _is_cuda(self, tensor: torch.Tensor) -> bool:
        return self._ledger.place_of(tensor) == "cuda"

    def _pin_memory(self, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        """Copy a tensor into page-locked memory, which torch's host allocator never releases."""
        with self._ledger.placed("pinned"):
            pinned = torch.empty_like(tensor, device="cpu")
        pinned.copy_(tensor)
        return pinned

    def _parsed(self, *args: Any, **kwargs: Any) -> Any:
        """Return the device, dtype, non_blocking and memory format that arguments of ``to`` name."""
        if args and isinstance(args[0], torch.Tensor):
            args = (self._device(args[0]), args[0].dtype, *args[1:])
        named = {name: _named(value) for name, value in kwargs.items()}
        return torch._C._nn._parse_to(*map(_named, args), **named)

    def _to(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        copy = kwargs.pop("copy", False)
        device, dtype, _, memory_format = self._parsed(*args, **kwargs)
        if device is None or device.type == self._device(tensor).type:
            return tensor.to(dtype or tensor.dtype, copy=copy, memory_format=memory_format)
        if device.type == "meta" or tensor.is_meta:
            return tensor.to(device, dtype or tensor.dtype)
        with self._ledger.placed("cuda" if _is_cuda(device) else "host"):
            moved = torch.empty_like(tensor, dtype=dtype, device="cpu", requires_grad=False)
        moved.copy_(tensor.detach())
        return moved


@contextmanager
def pretended(ledger: Ledger) -> Iterator[None]:
    """Simulate one GPU until the context exits; the ledger's allocator manages the GPU's memory."""
    allocator = ledger.cuda
    assert allocator is not None
    answers: dict[str, Any] = {
        # Each name needs its own function: torch._dynamo refuses one object with two names.
        "synchronize": lambda *_: None,
        "init": lambda *_: None,
        "set_device": lambda *_: None,
        "ipc_collect": lambda *_: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "empty_cache": allocator.empty_cache,
        "memory_allocated": lambda *_: allocator.current["allocated"],
        "memory_reserved": lambda *_: allocator.current["reserved"],
        "max_memory_allocated": lambda *_: allocator.peak["allocated"],
        "max_memory_reserved": lambda *_: allocator.peak["reserved"],
    }
    with patch.multiple(torch.cuda, **answers), _deserialized(), Devices(ledger):
        yield


@contextmanager
def _deserialized() -> Iterator[None]:
    """Simulate ``torch.load(map_location="cuda")``, which copies and frees each CPU storage."""

    def move(storage: Any, location: str) -> Any:
        if not location.startswith("cuda"):
            return None
        moved = torch.empty(storage.nbytes(), dtype=torch.uint8, device=_CUDA)
        moved.copy_(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
        return moved.untyped_storage()

    registry = "_package_registry"
    before = [*getattr(torch.serialization, registry)]
    with patch.object(torch.serialization, registry, before):
        # Between CPU (10) and CUDA (20).
        torch.serialization.register_package(15, lambda _: None, move)
        yield


def _named(value: Any) -> Any:
    """Return a CUDA device for a number, which torch without CUDA refuses; else return ``value``."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return torch.device("cuda", value) if is_number else value


def _is_cuda(device: Any) -> bool:
    kind = torch.device(_named(device))
    if kind.index:
        raise CannotFollow(f"the code uses {kind}, but a prediction simulates only one GPU")
    return kind.type == "cuda"
