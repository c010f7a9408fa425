"""Writing a checkpoint again in another layout or dtype, without ever holding it.

Tensors pass through as pieces of 16 MiB, read from their places in the source. What is written
grows in a hidden folder beside the target and is renamed into place once it is whole, so that a
kill leaves the source as it was, no target, and a folder that the next conversion removes.

Where the source has checksums, what is read is compared with them, and the target gets its own: so
that a byte which changes anywhere between two conversions is found by the next one.
"""

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import torch

from weighin import atomic, formats
from weighin.checkpoint import sidecar
from weighin.checkpoint.generate import RECORD_BYTES
from weighin.checkpoint.piecewise import RunningChecksum, dtype_name
from weighin.checkpoint.reader import plans, read_pieces
from weighin.checkpoint.staging import growing_beside
from weighin.errors import CheckpointError, ConfigError
from weighin.formats.base import Layout, Pieces, Progress, TensorPlan, TensorSlice
from weighin.formats.zip_writer import run_parallel
from weighin.models.skeleton import map_large_tensors

AUTO: Final = "auto"

_WHOLE, _SPLIT = "safetensors", "sharded"  # what auto writes; no pickle in either
_SHARDED: Final = (_SPLIT, "sharded_pt")  # what max_shard_bytes is for


@dataclass(frozen=True, slots=True)
class Conversion:
    """What to convert to. ``dtype`` is of floating-point tensors; None keeps each one's own.

    Attributes:
        fmt: a layout's name, or "auto": one file up to ``split_above_bytes`` of tensors, else
            shards.
        max_shard_bytes: of one file of the layout ``sharded``.
        verify: whether what was written is read back, from the disk, and compared.
        checksums: the file with the source's, as ``sidecar.find`` names it.
    """

    fmt: str
    dtype: torch.dtype | None
    split_above_bytes: int
    max_shard_bytes: int
    verify: bool = False
    checksums: Path | None = None


