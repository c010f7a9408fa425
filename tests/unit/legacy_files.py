"""Write files as torch before 1.6 did, which weighin reads, with the values and ties of a plan."""

import io
import pickle
from math import prod
from pathlib import Path
from typing import Any

import torch

from weighin.stream.slices import Pieces, Plans
from weighin.stream.torch_files import MAGIC, VERSION
from weighin.stream.write import write as write_ours


def write(fmt: str, target: Path, tensors: Plans, pieces: Pieces) -> None:
    """Write a checkpoint in a format of weighin, or in ``pt_legacy``, with storages called 0, 1, ..."""
    if fmt != "pt_legacy":
        write_ours(fmt, target, tensors, pieces)
        return
    stored = [plan for plan in tensors if plan.shared_with is None]
    state = {plan.name: torch.empty(plan.shape, dtype=plan.dtype) for plan in stored}
    state = {plan.name: state[plan.shared_with or plan.name] for plan in tensors}
    keys = {state[plan.name].untyped_storage()._cdata: str(n) for n, plan in enumerate(stored)}

    class Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            if not isinstance(value, torch.storage.TypedStorage):
                return None
            kind = getattr(torch, value._pickle_storage_type())
            key, numel = keys[value._untyped_storage._cdata], value._size()
            return "storage", kind, key, "cpu", numel, None

    file = io.BytesIO()
    sizes = {"short": 2, "int": 4, "long": 4}
    system = {"protocol_version": VERSION, "little_endian": True, "type_sizes": sizes}
    for value in (MAGIC, VERSION, system, state, list(keys.values())):
        Pickler(file, protocol=2).dump(value)
    for plan in stored:
        file.write(prod(plan.shape).to_bytes(8, "little"))
        for piece in pieces(plan.name):
            file.write(piece.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    target.write_bytes(file.getvalue())
