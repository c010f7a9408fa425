"""Reading wide elements into the memory of the narrow ones that they become.

A float32 stretch is read to where its bfloat16 tensor will be: half of it fits, and once converted
takes a quarter; half of the rest fits behind that, and so on. The disk writes into memory that is
needed anyway, in reads as large as without a conversion; only the last MiB passes a buffer.
"""

from typing import Final

import torch

from weighin.formats.base import TensorSlice
from weighin.loader.direct_io import PieceReader
from weighin.loader.huge_pages import memory_of
from weighin.loader.vectored import ALIGNMENT

_LEAST_BYTES: Final = 1024**2  # of memory: below that, what fits is no read for a disk
_FIRST_ELEMENTS: Final = 1024  # converted by way of a copy: there the two overlap
_MOST_ELEMENTS: Final = 256 * 1024  # at a time: what a processor's cache holds


def shrinks(source: TensorSlice, target: torch.Tensor) -> bool:
    """Tell whether elements of ``source`` can be converted in the memory of ``target``."""
    return target.is_contiguous() and target.dtype.itemsize < source.dtype.itemsize


def read_shrinking(
    reader: PieceReader, source: TensorSlice, offset: int, target: torch.Tensor
) -> int:
    """Fill the front of a contiguous CPU ``target``; return how many elements of it.

    What is left takes less than 1 MiB, and has no room to convert in. The ``offset`` is a multiple of
    an element's size.

    Raises:
        CheckpointError: the file ends before, or its disk fails.
    """
    width, flat, done = source.dtype.itemsize, target.view(-1), 0
    while (rest := flat[done:]).nbytes >= _LEAST_BYTES:
        at = offset + done * width
        lead = (at - rest.data_ptr()) % ALIGNMENT  # file and memory then lie alike
        count = (rest.nbytes - lead) // width
        count -= (at + count * width) % ALIGNMENT // width  # to the end of one of the file's pages
        memory = memory_of(rest)[lead : lead + count * width]
        reader.read(source.file, memory, at)
        _convert(rest[:count], torch.frombuffer(memory, dtype=source.dtype))
        done += count
    return done


def _convert(target: torch.Tensor, source: torch.Tensor) -> None:
    """Convert elements towards the front of the memory that they lie in, as far as room is free."""
    done = 0
    while done < len(target):
        free_bytes = source[done:].data_ptr() - target[done:].data_ptr()
        count = min(free_bytes // target.itemsize, _MOST_ELEMENTS)
        if count >= _FIRST_ELEMENTS:
            values = source[done : done + count]
        else:
            count = _FIRST_ELEMENTS
            values = source[done : done + count].clone()
        target[done : done + count].copy_(values)
        done += count
