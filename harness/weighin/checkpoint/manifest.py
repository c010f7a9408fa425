"""Read and write manifests, without torch: name, shape, dtype and checksums of a loaded model's tensors."""

import json
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Final, Literal

from weighin.errors import CheckpointError
from weighin.files import write_text
from weighin.stream.slices import ITEM_BYTES

SCHEMA: Final = 1

Kind = Literal["parameter", "persistent_buffer", "non_persistent_buffer"]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One parameter or buffer, with the checksums that its values have in a correctly loaded model."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # in the checkpoint, without "torch."
    bytes: int  # in this dtype
    kind: Kind
    shared_with: str | None  # the first name of a tied tensor, in the entries of its other names
    checksums: dict[str, str]  # by dtype: its own; if models convert it, all of CELL_DTYPES
    # of a tensor that ``from_pretrained`` changes: those of the file's values, which are right too
    file_checksums: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Manifest:
    """All tensors of a model in the order of its state dict, with non-persistent buffers last."""

    model: str
    builder: str
    source: str  # "seed 0", or the path of a user's checkpoint
    tensors: tuple[TensorEntry, ...]
    keys: str = ""  # how the file differs from the state dict: "quantised with gptq"

    def model_bytes(self, dtype: str = "float32") -> int:
        """Return the size in bytes of all parameters and buffers when loaded in ``dtype``."""
        total = 0
        for one in self.tensors:
            is_kept = one.kind != "non_persistent_buffer" and set(one.checksums) == {one.dtype}
            if one.shared_with is None:
                is_converted = "float" in one.dtype and not is_kept
                total += prod(one.shape) * ITEM_BYTES[dtype] if is_converted else one.bytes
        return total

    def write(self, path: Path) -> None:
        write_text(path, json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1))


def read_manifest(path: Path) -> Manifest:
    """Return the manifest in a file; CheckpointError if it is missing, damaged, or of another version."""
    repair = "delete this file; the next run writes it again"
    try:
        fields = json.loads(path.read_text())
        if fields.pop("schema") != SCHEMA:
            raise CheckpointError(f"{path}: another version of weighin wrote this manifest", repair)
        for entry in fields["tensors"]:
            entry["shape"] = tuple(entry["shape"])
        tensors = tuple(TensorEntry(**entry) for entry in fields.pop("tensors"))
        return Manifest(tensors=tensors, **fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged manifest: {error!r}", repair) from error
