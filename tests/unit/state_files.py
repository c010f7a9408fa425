"""State dicts in files of any layout: written by weighin, or as torch did before 1.6, and read by weighin."""

import io
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weighin.checkpoint.checksum import pieces_of
from weighin.checkpoint.reader import read_pieces
from weighin.stream import formats
from weighin.stream.pretrained_library import WHOLE, Selection
from weighin.stream.slices import TensorPlan
from weighin.stream.torch_files import MAGIC, VERSION
from weighin.stream.write import write


def write_state(path: Path, fmt: str, state: Mapping[str, torch.Tensor]) -> None:
    """Write a format of weighin, or ``pt_legacy``; names of one tensor are tied."""
    if fmt == "pt_legacy":
        _write_legacy(path, state)
        return
    firsts: dict[tuple[Any, ...], str] = {}
    plans = []
    for name, one in state.items():
        first = firsts.setdefault((one.data_ptr(), one.shape), name) if one.numel() else name
        plan = TensorPlan(name, tuple(one.shape), one.dtype)
        plans.append(plan if first == name else replace(plan, shared_with=first))
    write(fmt, path, plans, lambda name: pieces_of(state[name]))


def _write_legacy(path: Path, state: Mapping[str, torch.Tensor]) -> None:
    """Call the storages 0, 1, ..., for files that are the same each time."""
    stored: dict[int, Any] = {}

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if not isinstance(value, torch.storage.TypedStorage):
                return None
            stored.setdefault(value._untyped_storage._cdata, value)
            key = [*stored].index(value._untyped_storage._cdata)
            kind = getattr(torch, value._pickle_storage_type())
            return "storage", kind, str(key), "cpu", value._size(), None

    file = io.BytesIO()
    sizes = {"short": 2, "int": 4, "long": 4}
    system = {"protocol_version": VERSION, "little_endian": True, "type_sizes": sizes}
    for value in (MAGIC, VERSION, system, dict(state)):
        Pickler(file, protocol=2).dump(value)
    pickle.dump([str(number) for number in range(len(stored))], file, 2)
    for one in stored.values():
        file.write(one._size().to_bytes(8, "little"))
        file.write(bytes(one._untyped_storage))
    path.write_bytes(file.getvalue())


def read_state(path: Path, selection: Selection = WHOLE) -> dict[str, torch.Tensor]:
    """Read each tensor of a checkpoint, piece by piece."""
    found = {}
    for one in formats.read(path, selection):
        pieces = [piece.reshape(-1).clone() for piece in read_pieces(one)]
        flat = torch.cat(pieces) if pieces else torch.empty(0, dtype=one.dtype)
        found[one.name] = flat.reshape(one.shape)
    return found


def assert_same(found: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> None:
    """Compare names in their order, dtypes and values."""
    assert list(found) == list(right)
    for name, one in right.items():
        assert found[name].dtype == one.dtype, name
        assert torch.equal(found[name], one), name
