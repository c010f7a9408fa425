"""Predict a use of a loaded model, such as a training step: run its code without tensor values."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from weighin.cell import FORK, TRAINING, phase_of
from weighin.construction.operations import tensors_in
from weighin.predict.dispatch import CannotFollow
from weighin.predict.extents import Extents
from weighin.predict.ledger import Ledger
from weighin.predict.prediction import PredictedUse
from weighin.predict.storage import extent
from weighin.units import MIB
from weighin.worker.loading import Inputs
from weighin.worker.uses import CHILDREN, Function
from weighin.worker.verify import named_tensors

_OF_A_CHILD_BYTES: Final = 4 * MIB
"""The private memory of a forked Python process, without the weights that it writes."""


@dataclass(frozen=True, slots=True)
class UseToFollow:
    """The use of a loaded model: its name, its function, and inputs of a forward pass."""

    name: str
    function: Function | None = None
    inputs: Inputs | None = None


def follow(ledger: Ledger, model: torch.nn.Module, use: UseToFollow) -> PredictedUse:
    """Run the use, recorded as one phase, and return its peaks; the use "fork" is only computed.

    Raises:
        CannotFollow: the use runs code whose memory cannot be predicted.
    """
    ledger.restart_peaks()
    written_bytes = 0
    with ledger.phase(phase_of(use.name)):
        if use.name == FORK:
            written_bytes = _weight_bytes(model)
        else:
            kept = _perform(ledger, model, use)
            ledger.update()
            del kept
    child_bytes = written_bytes + _OF_A_CHILD_BYTES
    cuda = {
        f"cuda_{kind}_bytes": getattr(ledger.phases[-1], f"cuda_{kind}_bytes")
        for kind in ("requested", "allocated", "reserved")
    }
    return PredictedUse(
        name=use.name,
        host_anon_peak_bytes=ledger.peak_anon_bytes,
        host_anon_least_bytes=min(ledger.least_anon_bytes, ledger.peak_anon_bytes),
        host_anon_most_bytes=max(ledger.most_anon_bytes, ledger.peak_anon_bytes),
        tensor_peak_bytes=ledger.peak_tensor_bytes + CHILDREN * written_bytes,
        host_file_peak_bytes=ledger.peak_file_bytes,
        children_private_bytes=(child_bytes,) * CHILDREN if use.name == FORK else (),
        **cuda,
    )


def _perform(ledger: Ledger, model: torch.nn.Module, use: UseToFollow) -> Any:
    if use.function is None:
        return _forward(model, use.inputs)
    with tempfile.TemporaryDirectory() as folder, _saves():
        try:
            return use.function(model, use.inputs, Path(folder))
        except (CannotFollow, RuntimeError, NotImplementedError):
            if use.name not in TRAINING or use.inputs is None:
                raise
        # Without inputs, the use makes its own gradients; only the activations are then missing.
        for weight in model.parameters():
            weight.grad = None
        ledger.restart_peaks()
        return use.function(model, None, Path(folder))


def _forward(model: torch.nn.Module, inputs: Inputs | None) -> None:
    if inputs is None:
        raise CannotFollow("the model's module has no example_inputs for a forward pass")
    model.eval()
    with torch.inference_mode():
        for tensor in tensors_in(model(*inputs.positional, **inputs.keywords)):
            torch.isfinite(tensor).all()


def _weight_bytes(model: torch.nn.Module) -> int:
    pages = Extents()
    for tensor in named_tensors(model).values():
        pages.add(*extent(tensor))
    return pages.nbytes


@contextmanager
def _saves() -> Iterator[None]:
    """Let ``torch.save`` write no tensor values.

    The memory of the save stays the same, because a real save makes no copy of the values.
    """
    original = torch._C.PyTorchFileWriter

    class Writer(original):  # type: ignore[misc, valid-type]
        def write_record(self, name: str, data: Any, size: int) -> None:
            if isinstance(data, torch.UntypedStorage):
                super().write_record_metadata(name, size)
            else:
                super().write_record(name, data, size)

    with patch.object(torch._C, "PyTorchFileWriter", Writer):
        yield
