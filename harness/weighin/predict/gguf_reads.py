"""Replace the functions of transformers that dequantise a GGUF file, to predict their memory.

The package gguf computes with numpy, so that no torch operation can be intercepted. For each tensor
of the file, a real load needs memory for: the mapped pages of the quantised values, the dequantised
values before and after joining, their reordered form, and a copy, which becomes the model's tensor.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch

from weighin.predict.dispatch import CannotFollow
from weighin.predict.ledger import Ledger
from weighin.stream import gguf_files as gguf
from weighin.stream.slices import TensorSlice

_FLOAT_BYTES: Final = 4


@contextmanager
def gguf_reads(ledger: Ledger, checkpoint: Path) -> Iterator[None]:
    """If ``checkpoint`` is a GGUF file, count in the ledger what its reads need; else do nothing."""
    if not gguf.is_file(checkpoint):
        yield
        return
    before = ledger.own_anon_bytes
    from gguf import GGUFReader
    from transformers import modeling_gguf_pytorch_utils as module

    imported = ledger.own_anon_bytes - before
    ledger.other_anon_bytes += imported
    original: Callable[..., Any] = module.load_gguf_checkpoint

    def load_gguf_checkpoint(
        path: Any,
        return_tensors: bool = False,
        model_to_load: Any = None,
        torch_dtype: torch.dtype | None = None,
    ) -> Any:
        nonlocal imported
        ledger.adopt(imported)
        imported = 0
        parsed = original(path)
        if return_tensors:
            # The reader makes several objects for each token, which live until the end.
            reader: Any = GGUFReader(path)
            ledger.update()
            parsed["tensors"] = _values(
                ledger, module, Path(path), parsed["config"], model_to_load, torch_dtype
            )
            del reader
        return parsed

    def load_gguf_state_dict(header: Any) -> Any:
        raise CannotFollow(f"transformers dequantises {header.architecture} in code of its own")

    with ExitStack() as stack:
        stack.enter_context(patch.object(module, "load_gguf_checkpoint", load_gguf_checkpoint))
        try:
            from transformers.quantizers import quantizer_gguf
        except ImportError:  # before transformers 5.20
            pass
        else:
            stack.enter_context(
                patch.object(quantizer_gguf, "load_gguf_state_dict", load_gguf_state_dict)
            )
        yield


def _values(
    ledger: Ledger,
    module: Any,
    file: Path,
    config: dict[str, Any],
    model: Any,
    dtype: torch.dtype | None,
) -> dict[str, torch.Tensor]:
    metadata, tensors = gguf.read_tables(file)
    processor = module.TENSOR_PROCESSORS.get(
        metadata["general.architecture"], module.TensorProcessor
    )
    names = module.get_gguf_hf_weights_map(model, processor(config=config))
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    pages = torch.empty(0, dtype=torch.uint8).set_(ledger.map_file(str(file), file.stat().st_size))
    made: dict[str, torch.Tensor] = {}
    kept = 0  # the last tensor's values live until the next tensor's values are computed
    for where in tensors:
        size = prod(where.shape) * _FLOAT_BYTES
        ledger.read(pages[where.offset : where.offset + where.storage_bytes])
        with ledger.holding(kept + _computing_bytes(where, size)):
            ledger.work["written_bytes"] += size
        kept = size if where.dtype_name != "float32" or where.encoding else 0
        target = names.get(where.name) or names.get(where.name.removesuffix(".weight"))
        if target in shapes and target not in made:
            with ledger.holding(kept):
                copied = torch.empty(shapes[target], dtype=torch.float32)
                ledger.write(copied)
                made[target] = copied if dtype is None else copied.to(dtype)
                del copied  # transformers has only the converted tensor now
    return made


def _computing_bytes(where: TensorSlice, size: int) -> int:
    """Return the bytes in which numpy computes ``size`` bytes of values: twice ``size`` if numpy
    joins groups of rows, 0 if the file has the values as float32, else ``size``.
    """
    if where.encoding or where.dtype_name == "bfloat16":
        return 2 * size
    return 0 if where.dtype_name == "float32" else size
