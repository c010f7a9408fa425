"""Files and folders of plain tensors, as torch, safetensors and weighin write them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import torch
from layouts import NO_FOLDER, Layout, Made
from small import state

GROUP: Final = "Plain state dicts"


def _saved(folder: Path, tensors: dict[str, torch.Tensor]) -> Made:
    torch.save(tensors, folder / "model.pt")
    return Made(folder / "model.pt", tensors)


def _zip(folder: Path) -> Made:
    return _saved(folder, state())


def _before_1_6(folder: Path) -> Made:
    tensors = state()
    torch.save(tensors, folder / "model.pt", _use_new_zipfile_serialization=False)
    return Made(folder / "model.pt", tensors)


def _safetensors(folder: Path) -> Made:
    from safetensors.torch import save_file

    tensors = state(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    return Made(folder / "model.safetensors", tensors)


def _every_dtype(folder: Path) -> Made:
    kinds = [
        "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    ]  # fmt: skip
    tensors = {f"block.{kind}": torch.arange(6).to(getattr(torch, kind)) for kind in kinds}
    return _saved(folder, tensors)


def _shared(folder: Path) -> Made:
    tensors = state()
    tensors["head.weight"] = tensors["embed.weight"]
    return _saved(folder, tensors)


def _strided(folder: Path) -> Made:
    whole = torch.randn(12, 10)
    return _saved(folder, {"block.weight": whole.t(), "block.bias": torch.randn(12)})


def _scalars_and_empties(folder: Path) -> Made:
    tensors = {"steps": torch.tensor(7), "none": torch.empty(0, 4), "scale": torch.tensor(0.5)}
    return _saved(folder, tensors | state())


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


def _sharded(write: str) -> Callable[[Path], Made]:
    def make(folder: Path) -> Made:
        import json

        from safetensors.torch import save_file

        tensors = state()
        names = list(tensors)
        suffix = ".safetensors" if write == "safetensors" else ".bin"
        base = "model" if write == "safetensors" else "pytorch_model"
        places: dict[str, str] = {}
        for number, part in enumerate((names[:2], names[2:]), 1):
            file = f"{base}-{number:05}-of-00002{suffix}"
            shard = {name: tensors[name] for name in part}
            if write == "safetensors":
                save_file(shard, folder / file)
            else:
                torch.save(shard, folder / file)
            places |= dict.fromkeys(part, file)
        index = {"metadata": {"total_size": 0}, "weight_map": places}
        (folder / f"{base}{suffix}.index.json").write_text(json.dumps(index))
        return Made(folder, tensors)

    return make


_PLAIN: Final[dict[str, Callable[[Path], Made]]] = {
    "a file of torch.save": _zip,
    "a file of torch.save before 1.6": _before_1_6,
    "a file of safetensors": _safetensors,
    "ten dtypes": _every_dtype,
    "two names of one tensor": _shared,
    "a transposed tensor": _strided,
    "scalars and empty tensors": _scalars_and_empties,
    "torch.distributed.checkpoint": _distributed,
    "safetensors shards with an index": _sharded("safetensors"),
    ".bin shards with an index": _sharded("bin"),
}

LAYOUTS: Final = [
    *(Layout(name, GROUP, make, NO_FOLDER) for name, make in _PLAIN.items()),
    Layout("names that begin with module.", GROUP, _prefixed, NO_FOLDER, {"strip_prefix": "module."}),
    Layout("a training checkpoint of plain values", GROUP, _in_a_training_checkpoint, NO_FOLDER, {"key": "model"}),
]  # fmt: skip
