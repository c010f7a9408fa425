"""Read and write manifests: the name, shape, dtype and checksums of each tensor of a loaded model.

The module does not import torch, so that weighin's own process can read manifests, too.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from weighin.errors import CheckpointError
from weighin.files import write_text
from weighin.stream.slices import ITEM_BYTES

SCHEMA: Final = 1

Kind = Literal["parameter", "persistent_buffer", "non_persistent_buffer"]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One parameter or buffer of a model, and checksums of its values in a correctly loaded model.

    Attributes:
        dtype: the dtype in the checkpoint, without "torch.".
        bytes: the size of all elements in that dtype.
        shared_with: the first name of a tied tensor, in the entries of its other names; else None.
        checksums: maps dtypes to checksums of the values. A floating-point tensor has a checksum in
            float32, bfloat16, float16 and its own dtype. A tensor that is not floating-point, or
            that keeps its dtype in every model, has a checksum only in its own dtype.
        file_checksums: the checksums of the values in the file, for a tensor that
            ``from_pretrained`` changes after reading it; else None. A correctly loaded tensor
            matches ``file_checksums`` or ``checksums``.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    kind: Kind
    shared_with: str | None
    checksums: dict[str, str]
    file_checksums: dict[str, str] | None = None

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def floating(self) -> bool:
        """Whether the tensor is floating-point. A load converts its dtype, unless ``is_kept``."""
        return "float" in self.dtype

    @property
    def is_kept(self) -> bool:
        """Whether the tensor keeps its own dtype, whatever the model's dtype."""
        return self.kind != "non_persistent_buffer" and set(self.checksums) == {self.dtype}

    def bytes_as(self, dtype: str) -> int:
        """Return the tensor's size in bytes in a model whose floating-point tensors have ``dtype``."""
        converts = self.floating and not self.is_kept
        return self.numel * ITEM_BYTES[dtype] if converts else self.bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """All tensors of a model in the order of its state dict, with non-persistent buffers last.

    Attributes:
        source: the origin of the values: "seed 0", or the path of a user's checkpoint.
        keys: a note on how the file differs from the model's state dict: "48 keys converted"
            or "quantised with fp8"; empty without differences.
    """

    model: str
    builder: str
    source: str
    tensors: tuple[TensorEntry, ...]
    keys: str = ""

    @property
    def checkpoint_bytes(self) -> int:
        """The size of all tensors in the checkpoint in bytes; tied tensors count once."""
        return sum(e.bytes for e in self._once() if e.kind != "non_persistent_buffer")

    @property
    def largest_bytes(self) -> int:
        """The size of the largest tensor in the checkpoint in bytes."""
        return max((e.bytes for e in self.tensors if e.kind != "non_persistent_buffer"), default=0)

    def model_bytes(self, dtype: str = "float32") -> int:
        """Return the size in bytes of all parameters and buffers when loaded in ``dtype``."""
        return sum(entry.bytes_as(dtype) for entry in self._once())

    def entry(self, name: str) -> TensorEntry:
        """Return the tensor called ``name``; raise KeyError if the manifest has no such tensor."""
        for entry in self.tensors:
            if entry.name == name:
                return entry
        raise KeyError(name)

    def _once(self) -> Iterator[TensorEntry]:
        return (entry for entry in self.tensors if entry.shared_with is None)

    def write(self, path: Path) -> None:
        """Write the manifest as JSON; a concurrent reader sees a complete file, old or new."""
        write_text(path, json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1))


def read_manifest(path: Path) -> Manifest:
    """Return the manifest in a file that ``Manifest.write`` wrote.

    Raises:
        CheckpointError: the file is missing or damaged, or has another schema version.
    """
    repair = "delete this file; the next run creates it again"
    try:
        fields = json.loads(path.read_text())
        if fields.pop("schema") != SCHEMA:
            raise CheckpointError(f"{path}: another version of weighin wrote this manifest", repair)
        tensors = tuple(
            TensorEntry(**{**entry, "shape": tuple(entry["shape"])})
            for entry in fields.pop("tensors")
        )
        return Manifest(tensors=tensors, **fields)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read manifest: {error.strerror}", repair) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged manifest: {error!r}", repair) from error
