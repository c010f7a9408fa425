"""Give the tensors of a GGUF file the names and values that transformers gives them.

llama.cpp renames a model's tensors. For some architectures it also reorders or changes values.
transformers has a table of the names, and code that undoes the changes of one tensor; this module
uses both. To find out whether the code of transformers only moves rows, weighin runs the code on
row numbers. If the code only moves rows, the loader dequantises a few rows at a time, and writes
them directly to the model's tensor; if not, it computes the whole tensor first.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, Final

import torch

from weighin.errors import CheckpointError
from weighin.formats import gguf
from weighin.formats.base import Slices, TensorSlice, row_major
from weighin.models.pretrained import computed_keys
from weighin.models.pretrained_keys import MappedKeys

# The width of the matrix of row numbers is 3, because few numbers of heads are multiples of 3.
_COLUMNS: Final = 3


def map_gguf_keys(model: Any, slices: Sequence[TensorSlice]) -> MappedKeys:
    """Return the tensors of a GGUF file under the names of ``model``, a model of transformers.

    Raises:
        CheckpointError: transformers converts this architecture only inside ``from_pretrained``.
    """
    file = slices[0].file
    reading = _Reading.of(model, file, gguf.architecture(file))
    wanted = model.state_dict(keep_vars=True)
    sources: dict[str, list[TensorSlice]] = {}
    unexpected = []
    for where in slices:
        if (target := reading.target(where.name)) in wanted:
            sources.setdefault(target, []).append(where)
        else:
            unexpected.append(where.name)
    mapped = Slices(
        reading.converted(name, tuple(wanted[name].shape), group) for name, group in sources.items()
    )
    return MappedKeys(
        mapped,
        (),
        tuple(unexpected),
        renamed=sum(len(group) == 1 for group in sources.values()),
        joined=sum(len(group) for group in sources.values() if len(group) > 1),
        computed=tuple(sorted(computed_keys(model) - sources.keys())),
        used=None,
    )


@dataclass(frozen=True, slots=True)
class _Reading:
    """transformers' names for a file's tensors, and its code that undoes llama.cpp's changes."""

    names: Mapping[str, str]
    processor: Any

    @classmethod
    def of(cls, model: Any, file: Path, architecture: str) -> "_Reading":
        module: Any = import_module("transformers.modeling_gguf_pytorch_utils")

        if _has_code_of_its_own(architecture):
            raise CheckpointError(
                f"{file}: transformers can convert the architecture {architecture!r} only in"
                " from_pretrained",
                "load the file with transformers: from_pretrained(FOLDER,"
                f" gguf_file={file.name!r})",
            )
        kind = module.TENSOR_PROCESSORS.get(architecture, module.TensorProcessor)
        processor = kind(config=module.load_gguf_checkpoint(file)["config"])
        return cls(module.get_gguf_hf_weights_map(model, processor), processor)

    def target(self, name: str) -> str:
        return self.names.get(name) or self.names.get(name.removesuffix(".weight")) or ""

    def converted(
        self, target: str, shape: tuple[int, ...], sources: Sequence[TensorSlice]
    ) -> TensorSlice:
        """Return a tensor of the model, as a range of the file or a function to compute it."""
        first = sources[0]
        moves = self._moves(target, shape, sources)
        if moves is None:  # values change, as those of norms do; transformers computes in float32
            fill = partial(self._whole, target, shape, sources)
            dtype_name = "float32"
        elif moves.same and len(sources) == 1 and not first.encoding:
            return replace(first, name=target, shape=shape, stride=row_major(shape))
        else:
            fill, dtype_name = partial(_by_rows, sources, moves), first.dtype_name
        return replace(
            first,
            name=target,
            shape=shape,
            stride=row_major(shape),
            dtype_name=dtype_name,
            encoding=first.encoding or first.dtype_name,
            fill=fill,
        )

    def _moves(
        self, target: str, shape: tuple[int, ...], sources: Sequence[TensorSlice]
    ) -> "_Moves | None":
        """Return to which rows transformers moves the rows of the file; None if transformers does
        more than move whole rows.

        To find the rows, ``_moves`` passes row numbers to the code of transformers in place of the
        values.
        """
        import numpy as np

        columns = sources[0].shape[-1] if sources[0].shape else 0
        if not columns or any(where.shape[-1:] != (columns,) for where in sources):
            return None
        width = columns if len(shape) == 1 else _COLUMNS
        counts = [prod(where.shape[:-1]) for where in sources]
        probes, start = [], 1  # from 1, because 0 marks a row to which nothing was moved
        for where, count in zip(sources, counts, strict=True):
            numbers = np.arange(start * width, (start + count) * width, dtype=np.int64)
            probes.append(numbers.reshape(*where.shape[:-1], width))
            start += count
        try:
            made = self._process(sources, probes).get(target)
        except (ArithmeticError, LookupError, TypeError, ValueError):
            return None
        if made is None or made.dtype != torch.int64:
            return None
        numbers = made.numpy()
        turned = numbers.shape == (width, sum(counts)) and shape == (columns, sum(counts))
        if not turned and (numbers.shape != (*shape[:-1], width) or columns != shape[-1]):
            return None
        rows = (numbers.T if turned else numbers).reshape(-1, width)
        origin = rows[:, 0] // width - 1
        every = np.arange(sum(counts))
        whole = np.array_equal(rows, rows[:, :1] + np.arange(width))
        if not (whole and np.array_equal(np.sort(origin), every)):
            return None
        same = not turned and np.array_equal(origin, every)
        return _Moves(np.argsort(origin), turned, same)

    def _whole(
        self,
        target: str,
        shape: tuple[int, ...],
        sources: Sequence[TensorSlice],
        memory: torch.Tensor,
    ) -> None:
        """Compute one tensor of the model as a whole, and write it into ``memory``."""
        made = self._process(sources, [_values(where).numpy() for where in sources]).get(target)
        if made is None or tuple(made.shape) != shape:
            found = "nothing" if made is None else tuple(made.shape)
            raise CheckpointError(
                f"{sources[0].file}: transformers converts {sources[0].name!r} to the shape"
                f" {found}, but {target!r} of the model has the shape {shape}",
                "install another version of transformers. The names and shapes in the file:"
                " weighin inspect FILE",
            )
        memory.copy_(made)

    def _process(self, sources: Sequence[TensorSlice], arrays: Sequence[Any]) -> dict[str, Any]:
        """Return the results of transformers' code for ``arrays``, by their names in the model."""
        made: dict[str, torch.Tensor] = {}
        for where, array in zip(sources, arrays, strict=True):
            result = self.processor.process(
                weights=array,
                name=where.name,
                tensor_key_mapping=self.names,
                parsed_parameters={"tensors": made},
            )
            if (name := self.names.get(result.name)) is not None:
                made[name] = torch.from_numpy(result.weights)
        return made


