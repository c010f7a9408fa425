"""Read a Hugging Face folder as its model's state dict, for ``weighin convert --keys model``."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from weighin import formats
from weighin.checkpoint.reader import read_into
from weighin.construction.skeleton import build_skeleton, resolve_builder
from weighin.errors import CheckpointError, ConfigError
from weighin.formats import gguf
from weighin.formats.base import Slices, TensorSlice
from weighin.formats.dtypes import dtype_name
from weighin.formats.misfit import first_names
from weighin.formats.pipeline import is_pipeline
from weighin.formats.pretrained_folder import folder_of, is_pretrained, read_folder, variant_of
from weighin.formats.pretrained_library import AS_SAVED, FolderChoice
from weighin.formats.quantised import of_model
from weighin.formats.selection import WHOLE, Selection
from weighin.formats.unknown_folder import no_model
from weighin.models.description import auto_dtype, described_gguf, plain_spec_of

if TYPE_CHECKING:
    from weighin.formats.lora import Addition
    from weighin.models.pretrained_keys import Conversion, MappedKeys


def read_with_model_keys(
    source: Path,
    selection: Selection = WHOLE,
    choice: FolderChoice = AS_SAVED,
    dtype: torch.dtype | None = None,
) -> Slices:
    """Return the tensors of a folder or GGUF file as the state dict that its model would have.

    A tensor that the model stacks or joins from several tensors of the files has several ``parts``.
    The files may have a tied tensor under only one of its names; the result has it under all names.
    Quantised codes become weights in ``dtype``, or without ``dtype`` in the model's own dtype.
    ``selection`` chooses the weights in the folder's checkpoint. The adapter that ``choice`` names
    is merged in ``dtype``, or without ``dtype`` in the dtype of each tensor.

    Raises:
        ConfigError: the source is neither a GGUF file nor in a Hugging Face folder, transformers is
            missing, or the model needs the folder's code and this code may not run.
        CheckpointError: the files lack a tensor of the model, or have codes that weighin does not
            dequantise.
    """
    if is_pipeline(source):
        raise no_model(source)
    if formats.detect(source) is gguf:
        return _of_gguf(gguf.file_of(source), choice.adapter, dtype)
    if not is_pretrained(folder := folder_of(source)):
        raise ConfigError(
            f"--keys model needs the model's class, and {folder} has no config.json",
            "name a folder that save_pretrained wrote, or leave --keys out",
        )
    from weighin.models.pretrained_keys import map_keys

    found = read_folder(folder, replace(choice, variant=variant_of(source)))
    builder = resolve_builder(found.library.builder)
    spec = plain_spec_of(found, selection, merges=bool(choice.adapter))
    kind = (
        dtype or getattr(torch, auto_dtype(found, selection)) if of_model(spec) else torch.float32
    )
    model = build_skeleton(builder, spec.kwargs, dtype=kind)
    slices = formats.read(source, selection)[1]
    return _in_order(source, model, slices, map_keys(model, slices), choice.adapter, dtype)


def _of_gguf(file: Path, adapter: str, dtype: torch.dtype | None) -> Slices:
    from weighin.models.gguf_keys import map_gguf_keys
    from weighin.models.pretrained import from_config

    model = build_skeleton(from_config, described_gguf(file))
    slices = formats.read(file)[1]
    return _in_order(file, model, slices, map_gguf_keys(model, slices), adapter, dtype)


def _in_order(
    source: Path,
    model: torch.nn.Module,
    slices: Sequence[TensorSlice],
    mapped: "MappedKeys",
    adapter: str,
    dtype: torch.dtype | None,
) -> Slices:
    """Return the tensors under all names of the model's state dict, in the order of the state dict."""
    from weighin.loader.codes import refuse_codes_left, refuse_left_out_scales
    from weighin.models.dequantising import quantiser_of

    mapped.refuse_other_shapes(model, source)
    refuse_left_out_scales(model, slices, mapped, source)
    wanted = model.state_dict(keep_vars=True)
    stored = {one.name: one for one in mapped.slices}
    if quantiser_of(model):
        refuse_codes_left(model, source, slices, mapped)
        stored |= {one.name: _computed(model, one, wanted[one.name]) for one in mapped.conversions}
    by_tensor = {id(wanted[name]): one for name, one in stored.items()}
    sources = {
        name: stored.get(name) or by_tensor.get(id(tensor)) for name, tensor in wanted.items()
    }
    if missing := sorted(name for name, one in sources.items() if one is None):
        raise CheckpointError(
            f"{source}: holds no values to copy for {first_names(missing)}: transformers computes"
            " these values during the load, or would give these weights random values",
            "save the loaded model: torch.save(load_pretrained(FOLDER).state_dict(), 'model.pt')",
        )
    found = {name: one for name, one in sources.items() if one is not None}
    if adapter:
        found = _merged(model, found, Path(adapter), dtype)
    return Slices(replace(one, name=name) for name, one in found.items())


def _computed(model: Any, conversion: "Conversion", target: torch.Tensor) -> TensorSlice:
    """Return a slice whose ``fill`` computes the values from codes, with the model's quantiser."""
    return replace(
        conversion.sources[0][1],
        name=conversion.name,
        shape=tuple(target.shape),
        stride=target.stride(),
        dtype_name=dtype_name(target.dtype),
        parts=(),
        encoding="",
        fill=partial(_convert, model, conversion),
    )


def _convert(model: Any, conversion: "Conversion", memory: torch.Tensor) -> None:
    from weighin.loader import converting

    converting.convert(model, [conversion], {conversion.name: memory})


def _merged(
    model: Any, sources: Mapping[str, TensorSlice], adapter: Path, dtype: torch.dtype | None
) -> dict[str, TensorSlice]:
    """Return the tensors of a model, with an adapter of LoRA merged into some of them.

    A tensor that the adapter changes is computed when it is read. ``sources`` maps the names of the
    model's tensors to their places in the files. The tensors are merged in ``dtype``; if ``dtype``
    is None, each tensor keeps its own dtype.

    Raises:
        CheckpointError: the adapter is damaged, is not plain LoRA, or does not fit the model.
    """
    from weighin.loader import merge  # imports transformers, which few conversions need

    changed = dict(sources)
    wanted = model.state_dict(keep_vars=True)
    for one, module in merge.modules_of(model, adapter):
        names = [name for name, tensor in wanted.items() if tensor is module.weight]
        base = changed[names[0]]
        if base is sources[names[0]]:  # else the addition to a tied weight has changed it
            base = one.base or base
        kind = dtype or sources[names[0]].dtype
        fill = partial(_fill_merged, base, one, is_turned=merge.is_turned(one, module))
        for name in names:
            changed[name] = replace(
                base,
                name=name,
                stride=module.weight.stride(),
                dtype_name=dtype_name(kind),
                parts=(),
                encoding="",
                fill=fill,
            )
    return changed


def _fill_merged(
    base: TensorSlice, one: "Addition", memory: torch.Tensor, *, is_turned: bool
) -> None:
    """Write the sum of ``base`` and the adapter's scaled product into ``memory``."""
    from weighin.loader import merge

    if base.fill:
        base.fill(memory)
    else:
        read_into(base, memory)
    with torch.no_grad():
        merge.add(one, memory, torch.empty(merge.elements(one)), is_turned=is_turned)
