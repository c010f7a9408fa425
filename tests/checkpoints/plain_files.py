"""Files and folders of plain tensors, as torch, safetensors and weighin write them."""

from pathlib import Path
from typing import Final

import torch
from layouts import NO_FOLDER, Layout, Made, Maker
from small import Tensors, save_shards, saved, state

GROUP: Final = "Plain state dicts"


def _every_dtype() -> Tensors:
    kinds = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool"
    return {f"block.{kind}": torch.arange(6).to(getattr(torch, kind)) for kind in kinds.split()}


def _shared() -> Tensors:
    tensors = state()
    return tensors | {"head.weight": tensors["embed.weight"]}


def _strided() -> Tensors:
    return {"block.weight": torch.randn(12, 10).t(), "block.bias": torch.randn(12)}


def _scalars_and_empties() -> Tensors:
    tensors = {"steps": torch.tensor(7), "none": torch.empty(0, 4), "scale": torch.tensor(0.5)}
    return tensors | state()


def _prefixed(folder: Path) -> Made:
    tensors = state()
    torch.save({f"module.{name}": one for name, one in tensors.items()}, folder / "model.pt")
    return Made(folder / "model.pt", tensors)


def _in_a_training_checkpoint(folder: Path) -> Made:
    tensors = state()
    torch.save({"model": tensors, "epoch": 3, "lr": 1e-4}, folder / "model.pt")
    return Made(folder / "model.pt", tensors)


def _distributed(folder: Path) -> Made:
    import torch.distributed.checkpoint as dcp

    tensors = state()
    dcp.state_dict_saver.save(dict(tensors), checkpoint_id=folder / "dcp", no_dist=True)
    return Made(folder / "dcp", tensors)


def _sharded(base: str, suffix: str) -> Maker:
    def make(folder: Path) -> Made:
        tensors = state()
        names = list(tensors)
        parts = [{name: tensors[name] for name in part} for part in (names[:2], names[2:])]
        save_shards(folder, parts, base, suffix)
        return Made(folder, tensors)

    return make


_PLAIN: Final[dict[str, Maker]] = {
    "a file of torch.save": saved(state),
    "a file of torch.save before 1.6": saved(state, _use_new_zipfile_serialization=False),
    "a file of safetensors": saved(lambda: state(torch.bfloat16), "model.safetensors"),
    "ten dtypes": saved(_every_dtype),
    "two names of one tensor": saved(_shared),
    "a transposed tensor": saved(_strided),
    "scalars and empty tensors": saved(_scalars_and_empties),
    "torch.distributed.checkpoint": _distributed,
    "safetensors shards with an index": _sharded("model", ".safetensors"),
    ".bin shards with an index": _sharded("pytorch_model", ".bin"),
}

LAYOUTS: Final = [
    *(Layout(name, GROUP, make, NO_FOLDER) for name, make in _PLAIN.items()),
    Layout("names that begin with module.", GROUP, _prefixed, NO_FOLDER, {"strip_prefix": "module."}),
    Layout("a training checkpoint of plain values", GROUP, _in_a_training_checkpoint, NO_FOLDER, {"key": "model"}),
]  # fmt: skip
