"""Load a checkpoint straight into a model: no state dict, no second copy, converted on the way.

Tensors are read from their places in the file into fresh memory that asks for huge pages and lies as
the file does, by several threads, a piece at a time. What is converted is read out of the page cache
where it lies there, else by way of memory that is filled last; what goes to a GPU passes two pinned
buffers. Peak: the model, and a few MiB for each thread; while what is cached is copied, its pages in
the cache are mapped, and so in the RSS: up to 400 MiB for each thread.
"""

import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import torch

from harness.checkpoint import layouts
from harness.checkpoint.filling import Fillable, begin_cached, being_filled
from harness.checkpoint.layouts.base import TensorSlice
from harness.checkpoint.layouts.head import plain
from harness.checkpoint.neighbours import prepare
from harness.errors import CheckpointError
from harness.models.building import without_weights

Granularity = Literal["all", "module", "tensor"]

_SHOWN: Final = 3


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Keep Python from looking for garbage: among all that torch imported, while every thread waits."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@_collecting_later()
def load_streaming(
    model: torch.nn.Module | Callable[[], torch.nn.Module],
    checkpoint: Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    threads: int | None = None,
    granularity: Granularity = "all",
) -> torch.nn.Module:
    """Fill ``model`` from a checkpoint of any layout that ``weighin inspect`` reads; return it.

    Give a function that builds it: it is called without weights, while the disk is read already. Or a
    model: then a tensor that has memory of the right device and dtype already is filled where it is,
    any other is replaced. Parameters keep ``requires_grad`` and stay tied; storages that tensors of
    the checkpoint share are read once and stay shared, and blocks that several ranks saved are put
    together. Non-persistent buffers are in no checkpoint: they keep their values, and only go to the
    device and dtype; on the meta device they have none to keep.

    Args:
        dtype: of all floating-point tensors; None keeps the checkpoint's own.
        threads: how many read; None: one for each processor, up to 4, what is cached; 16 what is not.
        granularity: whether reading one tensor, or one module, ends before the next begins.

    Raises:
        CheckpointError: unreadable, or not this model's: missing or unexpected keys, other shapes.
    """
    _, slices = layouts.read(Path(checkpoint))
    groups, device = _by_storage(slices), torch.device(device)
    early: list[Fillable] = []
    if isinstance(model, torch.nn.Module):
        targets = _targets(model, Path(checkpoint), slices)
    else:
        if granularity == "all" and _reads_early(groups, device, dtype):
            early = list(prepare(groups, {}, device, dtype))
        with being_filled(early, threads):
            with without_weights():
                model = model()
            targets = _targets(model, Path(checkpoint), slices)
    owners = dict(model.named_modules(remove_duplicate=False))
    replaced: dict[int, torch.nn.Parameter] = {}
    for batch in _batches([] if early else groups, granularity):
        stretches = list(prepare(batch, targets, device, dtype))
        with being_filled(stretches, threads):
            pass
        _give(owners, targets, stretches, replaced)
    _give(owners, targets, early, replaced)
    _move_other_buffers(model, targets, device, dtype)
    return model


def _reads_early(
    groups: Sequence[Sequence[TensorSlice]], device: torch.device, dtype: torch.dtype | None
) -> bool:
    """Tell whether to read while the model is built: what comes from a disk to a CPU.

    Copying what is cached keeps two processors busy, and the constructor would wait for one of them.
    """
    largest = max(groups, key=lambda group: group[0].nbytes, default=None)
    if largest is None or device.type != "cpu":
        return False
    return not begin_cached(list(prepare([largest], {}, device, dtype)))


def _by_storage(slices: Sequence[TensorSlice]) -> list[list[TensorSlice]]:
    """Group the slices that share a stretch of a file, in the order of the files' bytes."""
    groups: dict[tuple[object, ...], list[TensorSlice]] = {}
    for one in slices:
        parts = tuple((part.start, part.where.file, part.where.offset) for part in one.parts)
        place = one.file, one.storage_offset, one.dtype, parts, one.shape if parts else ()
        groups.setdefault(place, []).append(one)
    return sorted(groups.values(), key=lambda group: (str(group[0].file), group[0].offset))


def _batches(
    groups: list[list[TensorSlice]], granularity: Granularity
) -> Iterator[list[list[TensorSlice]]]:
    """Yield the groups to be read together."""
    if granularity == "all":
        yield groups
    elif granularity == "tensor":
        yield from ([group] for group in groups)
    else:
        modules = itertools.groupby(groups, key=lambda group: group[0].name.rpartition(".")[0])
        yield from (list(members) for _, members in modules)


def _targets(
    model: torch.nn.Module, checkpoint: Path, slices: Sequence[TensorSlice]
) -> dict[str, torch.Tensor]:
    """Return the tensors of a model by their names, which are those of the checkpoint.

    Raises:
        CheckpointError: missing or unexpected keys, other shapes.
    """
    targets: dict[str, torch.Tensor] = model.state_dict(keep_vars=True)
    found = {one.name: one.shape for one in slices}
    problems = {
        "missing": targets.keys() - found.keys(),
        "unexpected": found.keys() - targets.keys(),
        "of another shape": {
            name for name in targets.keys() & found.keys() if found[name] != targets[name].shape
        },
    }
    said = [
        f"{len(names)} {what} ({', '.join(map(plain, sorted(names)[:_SHOWN]))}"
        f"{', ...' * (len(names) > _SHOWN)})"
        for what, names in problems.items()
        if names
    ]
    if said:
        raise CheckpointError(
            f"{checkpoint}: does not fit this model, keys: {'; '.join(said)}",
            "choose the model that this checkpoint was saved from",
        )
    return targets


def _give(
    owners: Mapping[str, torch.nn.Module],
    targets: Mapping[str, torch.Tensor],
    stretches: Sequence[Fillable],
    replaced: dict[int, torch.nn.Parameter],
) -> None:
    """Put what was read in its places; a parameter that has several names stays one.

    Args:
        owners: the modules of the model by their names.
    """
    for one in stretches:
        for name, new in one.views():
            path, _, leaf = name.rpartition(".")
            owner, old = owners[path], targets[name]
            if not isinstance(old, torch.nn.Parameter):
                owner._buffers[leaf] = new
            elif old.is_meta or old.data_ptr() != new.data_ptr():
                if id(old) not in replaced:
                    replaced[id(old)] = torch.nn.Parameter(new, requires_grad=old.requires_grad)
                owner._parameters[leaf] = replaced[id(old)]


def _move_other_buffers(
    model: torch.nn.Module,
    loaded: Mapping[str, torch.Tensor],
    device: torch.device,
    dtype: torch.dtype | None,
) -> None:
    for prefix, module in model.named_modules():
        for leaf, buffer in module._buffers.items():
            name = f"{prefix}.{leaf}" if prefix else leaf
            if buffer is not None and name not in loaded and not buffer.is_meta:
                kind = dtype if dtype and buffer.is_floating_point() else buffer.dtype
                module._buffers[leaf] = buffer.to(device, kind)
