"""Read and write a safetensors file: a JSON header and the tensors' bytes, with nothing to execute.

The format has no shared tensors. weighin writes a tied tensor only under the first of its names.
The other names are in ``__metadata__`` as {name: first name}, like those of Hugging Face's
``save_model``. weighin reads these names too; other programs see only the first names. If tied
names are not at the end of the state dict, the metadata's key ``weighin.order`` lists all names in
order.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from weighin.errors import CheckpointError, ConfigError
from weighin.formats.base import Pieces, Plans, Progress, Slices, TensorPlan, TensorSlice
from weighin.formats.dtypes import dtype_name
from weighin.formats.recognise import MOST_HEADER_BYTES, is_safetensors
from weighin.formats.safetensors_header import DTYPES, METADATA, PACKED, read_header
from weighin.formats.unknown_file import RESAVE, first_bytes, shown

if TYPE_CHECKING:
    from weighin.formats.parallel_write import Place

NAME: Final = "safetensors"
SUFFIX: Final = ".safetensors"

_ALIGNMENT: Final = 64  # bytes: the data begin at a cache line, as in torch.save
_FORMAT: Final = "format"  # {"format": "pt"} names the writing library; it is not a tied name
_ORDER: Final = "weighin.order"
_OF_VECTORS: Final = {name for name, torch_name in DTYPES.items() if torch_name in PACKED}
_NAMES: Final = {torch_name: name for name, torch_name in DTYPES.items()}


def matches(path: Path) -> bool:
    head = first_bytes(path)
    if not head:
        return False
    return path.suffix == SUFFIX or is_safetensors(head)


def files(path: Path) -> list[Path]:
    read_header(path)
    return [path]


def read(path: Path) -> Slices:
    """Return all tensors' offsets, in the order of ``weighin.order`` or else of the header."""
    tensors, metadata = read_header(path)
    slices = dict(tensors)
    for name, first in metadata.items():
        if name not in tensors and first in tensors and name not in {_FORMAT, _ORDER}:
            slices[name] = replace(tensors[first], name=name)
    if _ORDER not in metadata:
        return Slices(slices.values())
    return Slices(slices[name] for name in _order(path, metadata[_ORDER], slices))


def write(target: Path, tensors: Plans, pieces: Pieces, progress: Progress | None = None) -> None:
    """Write a file that does not exist yet; see ``base.Layout.write``.

    Raises:
        ConfigError: the format does not allow a tensor's dtype or name, or a header so long.
    """
    from weighin.formats.parallel_write import write_raw  # not at the top: imports torch

    head, places = layout_of(tensors)
    write_raw(target, {0: head}, places, pieces, progress)


def layout_of(tensors: Plans) -> "tuple[bytes, list[Place]]":
    """Return the file's bytes before the data, and the offset of each tensor's data.

    The tensors with the widest elements come first, so that each offset is a multiple of the
    tensor's element size. The header keeps the order of ``tensors``. ``layout_of`` raises
    ConfigError as ``write`` does.
    """
    stored = [plan for plan in tensors if plan.shared_with is None]
    begins: dict[str, int] = {}
    at = 0
    for plan in sorted(stored, key=lambda plan: -plan.dtype.itemsize):
        begins[plan.name] = at
        at += plan.nbytes
    header: dict[str, Any] = {METADATA: _metadata(tensors)}
    for plan in stored:
        begin = begins[plan.name]
        header[plan.name] = {
            "dtype": _dtype_name(plan),
            "shape": _stored_shape(plan),
            "data_offsets": [begin, begin + plan.nbytes],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    if len(text) > MOST_HEADER_BYTES:
        raise ConfigError(
            f"the header of {len(stored):,} tensors takes {len(text):,} bytes, but safetensors allows "
            f"{MOST_HEADER_BYTES:,}",
            "write several files: weighin convert CHECKPOINT OUT --format sharded",
        )
    head = len(text).to_bytes(8, "little") + text
    return head, [(plan, len(head) + begins[plan.name]) for plan in stored]


def _stored_shape(plan: TensorPlan) -> list[int]:
    """Return a tensor's shape in the header, which counts both numbers in a float4_e2m1fn_x2."""
    numbers = PACKED.get(dtype_name(plan.dtype), 1)
    return [*plan.shape[:-1], *(numbers * size for size in plan.shape[-1:])]


def _dtype_name(plan: TensorPlan) -> str:
    name = _NAMES.get(dtype_name(plan.dtype))
    if name is None or (not plan.shape and name in _OF_VECTORS):
        scalars = "" if name is None else " for a single element"
        raise ConfigError(
            f"tensor {shown(plan.name)}: safetensors has no dtype {plan.dtype}{scalars}",
            "write the format pt, which has every dtype of torch: --format pt",
        )
    if plan.name == METADATA:
        raise ConfigError(
            f"a tensor is called {METADATA}, a name that safetensors reserves",
            "write the format pt, which allows every name: --format pt",
        )
    return name


def _metadata(tensors: Plans) -> dict[str, str]:
    ties = {plan.name: plan.shared_with for plan in tensors if plan.shared_with is not None}
    reserved = [name for name in ties if name in {_FORMAT, _ORDER}]
    if reserved:
        raise ConfigError(
            f"the tied tensor {reserved[0]!r} has a name that is reserved in the metadata",
            "write the format pt, which allows every name: --format pt",
        )
    metadata = {_FORMAT: "pt", **ties}
    names = [plan.name for plan in tensors]
    if ties and names[-len(ties) :] != list(ties):
        metadata[_ORDER] = json.dumps(names)
    return metadata


def _order(path: Path, text: str, slices: dict[str, TensorSlice]) -> list[str]:
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    fits = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if not fits or sorted(names) != sorted(slices):
        raise CheckpointError(
            f"{path}: {METADATA}: {_ORDER} is not a list of the file's tensor names", RESAVE
        )
    return list(names)
