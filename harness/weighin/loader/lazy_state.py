"""Make a state dict without values from a checkpoint, and load it into a model with torch's own code."""

import mmap
import re
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import torch

from weighin.errors import CheckpointError, HarnessError
from weighin.formats.base import TensorSlice
from weighin.formats.converted import Converted
from weighin.formats.misfit import misfit, plain, selecting
from weighin.loader import fill
from weighin.loader.fill import Fill, file_order, is_readable
from weighin.loader.huge_pages import MAP_NORESERVE, TENSOR_ALIGNMENT
from weighin.models.deferred import DeferredLoad, WriteLog

FILLED_DEVICES: Final = frozenset({"cpu", "cuda"})
"""The devices whose memory is filled piece by piece. torch fills tensors on any other device from a
copy on the CPU."""

_MISFIT: Final = re.compile(r"size mismatch for (.+?): copying a param")


def lazy_state(log: WriteLog, slices: Sequence[TensorSlice]) -> dict[str, torch.Tensor]:
    """Return a state dict of tensors without values; ``log`` records the places of the values.

    The tensors reserve address space, and take memory only if a module's code reads them. The state
    dict has the modules' version metadata if the checkpoint has it.

    Raises:
        CheckpointError: a tensor is quantised, or a block of a tensor has gaps between its elements,
            which ``torch.distributed.checkpoint`` never writes.
    """
    for source in slices:
        _check_blocks(source)
    sizes = [-(-_extent(source) * source.dtype.itemsize // TENSOR_ALIGNMENT) for source in slices]
    length = sum(sizes) * TENSOR_ALIGNMENT
    memory = mmap.mmap(-1, max(length, 1), flags=mmap.MAP_PRIVATE | MAP_NORESERVE)
    state: OrderedDict[str, torch.Tensor] = OrderedDict()
    offset = 0
    for source, size in zip(slices, sizes, strict=True):
        if count := _extent(source):
            flat = torch.frombuffer(memory, dtype=source.dtype, count=count, offset=offset)
            tensor = flat.as_strided(source.shape, source.stride)
        else:
            tensor = torch.empty_strided(source.shape, source.stride, dtype=source.dtype)
        log.promise(tensor, source)
        state[source.name] = tensor
        offset += size * TENSOR_ALIGNMENT
    metadata = getattr(slices, "metadata", None)
    if metadata is not None:
        state._metadata = metadata  # type: ignore[attr-defined]
    return state


def read_at_once(load: DeferredLoad) -> None:
    """Read one tensor's values now, even if it is loaded from a view of a tensor in the file."""
    source, target = source_of(load), load.target
    direct = target.device.type in FILLED_DEVICES
    if direct and source is not None and is_readable(source) and not source.encoding:
        _fill(source, target)
        return
    promised, view = load.promise, load.source
    if isinstance(promised, Converted):
        whole = torch.empty(promised.shape, dtype=promised.dtype)
        promised.fill(whole)
        target.copy_(whole.as_strided(view.shape, view.stride(), view.storage_offset()))
        return
    count = _extent(promised) if not promised.parts else promised.nbytes // promised.dtype.itemsize
    flat = torch.empty(count, dtype=promised.dtype)
    if promised.parts:
        _fill(promised, flat.view(promised.shape))
    else:
        _fill(replace(promised, shape=(count,), stride=(1,)), flat)
    if torch._debug_has_internal_overlap(target) == 1:  # the tensor of the file itself, expanded
        target = target.as_strided((count,), (1,), target.storage_offset())
        target.copy_(flat)
        return
    target.copy_(flat.as_strided(view.shape, view.stride(), view.storage_offset()))


def _fill(source: TensorSlice, target: torch.Tensor) -> None:
    with fill.being_filled([Fill(source, target)], 1):
        pass


def source_of(load: DeferredLoad) -> TensorSlice | None:
    """Return the place in the file from which one tensor is loaded.

    The result is None if the tensor is loaded from a view that spans several blocks or has another
    dtype than the file.
    """
    promised: TensorSlice = load.promise
    view = load.source
    same = (tuple(view.shape), view.stride()) == (promised.shape, promised.stride)
    if same and not view.storage_offset() and view.dtype == promised.dtype:
        return promised
    if promised.parts or promised.encoding or view.dtype != promised.dtype:
        return None
    offset = promised.offset + int(view.storage_offset()) * view.element_size()
    return replace(promised, shape=tuple(view.shape), stride=tuple(view.stride()), offset=offset)


def read_whole(source: TensorSlice) -> torch.Tensor:
    """Read one tensor into fresh memory."""
    target = torch.empty(source.shape, dtype=source.dtype)
    if isinstance(source, Converted):
        source.fill(target)
    else:
        _fill(source, target)
    return target


def load_state(
    model: torch.nn.Module,
    state: dict[str, torch.Tensor],
    checkpoint: Path,
    optional: Collection[str] | None = None,
) -> None:
    """Call ``model.load_state_dict(state)``, and turn its errors into CheckpointErrors.

    Args:
        optional: names that may be missing in ``state``; None means that all names are required.

    Raises:
        CheckpointError: keys are missing or unexpected, shapes differ, or a module's own code fails.
    """
    stored = {name: _shape(value) for name, value in state.items()}
    try:
        model.load_state_dict(state, strict=optional is None)
    except HarnessError:
        raise
    except Exception as error:
        if not str(error).startswith("Error(s) in loading state_dict"):
            raise CheckpointError(
                f"{checkpoint}: a module of this model cannot load it: {type(error).__name__}: {error}",
                "choose the model that this checkpoint was saved from; to debug the module's own code, run "
                "model.load_state_dict(torch.load(...))",
            ) from error
        wanted = {name: _shape(value) for name, value in model.state_dict(keep_vars=True).items()}
        problems = {
            "missing": wanted.keys() - stored.keys() - set(optional or ()),
            "unexpected": stored.keys() - wanted.keys(),
            "of another shape": set(_MISFIT.findall(str(error))),
        }
        by_fault = {fault: sorted(map(plain, names)) for fault, names in problems.items()}
        repair = selecting(stored, wanted)
        raise misfit(checkpoint, "this model", by_fault, str(error), repair=repair) from error


def _shape(value: object) -> tuple[int, ...]:
    """Return a tensor's shape; () for other extra state, and for a lazy tensor, which has no shape."""
    if not isinstance(value, torch.Tensor) or torch.nn.parameter.is_lazy(value):
        return ()
    return tuple(value.shape)


def _check_blocks(source: TensorSlice) -> None:
    if source.encoding and not isinstance(source, Converted):
        raise CheckpointError(
            f"{source.file}: {plain(source.name)} is quantised to {source.encoding}, which load_streaming"
            " does not dequantise",
            f"write its values first: weighin convert {source.file} FOLDER --keys model",
        )
    for part in source.parts:
        where = part.where
        if file_order(where) is None:
            raise CheckpointError(
                f"{where.file}: the part of {source.name!r} at byte {where.offset:,} has gaps between its "
                "elements",
                "rewrite the checkpoint with each tensor in one block: "
                f"weighin convert {where.file.parent} WHOLE --format dcp",
            )


def _extent(source: TensorSlice) -> int:
    """Return the number of elements from a tensor's first to its last, gaps included."""
    if 0 in source.shape:
        return 0
    steps = zip(source.shape, source.stride, strict=True)
    return 1 + sum((size - 1) * step for size, step in steps)
