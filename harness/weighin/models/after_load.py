"""Change a loaded model of transformers as ``from_pretrained`` changes it after reading the weights.

After the load, ``from_pretrained`` calls the model's ``_init_weights``. This method does
not overwrite a whole loaded tensor, but may write to a part of it. For example, some classes set
the padding token's row of the embedding to zero, whatever values the file has.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weighin.construction.tensor_memory import storage_key

_FLAG = "_is_hf_initialized"  # transformers sets this attribute


def written_after_load(model: Any) -> set[str]:
    """Return the names (in the state dict) of the tensors to which ``from_pretrained`` writes after the load."""
    tensors = model.state_dict(keep_vars=True)
    writes = _Writes({storage_key(tensor) for tensor in tensors.values()})
    with torch.random.fork_rng(devices=[]), as_loaded(model, _tensors(model)), writes:
        model.initialize_weights()
    return {name for name, tensor in tensors.items() if storage_key(tensor) in writes.written}


class _Writes(TorchDispatchMode):
    """Skips each operation that would write to one of ``storages``, and records that storage."""

    def __init__(self, storages: set[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.written: set[Any] = set()
        self._storages = storages

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args and isinstance(args[0], torch.Tensor):
            key = storage_key(args[0])
            if key in self._storages:
                self.written.add(key)
                return args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def as_loaded(model: Any, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Mark ``tensors`` as loaded until the context ends, with the flag that transformers uses. Also
    remove the flag from all modules; the end of the context does not set it again.
    """
    for tensor in tensors:
        setattr(tensor, _FLAG, True)
    for module in model.modules():
        module.__dict__.pop(_FLAG, None)
    try:
        yield
    finally:
        for tensor in tensors:
            tensor.__dict__.pop(_FLAG, None)


def _tensors(model: Any) -> list[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]
