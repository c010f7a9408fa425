"""Convert a group of a file's tensors to a tensor of a model, piece by piece where that is possible.

transformers converts whole tensors, so that the quantised codes, the float32 values and the result
are in memory at the same time. Most dequantisations compute each row, or each expert, independently
of the others. The loader therefore converts a few rows at a time, with the same operations as for
whole tensors, and copies each result into the model. Other conversions run on whole tensors.
"""

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import torch

from weighin.errors import CheckpointError
from weighin.formats.base import TensorSlice
from weighin.loader import smaller_blocks
from weighin.loader.conversion_steps import OF_ROWS, Step, of_fp8
from weighin.loader.direct_io import PieceReader
from weighin.loader.fill import cache_threads, one_thread_each
from weighin.loader.huge_pages import memory_of
from weighin.loader.lazy_state import read_whole
from weighin.models.own_dequantiser import Operation
from weighin.models.pretrained_keys import Conversion
from weighin.text import plain


def convert(
    model: Any, conversions: Sequence[Conversion], targets: dict[str, torch.Tensor]
) -> None:
    """Fill the model's tensors whose values are converted from one or more tensors of the file.

    Args:
        targets: the tensors to fill, by their names in ``model``, in the dtypes of the results.

    Raises:
        CheckpointError: dequantised values have another shape or dtype than their tensor in the model;
            the quantised tensors do not fit each other; or an fp8 matrix whose last block is smaller
            than the others has gaps in the file.
    """
    sliced: list[tuple[Conversion, Iterable[Step]]] = []
    for one in conversions:
        steps = _steps(one, _oriented(model, one, targets[one.name]))
        if steps is None:
            if smaller_blocks.has_smaller(
                one.sources, smaller_blocks.sizes_of(one.converter.operations[0])
            ):
                raise _cannot_divide(one)
            convert_whole(model, one, targets)
        else:
            sliced.append((one, steps))
    if sliced:
        fill_in_steps(model, sliced, targets)


def fill_in_steps(
    model: Any,
    sliced: Sequence[tuple[Conversion, Iterable[Step]]],
    targets: dict[str, torch.Tensor],
) -> None:
    """Execute the steps of several conversions on several threads."""
    work = ((one, step) for one, steps in sliced for step in steps)
    lock = threading.Lock()

    def take() -> tuple[Conversion, Step] | None:
        with lock:
            return next(work, None)

    def run() -> None:
        with torch.no_grad(), closing(PieceReader()) as reader:
            for one, step in iter(take, None):
                target = _oriented(model, one, targets[one.name])
                _convert_step(model, one, step, target, reader)

    threads = cache_threads()
    with one_thread_each, ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(run) for _ in range(threads)]:
            future.result()


def convert_whole(model: Any, one: Conversion, targets: dict[str, torch.Tensor]) -> None:
    """Execute one conversion on whole tensors."""
    tensors = [read_whole(source) for _, source in one.sources]
    if not one.reads_codes:
        tensors = [tensor.to(targets[one.name].dtype) for tensor in tensors]
    with torch.no_grad():
        for name, value in one.apply(model, tensors).items():
            target = _oriented(model, one, targets[name])
            _check(one, value, target)
            target.copy_(value)


def _convert_step(
    model: Any, one: Conversion, step: Step, target: torch.Tensor, reader: PieceReader
) -> None:
    collected: dict[str, Any] = {pattern: [value] for pattern, value in step.given.items()}
    for pattern, source in step.sources:
        collected.setdefault(pattern, []).append(_read(reader, source))
    converter = one.converter
    for operation in converter.operations:
        collected = smaller_blocks.convert(
            operation,
            collected,
            source_patterns=converter.source_patterns,
            target_patterns=converter.target_patterns,
            full_layer_name=one.name,
            model=model,
            config=model.config,
        )
    (made,) = collected.values()
    value = made[0] if isinstance(made, list) else made
    part = target[step.place]
    _check(one, value, part)
    part.copy_(value)


def _check(one: Conversion, value: torch.Tensor, target: torch.Tensor) -> None:
    """Raise CheckpointError if ``copy_`` would silently expand or cast ``value``, made from codes."""
    if (value.shape, value.dtype) != (target.shape, target.dtype) and one.reads_codes:
        kind, wanted = (f"{tuple(each.shape)} of {each.dtype}" for each in (value, target))
        raise CheckpointError(
            f"{one.sources[0][1].file}: the quantised {plain(one.name)} becomes {kind}, but the"
            f" model has {wanted}",
            "choose the class from which the checkpoint was saved, or correct quantization_config",
        )


def _cannot_divide(one: Conversion) -> CheckpointError:
    name, codes = plain(one.name), one.sources[0][1]
    return CheckpointError(
        f"{codes.file}: the last block of {name} is smaller than the others, and the tensor of its"
        " codes has gaps between its elements: transformers would give wrong values, because it takes"
        " all blocks for equal",
        "save the codes as contiguous tensors",
    )


def _read(reader: PieceReader, source: TensorSlice) -> torch.Tensor:
    target = torch.empty(source.shape, dtype=source.dtype)
    if source.nbytes:
        reader.read(source.file, memory_of(target), source.offset)
    return target


def _steps(one: Conversion, target: torch.Tensor) -> Iterable[Step] | None:
    """Return the steps (parts) of a conversion; None for one that can only run on whole tensors."""
    if not one.reads_codes or not all(_is_plain(source) for _, source in one.sources):
        return None
    first, *rest = one.converter.operations
    kind = type(first).__name__
    if rest:
        return _of_experts(one, kind, rest, target)
    sources = dict(one.sources)
    if len(sources) == len(one.sources) and (steps := OF_ROWS.get(kind)):
        sizes = smaller_blocks.sizes_of(first)
        return of_fp8(sources, target, sizes) if sizes else steps(sources, target)
    return None


def _oriented(model: Any, one: Conversion, target: torch.Tensor) -> torch.Tensor:
    """Return the tensor to fill; for weighin's own operations, the weight of a ``Conv1D`` transposed."""
    module = model.get_submodule(one.name.rpartition(".")[0])
    of_linear = isinstance(one.converter.operations[0], Operation)
    return target.t() if of_linear and type(module).__name__ == "Conv1D" else target


def _is_plain(source: TensorSlice) -> bool:
    return source.contiguous and not source.parts and not source.encoding


def _of_experts(
    one: Conversion, kind: str, rest: Sequence[Any], target: torch.Tensor
) -> Iterable[Step] | None:
    """Return a step for each expert if ``rest`` only stacks experts and joins matrices; else None."""
    merge, *joins = rest
    stacks = type(merge).__name__ == "MergeModulelist" and merge.dim == 0
    joined = all(type(each).__name__ == "Concatenate" and each.dim > 0 for each in joins)
    by_pattern: dict[str, list[TensorSlice]] = {}
    for pattern, source in one.sources:
        by_pattern.setdefault(pattern, []).append(source)
    counts = {len(group) for group in by_pattern.values()}
    if kind not in OF_ROWS or not (stacks and joined) or counts != {len(target)}:
        return None
    return (
        Step(
            tuple((pattern, group[number]) for pattern, group in by_pattern.items()),
            (slice(number, number + 1),),
        )
        for number in range(len(target))
    )
