"""Tensors of every dtype, and tensors that are not plain: quantised, sparse, distributed, of a subclass."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from layouts import NO_FOLDER, Layout, Made, all_but, refused
from small import state

GROUP: Final = "Values: dtypes and kinds of tensors"

Tensors = dict[str, torch.Tensor]


def _of(dtype: torch.dtype, numel: int = 24) -> torch.Tensor:
    """Elements of bits that are a finite number in each dtype."""
    raw = torch.arange(numel * dtype.itemsize) % 60
    return raw.to(torch.uint8).view(dtype).reshape(4, -1)


def _pt(make: Callable[[], Tensors]) -> Callable[[Path], Made]:
    def write(folder: Path) -> Made:
        tensors = make()
        torch.save(tensors, folder / "model.pt")
        return Made(folder / "model.pt", tensors)

    return write


def _safetensors(make: Callable[[], Tensors]) -> Callable[[Path], Made]:
    def write(folder: Path) -> Made:
        from safetensors.torch import save_file

        tensors = make()
        save_file(tensors, folder / "model.safetensors")
        return Made(folder / "model.safetensors", tensors)

    return write


def _unsigned() -> Tensors:
    kinds = (torch.uint16, torch.uint32, torch.uint64)
    return {f"block.{kind}".replace("torch.", ""): _of(kind) for kind in kinds} | state()


def _float8() -> Tensors:
    kinds = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
    return {f"block.{kind}".replace("torch.", ""): _of(kind) for kind in kinds} | state()


def _scales() -> Tensors:
    return {"block.scale": _of(torch.float8_e8m0fnu)} | state()


def _float4() -> Tensors:
    return {"block.packed": _of(torch.float4_e2m1fn_x2)} | state()


def _complex64() -> Tensors:
    return {"block.freqs": torch.randn(4, 6, dtype=torch.complex64)} | state()


def _complex() -> Tensors:
    kinds = (torch.complex32, torch.complex64, torch.complex128)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of complex32
        return {f"block.{kind}".replace("torch.", ""): _of(kind) for kind in kinds} | state()


def _six_bits(folder: Path) -> Made:
    from json import dumps

    fields = {"dtype": "F6_E2M3", "shape": [4, 4], "data_offsets": [0, 12]}
    header = dumps({"block.weight": fields}).encode()
    file = folder / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    return Made(file, {})


def _saved(value: Callable[[], Any]) -> Callable[[Path], Made]:
    def write(folder: Path) -> Made:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kinds of tensors on their way in, or out
            torch.save(value(), folder / "model.pt")
        return Made(folder / "model.pt", {})

    return write


def _quantised() -> Tensors:
    codes = torch.quantize_per_tensor(torch.randn(8, 8), 0.1, 0, torch.qint8)
    return {"block.weight": codes} | state()


def _quantised_by_channel() -> Tensors:
    scales, zeros = torch.ones(8), torch.zeros(8)
    return {"w": torch.quantize_per_channel(torch.randn(8, 8), scales, zeros, 0, torch.quint8)}


def _quantised_model() -> dict[str, Any]:
    """A state dict of dynamic quantisation: a tuple of codes and bias is under one name."""
    codes = torch.quantize_per_tensor(torch.randn(8, 8), 0.1, 0, torch.qint8)
    return {"fc._packed_params.dtype": torch.qint8, "fc._packed_params": (codes, torch.zeros(8))}


def _sparse() -> Tensors:
    return {"block.weight": torch.eye(8).to_sparse()} | state()


def _nested() -> Tensors:
    return {"block.weight": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])}


def _on_meta() -> Tensors:
    return {"block.weight": torch.empty(8, 8, device="meta")} | state()


def _conjugated() -> Tensors:
    return {"block.freqs": torch.randn(4, dtype=torch.complex64).conj()} | state()


def _lazy() -> dict[str, Any]:
    return dict(torch.nn.LazyLinear(4).state_dict(keep_vars=True)) | state()


def _bits() -> Tensors:
    return {"block.weight": torch.zeros(8, dtype=torch.uint8).view(torch.bits8)} | state()


class Weights(torch.Tensor):
    """A subclass of somebody's own."""


def _subclass() -> Tensors:
    return {"block.weight": torch.randn(8, 8).as_subclass(Weights)} | state()


def _torchao() -> Tensors:
    torchao = import_module("torchao.quantization")  # an import statement has no types
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).eval()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    return model.state_dict()