def convert(
    source: Path,
    target: Path,
    order: Conversion,
    *,
    permit: Callable[[int], None] | None = None,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Write the checkpoint ``source`` to ``target``, which must not exist; seconds by stage.

    The target gets checksums where the source has them, and where it is verified. ``permit`` is
    called with the bytes that will be written before any is.

    Raises:
        ConfigError: the target exists, lies inside the source, or is being written by another.
        CheckpointError: the source cannot be read, has other values than its checksums say, or what
            was written is not what was read.
    """
    map_large_tensors()
    torch.set_num_threads(1)  # the writers are the threads
    started = time.monotonic()
    check_target(source, target)
    _, slices = formats.read(source)
    if not slices:
        raise CheckpointError(
            f"{source}: holds no tensors", "convert the checkpoint of a model with weights"
        )
    tensors = plans(slices, order.dtype)
    size = tensor_bytes(tensors)
    layout = formats.named(choose(order.fmt, size, order.split_above_bytes))
    if permit is not None:
        permit(size + RECORD_BYTES * len(tensors))
    known = sidecar.KnownChecksums(source, order.checksums, slices) if order.checksums else None
    copier = _Copier(slices, tensors, known, summing=order.verify or known is not None)
    read = time.monotonic()
    with growing_beside(target) as temporary:
        new = temporary / target.name
        _write(layout, new, tensors, copier.pieces, progress, order)
        written = time.monotonic()
        if order.verify:
            copier.verify(new, progress)
        sums = new / sidecar.NAME if new.is_dir() else sidecar.beside(new)
        if copier.summing:
            sidecar.write(sums, copier.sums())
        check_target(source, target)
        atomic.rename(new, target)
        if sums.exists():  # beside a file; a folder has taken its own along
            atomic.rename(sums, sidecar.beside(target))
    return {
        "read": read - started,
        "write": written - read,
        "verify": time.monotonic() - written,
    }


def _write(
    layout: Layout,
    new: Path,
    tensors: Sequence[TensorPlan],
    pieces: Pieces,
    progress: Progress | None,
    order: Conversion,
) -> None:
    if layout.NAME in _SHARDED:
        write = cast(Any, layout).write
        write(new, tensors, pieces, progress, max_shard_bytes=order.max_shard_bytes)
    else:
        layout.write(new, tensors, pieces, progress)


def choose(fmt: str, size: int, split_above_bytes: int) -> str:
    """Return the layout to write; raises UnknownName where none is called so."""
    if fmt == AUTO:
        return _SPLIT if size > split_above_bytes else _WHOLE
    return formats.named(fmt).NAME


def tensor_bytes(tensors: Iterable[TensorPlan]) -> int:
    """Return the bytes of all tensors, tied ones counted once."""
    return sum(
        torch.Size(one.shape).numel() * one.dtype.itemsize
        for one in tensors
        if one.shared_with is None
    )


def check_target(source: Path, target: Path) -> None:
    """Raise ConfigError where the target cannot be made without touching what is there."""
    for path in (target, sidecar.beside(target)):  # of one that is gone: not the new one's
        if os.path.lexists(path):
            raise ConfigError(f"{path} exists already", "name another target, or remove it first")
    if not target.parent.is_dir():
        raise ConfigError(f"{target.parent}: no such folder", f"make it: mkdir -p {target.parent}")
    if source.resolve() in target.resolve().parents:
        raise ConfigError(f"{target} lies inside {source}", "name a target outside of the source")


class _Copier:
    """Hands a source's tensors to a writer, and remembers their checksums to compare them with."""

    def __init__(
        self,
        slices: Sequence[TensorSlice],
        tensors: Sequence[TensorPlan],
        known: sidecar.KnownChecksums | None,
        *,
        summing: bool,
    ) -> None:
        self.summing = summing
        self._slices = {one.name: one for one in slices}
        self._plans = {one.name: one for one in tensors}
        self._known = known
        self._sums: dict[str, str] = {}  # several threads set one item each
        self._tied: dict[str, list[str]] = {}
        for one in tensors:
            self._tied.setdefault(one.shared_with or one.name, []).append(one.name)

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        plan, where = self._plans[name], self._slices[name]
        written = _running(plan)
        read = written if plan.dtype == where.dtype else RunningChecksum(where.nbytes)
        for piece in read_pieces(where):
            converted = piece.to(plan.dtype)
            if self.summing:
                written.update(converted)
                if read is not written:
                    read.update(piece)
            yield converted
        if self._known is not None:
            self._known.check(self._tied[name], read.hexdigest())
        self._sums[name] = written.hexdigest()

    def sums(self) -> dict[str, tuple[str, str]]:
        """Return the dtype and the checksum of each tensor as it was written."""
        return {
            name: (dtype_name(plan.dtype), self._sums[plan.shared_with or name])
            for name, plan in self._plans.items()
        }

    def verify(self, new: Path, progress: Progress | None) -> None:
        """Read what was written, from the disk, and compare every tensor with the source's."""
        _, slices = formats.read(new)
        if plans(slices) != list(self._plans.values()):
            raise _wrong(new, "other names, shapes, dtypes or ties than the source")
        lock = threading.Lock()
        wrong: list[str] = []

        def check(where: TensorSlice) -> None:
            running = _running(self._plans[where.name])
            for piece in read_pieces(where):
                running.update(piece)
                if progress is not None:
                    progress(piece.nbytes)
            if running.hexdigest() != self._sums[where.name]:
                with lock:
                    wrong.append(where.name)

        own = [one for one in slices if self._plans[one.name].shared_with is None]
        run_parallel(partial(check, one) for one in own)
        if wrong:
            raise _wrong(new, f"other values than the source in {', '.join(sorted(wrong)[:3])}")


def _running(plan: TensorPlan) -> RunningChecksum:
    return RunningChecksum(torch.Size(plan.shape).numel() * plan.dtype.itemsize)


def _wrong(new: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{new.name}: what was written has {what}; it was removed",
        "check the disk and the memory of this machine, then convert again",
    )
