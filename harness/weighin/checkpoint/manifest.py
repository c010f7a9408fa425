"""What a model must look like after a load: every tensor's name, shape, dtype and checksums.

Standard library only: the parent reads manifests too.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from weighin.atomic import write_text
from weighin.errors import CheckpointError
from weighin.formats.item_bytes import ITEM_BYTES

SCHEMA: Final = 1

Kind = Literal["parameter", "persistent_buffer", "non_persistent_buffer"]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One parameter or buffer of a model, as the checkpoint or the constructor gives it.

    Attributes:
        dtype: without "torch.", in the checkpoint.
        bytes: of its elements in that dtype.
        shared_with: the first name of its group of tied names; None for that first name itself
            and for a tensor that is tied to none.
        checksums: by dtype; floating-point tensors have those of the value converted to
            float32, bfloat16 and float16, others only that of their own dtype.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    kind: Kind
    shared_with: str | None
    checksums: dict[str, str]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def floating(self) -> bool:
        """Whether a load converts it, as ``torch.nn.Module.to`` does: of float8, too."""
        return "float" in self.dtype

    def bytes_as(self, dtype: str) -> int:
        """Return its bytes in a model whose floating-point tensors are ``dtype``."""
        return self.numel * ITEM_BYTES[dtype] if self.floating else self.bytes


@dataclass(frozen=True, slots=True)
class Manifest:
    """All tensors of a model in the order of its state dict, non-persistent buffers last.

    ``source`` says where the values come from: "seed 0", or a user's file.
    """

    model: str
    builder: str
    source: str
    tensors: tuple[TensorEntry, ...]

    @property
    def state_dict_entries(self) -> int:
        """How many keys the checkpoint has, tied names counted each."""
        return sum(entry.kind != "non_persistent_buffer" for entry in self.tensors)

    @property
    def parameters(self) -> int:
        """How many numbers the parameters are, tied ones counted once."""
        return sum(entry.numel for entry in self._once() if entry.kind == "parameter")

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of all tensors in the checkpoint, tied ones counted once."""
        return sum(e.bytes for e in self._once() if e.kind != "non_persistent_buffer")

    @property
    def largest_bytes(self) -> int:
        """Bytes of the largest single tensor in the checkpoint."""
        return max((e.bytes for e in self.tensors if e.kind != "non_persistent_buffer"), default=0)

    def model_bytes(self, dtype: str = "float32") -> int:
        """Return the bytes of all parameters and buffers once loaded as ``dtype``."""
        return sum(entry.bytes_as(dtype) for entry in self._once())

    def entry(self, name: str) -> TensorEntry:
        """Return the tensor called ``name``; raises KeyError."""
        for entry in self.tensors:
            if entry.name == name:
                return entry
        raise KeyError(name)

    def _once(self) -> Iterator[TensorEntry]:
        return (entry for entry in self.tensors if entry.shared_with is None)

    def write(self, path: Path) -> None:
        """Write as JSON; a reader sees the old file or the new one, never half of it."""
        write_text(path, json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1))


def read_manifest(path: Path) -> Manifest:
    """Return the manifest that ``Manifest.write`` wrote.

    Raises:
        CheckpointError: missing, damaged, or of a later schema.
    """
    repair = "delete it: it is made again at the next run"
    try:
        fields = json.loads(path.read_text())
        if fields.pop("schema") != SCHEMA:
            raise CheckpointError(f"{path}: manifest of another version of weighin", repair)
        tensors = tuple(
            TensorEntry(**{**entry, "shape": tuple(entry["shape"])})
            for entry in fields.pop("tensors")
        )
        return Manifest(tensors=tensors, **fields)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot read manifest: {error.strerror}", repair) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: damaged manifest: {error!r}", repair) from error
