"""Read a piece of a file into memory, convert its dtype, and copy it to the GPU."""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch

from weighin.loader.direct_io import LARGEST_ELEMENT_BYTES, PIECE_BYTES, PieceReader
from weighin.loader.memory import MOST_BETWEEN_BYTES, Piece, memory_of
from weighin.loader.open_file import ALIGNMENT, WINDOW_BYTES
from weighin.stream.slices import TensorSlice

# A piece of a read takes up to three pages of the reader's buffer.
_MOST_PIECES: Final = 80
_LEAST_BYTES: Final = 1024**2  # the least unfilled memory, because a smaller read is slow on a disk
_FIRST_ELEMENTS: Final = 1024  # are converted from a copy, because source and target overlap
_MOST_ELEMENTS: Final = 256 * 1024  # are converted at a time, so that they fit a processor's cache


class Runs:
    """A queue of pieces, from which several reading threads take runs.

    A piece is a range of a file with its target in memory. One read fills the adjacent pieces of a run.

    Args:
        most_bytes: the largest size in bytes of a run whose pieces keep their dtype.
    """

    def __init__(self, pieces: Iterable[Piece], most_bytes: int) -> None:
        self._pieces = iter(pieces)
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._next = next(self._pieces, None)

    def take(self, most_converted_bytes: int) -> list[Piece]:
        """Return the next run; an empty list if the queue is empty.

        Args:
            most_converted_bytes: the largest size in bytes of a run that changes its dtype, because
                such a run must fit into the thread's buffer.
        """
        run: list[Piece] = []
        with self._lock:
            while (piece := self._next) is not None:
                most = self._most_bytes if piece.plain else most_converted_bytes
                if run and not _follows(run, piece, most):
                    break
                run.append(piece)
                self._next = next(self._pieces, None)
        return run


def _follows(run: list[Piece], piece: Piece, most_bytes: int) -> bool:
    alike = (run[-1].plain and piece.plain) or (run[-1].buffered and piece.buffered)
    return (
        alike
        and piece.source.file == run[0].source.file
        and 0 <= piece.offset - run[-1].end <= MOST_BETWEEN_BYTES
        and piece.end - _aligned(run[0].offset) <= most_bytes
        and len(run) < _MOST_PIECES
    )


def _aligned(offset: int) -> int:
    """Return the offset at or before ``offset`` from which a read aligns all elements in its buffer."""
    return offset - offset % LARGEST_ELEMENT_BYTES


