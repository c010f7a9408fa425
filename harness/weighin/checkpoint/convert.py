"""Write a checkpoint in another format or dtype, in bounded memory.

A conversion reads and writes tensors in pieces of 16 MiB (of float32). It writes the new files to a
hidden folder next to the target, and gives the complete files the target's name. If the process is
killed before that, the source is unchanged and no target exists; the next conversion to the same
target removes the hidden folder.

If checksums of the source are known, the conversion compares the values that it reads with these
checksums, and writes checksums of the target. A later conversion of the target therefore detects
bytes that changed in the meantime.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from weighin import formats
from weighin.checkpoint import sidecar
from weighin.checkpoint.checksum import RunningChecksum
from weighin.checkpoint.generate import RECORD_BYTES
from weighin.checkpoint.model_keys import read_with_model_keys
from weighin.checkpoint.reader import checksum_of, plans, read_pieces
from weighin.checkpoint.staging import growing_beside
from weighin.construction.skeleton import map_large_tensors
from weighin.errors import CheckpointError, ConfigError
from weighin.files import rename
from weighin.formats import quantised
from weighin.formats.base import Plans, Progress, TensorSlice
from weighin.formats.dtypes import dtype_name
from weighin.formats.misfit import check_converts
from weighin.formats.pretrained_library import AS_SAVED, FolderChoice
from weighin.formats.selection import WHOLE, Selection
from weighin.formats.sharded import Sharded
from weighin.formats.zip_writer import run_parallel


@dataclass(frozen=True, slots=True)
class Conversion:
    """The options of a conversion.

    Attributes:
        fmt: the name of the format to write.
        dtype: the new dtype of floating-point tensors; None keeps each tensor's own dtype.
        max_shard_bytes: the largest size of one file of a sharded format.
        verify: whether to read the target back from the disk and compare it with the source.
        checksums: the file with the source's checksums, as returned by ``sidecar.find``.
        selection: the tensors to write, and their new names.
        model_keys: whether to write the tensors under the model's keys (module ``model_keys``).
        choice: the class of the folder's model, the adapter to merge, and whether the folder's code
            may run.
    """

    fmt: str
    dtype: torch.dtype | None
    max_shard_bytes: int
    verify: bool = False
    checksums: Path | None = None
    selection: Selection = WHOLE
    model_keys: bool = False
    choice: FolderChoice = AS_SAVED


def convert(
    source: Path,
    target: Path,
    order: Conversion,
    *,
    permit: Callable[[int], None] = lambda _: None,
    progress: Progress | None = None,
) -> dict[str, float]:
    """Write the checkpoint ``source`` to ``target``, which must not exist.

    ``convert`` returns the seconds that each stage took, by the stage's name. The target gets
    a checksum file if ``order`` names the source's checksums or demands a verification. ``convert``
    calls ``permit`` with an upper bound of the bytes to write, before it writes the first byte.

    Raises:
        ConfigError: for the reasons of ``check_target``, or another process is writing the target.
        CheckpointError: the source cannot be read, has no tensors or does not match its checksums,
            ``order`` names a new dtype for quantised codes, or ``verify`` finds a difference.
    """
    map_large_tensors()
    torch.set_num_threads(1)  # the format's writers run in several threads of their own
    started = time.monotonic()
    check_target(source, target)
    slices: Sequence[TensorSlice] = (
        read_with_model_keys(source, order.selection, order.choice, order.dtype)
        if order.model_keys
        else formats.read(source, order.selection)[1]
    )
    if not slices:
        raise CheckpointError(
            f"{source}: holds no tensors", "convert the checkpoint of a model with weights"
        )
    formats.refuse_empty(source, slices)
    if order.dtype is not None:
        check_converts(source, slices, "leave --dtype out")
    if order.dtype and (found := quantised.in_checkpoint(source, slices)):
        raise CheckpointError(
            f"{source}: {found.summary}; the tensors are codes and scales, which a conversion to"
            " another dtype would make useless",
            "leave --dtype out, to copy the codes and scales as they are"
            + (", or add --keys model, to dequantise them" if found.dequantises else ""),
        )
    tensors = plans(slices, order.dtype)
    layout = formats.named(order.fmt)
    stored_bytes = sum(plan.nbytes for plan in tensors if plan.shared_with is None)
    permit(stored_bytes + RECORD_BYTES * len(tensors))
    stored = sidecar.KnownChecksums(source, order.checksums, slices) if order.checksums else None
    copier = _Copier(slices, tensors, stored, summing=order.verify or stored is not None)
    read = time.monotonic()
    with growing_beside(target) as temporary:
        new = temporary / target.name
        if isinstance(layout, Sharded):
            most = order.max_shard_bytes
            layout.write(new, tensors, copier.pieces, progress, max_shard_bytes=most)
        else:
            layout.write(new, tensors, copier.pieces, progress)
        written = time.monotonic()
        if order.verify:
            copier.verify(new, progress)
        sums = new / sidecar.NAME if new.is_dir() else sidecar.beside(new)
        if copier.summing:
            sidecar.write(sums, copier.sums())
        check_target(source, target)
        rename(new, target)
        if sums.exists():  # the checksums of a folder are inside, and moved with the folder
            rename(sums, sidecar.beside(target))
    return {
        "read": read - started,
        "write": written - read,
        "verify": time.monotonic() - written,
    }


def check_target(source: Path, target: Path) -> None:
    """Raise ConfigError if the target or its checksum file exists, if the target is inside the
    source, or if the target's parent folder is missing.
    """
    for path in (target, sidecar.beside(target)):  # old checksums do not fit the new target
        if os.path.lexists(path):
            raise ConfigError(
                f"{path} exists already", "name another target, or first remove the existing one"
            )
    if not target.parent.is_dir():
        raise ConfigError(
            f"{target.parent}: no such folder", f"create the folder: mkdir -p {target.parent}"
        )
    if source.resolve() in target.resolve().parents:
        raise ConfigError(f"{target} is inside {source}", "name a target outside of the source")


class _Copier:
    """Reads the tensors of the source checkpoint for a writer, and computes the tensors' checksums."""

    def __init__(
        self,
        slices: Sequence[TensorSlice],
        tensors: Plans,
        stored: sidecar.KnownChecksums | None,
        *,
        summing: bool,
    ) -> None:
        self.summing = summing
        self._slices = {where.name: where for where in slices}
        self._plans = {plan.name: plan for plan in tensors}
        self._stored = stored
        self._sums: dict[str, str] = {}  # several threads set one item each
        self._tied: dict[str, list[str]] = {}
        for plan in tensors:
            self._tied.setdefault(plan.shared_with or plan.name, []).append(plan.name)

    def pieces(self, name: str) -> Iterator[torch.Tensor]:
        plan, where = self._plans[name], self._slices[name]
        written = RunningChecksum(plan.nbytes)
        read = written if plan.dtype == where.dtype else RunningChecksum(where.nbytes)
        for piece in read_pieces(where):
            converted = piece.to(plan.dtype)
            if self.summing:
                written.update(converted)
                if read is not written:
                    read.update(piece)
            yield converted
        if self._stored is not None:
            self._stored.check(self._tied[name], read.hexdigest())
        self._sums[name] = written.hexdigest()

    def sums(self) -> dict[str, tuple[str, str]]:
        return {
            name: (dtype_name(plan.dtype), self._sums[plan.shared_with or name])
            for name, plan in self._plans.items()
        }

    def verify(self, new: Path, progress: Progress | None) -> None:
        """Read the new checkpoint from the disk and compare every tensor with the source."""
        _, slices = formats.read(new)
        if plans(slices) != list(self._plans.values()):
            raise _wrong(new, "other names, shapes, dtypes or ties than the source")
        lock = threading.Lock()
        wrong: list[str] = []

        def check(where: TensorSlice) -> None:
            if checksum_of(where, progress) != self._sums[where.name]:
                with lock:
                    wrong.append(where.name)

        untied = [where for where in slices if self._plans[where.name].shared_with is None]
        run_parallel(partial(check, where) for where in untied)
        if wrong:
            raise _wrong(new, f"other values than the source in {', '.join(sorted(wrong)[:3])}")


def _wrong(new: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{new.name}: the written checkpoint has {what}; it was removed",
        "test this machine's disk and memory for faults, then run weighin convert again",
    )
