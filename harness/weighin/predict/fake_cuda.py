"""Simulate one GPU: calls that name "cuda" create CPU storages, which the ledger counts as GPU
memory.

Torch without CUDA refuses to create a tensor on "cuda", or to move a tensor to "cuda". A call that
names the device "cuda" is therefore executed on the CPU, and the ledger records "cuda" as the place
(kind of memory) of the call's results. For a tensor that the ledger places on the GPU, the attribute
``device`` is "cuda".
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _device

from weighin.predict.dispatch import CannotFollow
from weighin.predict.ledger import Ledger

_CUDA: Final = torch.device("cuda", 0)
_PRIORITY: Final = 15  # of a handler of torch.load, between that of the CPU (10) and of CUDA (20)


class Devices(TorchFunctionMode):
    """Rewrites calls that name "cuda", and answers device queries of tensors on the simulated GPU."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()
        self._ledger = ledger
        self._own: dict[Any, Callable[..., Any]] = {
            torch.Tensor.device.__get__: self._device,
            torch.Tensor.is_cuda.__get__: self._is_cuda,  # type: ignore[attr-defined]
            torch.Tensor.is_cpu.__get__: self._is_cpu,  # type: ignore[attr-defined]
            torch.Tensor.get_device: self._get_device,
            torch.Tensor.to: self._to,
            torch.Tensor.cuda: self._cuda,
            torch.Tensor.cpu: self._cpu,
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

    def _is_cpu(self, tensor: torch.Tensor) -> bool:
        return not tensor.is_meta and not self._is_cuda(tensor)

    def _get_device(self, tensor: torch.Tensor) -> int:
        return 0 if self._is_cuda(tensor) else -1

    def _cuda(self, tensor: torch.Tensor, device: Any = None, *_: Any, **__: Any) -> torch.Tensor:
        return self._to(tensor, _CUDA if device is None else device)

    def _cpu(self, tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return self._to(tensor, torch.device("cpu"))

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
    answers: dict[str, Callable[..., Any]] = {
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
    with ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(patch.object(torch.cuda, name, answer))
        stack.enter_context(_deserialized())
        stack.enter_context(Devices(ledger))
        yield


@contextmanager
def _deserialized() -> Iterator[None]:
    """Simulate ``torch.load(map_location="cuda")``.

    For a load onto the GPU, torch reads each storage into CPU memory, copies the storage to the
    GPU, and frees the CPU memory.
    """

    def move(storage: Any, location: str) -> Any:
        if not location.startswith("cuda"):
            return None
        moved = torch.empty(storage.nbytes(), dtype=torch.uint8, device=_CUDA)
        moved.copy_(torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage))
        return moved.untyped_storage()

    registry = "_package_registry"
    before = [*getattr(torch.serialization, registry)]
    with patch.object(torch.serialization, registry, before):
        torch.serialization.register_package(_PRIORITY, lambda _: None, move)
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