class PieceFiller:
    """Fills pieces of memory on one thread, with a reader and, for a GPU, pinned buffers.

    Args:
        buffer: page-aligned memory for the elements to convert. By default the filler has a buffer
            of its own.
        piece_bytes: the size in bytes of the filler's own buffer, and of each pinned buffer.
    """

    def __init__(self, buffer: memoryview | None, piece_bytes: int = PIECE_BYTES) -> None:
        self._pieces = PieceReader(buffer, piece_bytes)
        self._pinned_bytes = piece_bytes
        self._borrows = buffer is not None
        self._gpu: _GpuCopier | None = None

    def __enter__(self) -> "PieceFiller":
        return self

    def __exit__(self, *_: object) -> None:
        self._pieces.close()
        if self._gpu:
            self._gpu.finish()

    @property
    def most_converted_bytes(self) -> int:
        """The largest size in bytes of a run whose pieces change their dtype."""
        return self._pieces.piece_bytes

    def fill(self, run: Sequence[Piece]) -> None:
        """Fill the targets of a run; convert the values and copy them to the GPU if necessary."""
        if run[0].plain:
            places = [(memory_of(piece.target), piece.offset) for piece in run]
            self._pieces.read_together(run[0].source.file, places)
            return
        if len(run) > 1:
            self._convert_run(run)
            return
        (piece,) = run
        if piece.target.is_cuda:
            self._gpu = self._gpu or _GpuCopier(piece.target.device, self._pinned_bytes)
            with self._gpu.copying_to(piece.target) as pinned:
                self._read(Piece(piece.source, piece.offset, pinned))
        else:
            self._read(piece)

    def _convert_run(self, run: Sequence[Piece]) -> None:
        file, start, end = run[0].source.file, _aligned(run[0].offset), run[-1].end
        if self._pieces.opened(file).is_cached(start, end - start):
            for piece in run:
                self._read(piece)
            return
        content = self._pieces.piece(file, start, end - start)
        for piece in run:
            _convert(piece, content[piece.offset - start : piece.end - start])

    def _read(self, piece: Piece) -> None:
        source, offset, target = piece.source, piece.offset, piece.target
        if piece.plain:
            self._pieces.read(source.file, memory_of(target), offset)
        elif offset % source.dtype.itemsize:
            self._convert_copies(piece)  # misaligned elements are copied first
        elif (opened := self._pieces.opened(source.file)).is_cached(offset, piece.source_bytes):
            for part in piece.parts(WINDOW_BYTES):
                with opened.looking(part.offset, part.source_bytes) as mapped:
                    _convert(part, mapped)
        elif not self._borrows and shrinks(source, target):
            done = read_shrinking(self._pieces, source, offset, target)
            offset += done * source.dtype.itemsize
            self._convert_copies(Piece(source, offset, target.view(-1)[done:]))
        else:
            self._convert_copies(piece)

    def _convert_copies(self, piece: Piece) -> None:
        for part in piece.parts(self._pieces.piece_bytes):
            _convert(part, self._pieces.piece(part.source.file, part.offset, part.source_bytes))


def _convert(piece: Piece, content: memoryview) -> None:
    """Convert the elements in ``content`` to the target's dtype, and write them to the target."""
    if piece.target.numel():
        values = torch.frombuffer(content, dtype=piece.source.dtype)
        piece.target.copy_(values.view(piece.target.shape))


class _GpuCopier:
    """Copies to the GPU through two pinned buffers: one is filled while the other is copied."""

    def __init__(self, device: torch.device, buffer_bytes: int) -> None:
        self._stream = torch.cuda.Stream(device)
        # The current stream has allocated the target.
        self._stream.wait_stream(torch.cuda.current_stream(device))
        self._buffers = [
            torch.empty(buffer_bytes, dtype=torch.uint8, pin_memory=True) for _ in "ab"
        ]
        self._copied = [torch.cuda.Event() for _ in "ab"]
        self._turn = 0

    @contextmanager
    def copying_to(self, target: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield a pinned tensor to fill, and then start its copy to ``target`` without waiting."""
        turn, self._turn = self._turn, 1 - self._turn
        self._copied[turn].synchronize()
        pinned = self._buffers[turn][: target.nbytes].view(target.dtype).view(target.shape)
        yield pinned
        with torch.cuda.stream(self._stream):
            target.copy_(pinned, non_blocking=True)
            self._copied[turn].record(self._stream)

    def finish(self) -> None:
        """Wait until all started copies are complete."""
        self._stream.synchronize()


def shrinks(source: TensorSlice, target: torch.Tensor) -> bool:
    """Tell whether ``source`` can be read into the memory of ``target`` and converted there."""
    return target.is_contiguous() and target.dtype.itemsize < source.dtype.itemsize


def read_shrinking(
    reader: PieceReader, source: TensorSlice, offset: int, target: torch.Tensor
) -> int:
    """Fill the front of a contiguous CPU ``target`` without a second copy; return how many elements.

    Example: a load of float32 elements as bfloat16. The first half of the file's elements fills the
    whole memory of the bfloat16 tensor. Converted, these elements take the front half of the memory.
    Then half of the remaining elements are read into the back half of the memory and converted; this
    step repeats. The reads are large and need no buffer, except the read of the last MiB.

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
        _convert_overlapping(rest[:count], torch.frombuffer(memory, dtype=source.dtype))
        done += count
    return done


def _convert_overlapping(target: torch.Tensor, source: torch.Tensor) -> None:
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