def _has_code_of_its_own(architecture: str) -> bool:
    try:
        from transformers.integrations.gguf.utils import is_gguf_arch_supported
    except ImportError:  # before transformers 5.20
        return False
    return bool(is_gguf_arch_supported(architecture))


@dataclass(frozen=True, slots=True, eq=False)
class _Moves:
    """How the rows of the file's tensors become the rows of the model's tensor.

    Attributes:
        targets: for each row of the file, the row's number in the model's tensor (a NumPy array).
        turned: whether the model's tensor is the transpose of the file's.
        same: whether every row keeps its number.
    """

    targets: Any
    turned: bool
    same: bool


def _by_rows(sources: Sequence[TensorSlice], moves: _Moves, memory: torch.Tensor) -> None:
    """Compute a few rows at a time, and write the computed rows to their places in ``memory``."""
    from weighin.formats.gguf_values import rows  # imports numpy

    table = memory.T if moves.turned else memory
    flat = table if table.dim() == 2 else table.view(-1, table.shape[-1])
    start = 0
    for where in sources:
        for values in rows(where):
            stop = start + len(values)
            if moves.same:
                flat[start:stop] = values.to(flat.device)
            else:
                places = torch.from_numpy(moves.targets[start:stop]).to(flat.device)
                flat[places] = values.to(flat.device, flat.dtype)
            start = stop


def _values(where: TensorSlice) -> torch.Tensor:
    from weighin.formats.gguf_values import rows  # imports numpy

    return torch.cat(list(rows(where))).reshape(where.shape)