def _of_one_rank(make: Callable[[], object]) -> Callable[[Path], Made]:
    def write(folder: Path) -> Made:
        import torch.distributed as dist

        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        torch.save({"block.weight": make()}, folder / "rank0.pt")
        dist.destroy_process_group()
        return Made(folder / "rank0.pt", {})

    return write


def _dtensor() -> object:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(torch.randn(8, 8), init_device_mesh("cpu", (1,)), [Shard(0)])


def _sharded_tensor() -> object:
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import ChunkShardingSpec

    spec = ChunkShardingSpec(dim=0, placements=["rank:0/cpu"])
    return sharded_tensor.ones(spec, 8, 8)


_PLAIN: Final = "weighin reads plain tensors\n"
_NOT_READ: Final[dict[str, tuple[Callable[[Path], Made], str]]] = {
    "six-bit numbers of safetensors (F6_E2M3)": (
        _six_bits, r"'F6_E2M3'; torch does not have this dtype\nwith the program that wrote the file, convert the tensor",
    ),
    "a quantised tensor (qint8) beside plain ones": (_saved(_quantised), rf"tensor of torch.qint8; {_PLAIN}.*dequantize"),
    "a tensor quantised by channel (quint8)": (_saved(_quantised_by_channel), rf"tensor of torch.quint8; {_PLAIN}.*dequantize"),
    "a model after dynamic quantisation": (
        _saved(_quantised_model), rf"_packed_params.0' is a tensor of torch.qint8; {_PLAIN}.*dequantize",
    ),
    "a sparse tensor": (_saved(_sparse), rf"_rebuild_sparse_tensor; {_PLAIN}.*to_dense"),
    "a nested tensor": (_saved(_nested), rf"_rebuild_nested_tensor; {_PLAIN}.*unbind"),
    "a tensor on the meta device": (_saved(_on_meta), rf"_rebuild_meta_tensor_no_storage; {_PLAIN}.*with values"),
    "a tensor that is conjugated lazily": (_saved(_conjugated), rf"of conjugated or negated values; {_PLAIN}.*resolve_conj"),
    "a lazy parameter without values": (_saved(_lazy), rf"UninitializedParameter; {_PLAIN}.*with values"),
    "a dtype of bits (torch.bits8)": (_saved(_bits), rf"a tensor of torch.bits8; {_PLAIN}.*view\(torch.uint8\)"),
    "a tensor of a subclass": (_saved(_subclass), rf"of \S*Weights; {_PLAIN}load it with the code that wrote it"),
    "DTensors of one rank": (_of_one_rank(_dtensor), rf"of \S+DTensor; {_PLAIN}.*full_tensor"),
    "ShardedTensors of one rank": (_of_one_rank(_sharded_tensor), rf"of \S+ShardedTensor; {_PLAIN}.*full_tensor"),
}  # fmt: skip

_NOT_MEASURED: Final = refused(
    r"torch.float4_e2m1fn_x2; torch can neither copy nor convert a tensor of this dtype\nits loads cannot be measured",
    all_but("inspect", "convert", "load"),
)

LAYOUTS: Final = [
    Layout("unsigned integers of 16 to 64 bits", GROUP, _pt(_unsigned), NO_FOLDER),
    Layout("unsigned integers in safetensors", GROUP, _safetensors(_unsigned), NO_FOLDER),
    Layout("four dtypes of 8-bit floats", GROUP, _safetensors(_float8), NO_FOLDER),
    Layout("powers of two (F8_E8M0)", GROUP, _safetensors(_scales), NO_FOLDER),
    Layout("complex numbers in safetensors (C64)", GROUP, _safetensors(_complex64), NO_FOLDER),
    Layout(
        "three dtypes of complex numbers", GROUP, _pt(_complex),
        NO_FOLDER | {"convert": "safetensors has no dtype torch.complex32\n.*--format pt"},
    ),
    Layout("pairs of 4-bit floats in safetensors (F4)", GROUP, _safetensors(_float4), _NOT_MEASURED),
    Layout("pairs of 4-bit floats in torch.save", GROUP, _pt(_float4), _NOT_MEASURED),
    *(Layout(name, GROUP, make, refused(words)) for name, (make, words) in _NOT_READ.items()),
    Layout(
        "a model that torchao quantised", GROUP, _saved(_torchao),
        refused(rf"of torchao\.\S+; {_PLAIN}load it with the code that wrote it.*dequantize"),
        packages=("torchao",),
    ),
]  # fmt: skip
