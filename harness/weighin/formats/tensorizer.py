"""Write a file of tensorizer's format with the package tensorizer, for the strategy ``tensorizer``.

``write`` calls the package's ``TensorSerializer``. Only the strategy ``tensorizer`` reads such a
file, and uses the package for this. A tied weight is written only under the first of its names.
weighin verifies the loaded model, as with every format.

::

    5 bytes    |TZR|
    the rest   the package's header, an index of 256 KiB, and the tensors, each with its checksums
"""

from pathlib import Path
from typing import TYPE_CHECKING, Final

from weighin import install
from weighin.errors import CheckpointError, ConfigError, FormatLimit
from weighin.formats.base import Pieces, Plans, Progress, Slices
from weighin.formats.foreign import check_present, first_bytes

if TYPE_CHECKING:
    import torch

NAME: Final = "tensorizer"
SUFFIX: Final = ".tensors"

_MAGIC: Final = b"|TZR|"
_INDEX_BYTES: Final = 256 * 1024  # the package reserves these bytes of each file for its index
_ENTRY_BYTES: Final = 33  # of a tensor in the index, without the name, the dtype and the shape


def matches(path: Path) -> bool:
    return first_bytes(path).startswith(_MAGIC)


def files(path: Path) -> list[Path]:
    check_present(path)
    return [path]


def read(path: Path) -> Slices:
    """Raise CheckpointError, because weighin does not read tensorizer's format."""
    raise CheckpointError(
        f"{path}: a file of tensorizer's format, which only the package tensorizer reads",
        "give the checkpoint from which this file was made; weighin then writes such a file for the"
        " strategy tensorizer",
    )


def write(target: Path, tensors: Plans, pieces: Pieces, progress: Progress | None = None) -> None:
    """Write a file that does not exist yet; ``write`` needs memory for the largest tensor.

    Raises:
        ConfigError: the package is missing.
        FormatLimit: the names of the tensors do not fit into the package's index.
    """
    try:
        from tensorizer import TensorSerializer, TensorType
    except ImportError as error:
        raise ConfigError(
            "the package tensorizer, which alone can write tensorizer's format, cannot be"
            f" imported: {error}",
            install.command("loaders"),
        ) from None
    import torch

    from weighin.formats.zip_writer import finish  # not at the top: imports torch

    stored = [plan for plan in tensors if plan.shared_with is None]
    _check_index(stored)
    writer = TensorSerializer(str(target))
    try:
        for number, plan in enumerate(stored):
            values = torch.empty(plan.shape, dtype=plan.dtype)
            _fill(values, plan.name, pieces, progress)
            index = number % 2**16  # two bytes in the file; the strategy does not read them
            writer.write_tensor(index, plan.name, TensorType.STATE_DICT, values)
    finally:
        writer.close()
    with target.open("rb+") as file:
        finish(file.fileno())


def _fill(values: "torch.Tensor", name: str, pieces: Pieces, progress: Progress | None) -> None:
    flat, at = values.view(-1), 0
    for piece in pieces(name):
        flat[at : at + piece.numel()] = piece.reshape(-1)
        at += piece.numel()
        if progress is not None:
            progress(piece.nbytes)
    if at != flat.numel():
        raise ValueError(f"{name!r}: {at} elements for a tensor of {flat.numel()}")


def _check_index(stored: Plans) -> None:
    needed = sum(
        _ENTRY_BYTES + len(plan.name.encode()) + len(str(plan.dtype)) + 4 * len(plan.shape)
        for plan in stored
    )
    if needed > _INDEX_BYTES:
        raise FormatLimit(
            f"the names of {len(stored):,} tensors take up to {needed:,} bytes in the index, for "
            f"which tensorizer reserves {_INDEX_BYTES:,}",
            "leave the strategy tensorizer out: --strategies streaming,safetensors_mmap",
        )
