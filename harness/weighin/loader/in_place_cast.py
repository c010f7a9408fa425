"""Convert a tensor to a smaller dtype inside the memory of the result, without a second copy.

Example: a load of float32 elements as bfloat16. The first half of the file's elements fills the
whole memory of the bfloat16 tensor. Converted, these elements take the front half of the memory.
Then half of the remaining elements are read into the back half of the memory and converted; this
step repeats. The reads are large and need no buffer, except the read of the last MiB.
"""

from typing import Final

import torch

from weighin.formats.base import TensorSlice
from weighin.loader.direct_io import PieceReader
from weighin.loader.huge_pages import memory_of
from weighin.loader.vectored import ALIGNMENT

_LEAST_BYTES: Final = 1024**2  # the least unfilled memory, because a smaller read is slow on a disk
_FIRST_ELEMENTS: Final = 1024  # are converted from a copy, because source and target overlap
_MOST_ELEMENTS: Final = 256 * 1024  # are converted at a time, so that they fit a processor's cache


def shrinks(source: TensorSlice, target: torch.Tensor) -> bool:
    """Tell whether ``source`` can be read into the memory of ``target`` and converted there."""
    return target.is_contiguous() and target.dtype.itemsize < source.dtype.itemsize


def read_shrinking(
    reader: PieceReader, source: TensorSlice, offset: int, target: torch.Tensor
) -> int:
    """Fill the front of a contiguous CPU ``target``; return the number of elements filled.

    Less than 1 MiB at the end of the target stays unfilled. ``offset`` must be a multiple of the
    file's element size.

    Raises:
        CheckpointError: the file is too short, or its disk fails.
    """
    width, flat, done = source.dtype.itemsize, target.view(-1), 0
    while (rest := flat[done:]).nbytes >= _LEAST_BYTES:
        at = offset + done * width
        lead = (at - rest.data_ptr()) % ALIGNMENT  # gives memory the alignment of the file
        count = (rest.nbytes - lead) // width
        count -= (at + count * width) % ALIGNMENT // width  # end with a page of the file
        memory = memory_of(rest)[lead : lead + count * width]
        reader.read(source.file, memory, at)
        _convert(rest[:count], torch.frombuffer(memory, dtype=source.dtype))
        done += count
    return done


def _convert(target: torch.Tensor, source: torch.Tensor) -> None:
    """Convert ``source`` into ``target``, front to back; ``source`` lies in the memory of ``target``."""
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
