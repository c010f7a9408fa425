"""Tensors of every dtype, and tensors that are not plain: quantised, sparse, distributed, of a subclass."""

import json
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from layouts import NO_FOLDER, Layout, Made, Maker, all_but, refused
from small import WEIGHTS, Tensors, saved, state

GROUP: Final = "Values: dtypes and kinds of tensors"


def _of(dtype: torch.dtype, numel: int = 24) -> torch.Tensor:
    """Elements of bits that are a finite number in each dtype."""
    raw = torch.arange(numel * dtype.itemsize) % 60
    return raw.to(torch.uint8).view(dtype).reshape(4, -1)


def _of_each(*dtypes: torch.dtype) -> Callable[[], Tensors]:
    def make() -> Tensors:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of complex32
            of_dtypes = {f"block.{one}".replace("torch.", ""): _of(one) for one in dtypes}
            return of_dtypes | state()

    return make


_UNSIGNED: Final = _of_each(torch.uint16, torch.uint32, torch.uint64)
_FLOAT8: Final = _of_each(
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz
)
_COMPLEX: Final = _of_each(torch.complex32, torch.complex64, torch.complex128)


def _scales() -> Tensors:
    return {"block.scale": _of(torch.float8_e8m0fnu)} | state()


def _float4() -> Tensors:
    return {"block.packed": _of(torch.float4_e2m1fn_x2)} | state()


def _complex64() -> Tensors:
    return {"block.freqs": torch.randn(4, 6, dtype=torch.complex64)} | state()


def _six_bits(folder: Path) -> Made:
    fields = {"dtype": "F6_E2M3", "shape": [4, 4], "data_offsets": [0, 12]}
    header = json.dumps({"block.weight": fields}).encode()
    (folder / WEIGHTS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(12))
    return Made(folder / WEIGHTS, {})


def _odd(make: Callable[[], object]) -> Maker:
    """Return the maker of a file that nothing reads."""

    def write(folder: Path) -> Made:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kinds of tensors on their way in, or out
            torch.save(make(), folder / "model.pt")
        return Made(folder / "model.pt", {})

    return write


def _beside(make: Callable[[], torch.Tensor], name: str = "block.weight") -> Maker:
    """Return the maker of a file of an odd tensor beside plain ones."""
    return _odd(lambda: {name: make()} | state())


def _codes() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.randn(8, 8), 0.1, 0, torch.qint8)


def _by_channel() -> Tensors:
    scales, zeros = torch.ones(8), torch.zeros(8)
    return {"w": torch.quantize_per_channel(torch.randn(8, 8), scales, zeros, 0, torch.quint8)}


def _quantised_model() -> dict[str, Any]:
    """A state dict of dynamic quantisation: a tuple of codes and bias is under one name."""
    return {"fc._packed_params.dtype": torch.qint8, "fc._packed_params": (_codes(), torch.zeros(8))}


def _nested() -> Tensors:
    return {"block.weight": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)])}


def _lazy() -> dict[str, Any]:
    return dict(torch.nn.LazyLinear(4).state_dict(keep_vars=True)) | state()


class Weights(torch.Tensor):
    """A subclass of somebody's own."""


def _torchao() -> Tensors:
    torchao = import_module("torchao.quantization")  # an import statement has no types
    model = torch.nn.Sequential(torch.nn.Linear(64, 64)).eval()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    return model.state_dict()


def _of_one_rank(make: Callable[[], object]) -> Maker:
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
_NOT_READ: Final[dict[str, tuple[Maker, str]]] = {
    "six-bit numbers of safetensors (F6_E2M3)": (
        _six_bits, r"'F6_E2M3'; torch does not have this dtype\nload it with the program that wrote it, convert the tensor",
    ),
    "a quantised tensor (qint8) beside plain ones": (_beside(_codes), rf"tensor of torch.qint8; {_PLAIN}.*dequantize"),
    "a tensor quantised by channel (quint8)": (_odd(_by_channel), rf"tensor of torch.quint8; {_PLAIN}.*dequantize"),
    "a model after dynamic quantisation": (_odd(_quantised_model), rf"_packed_params.0' is a tensor of torch.qint8; {_PLAIN}.*dequantize"),
    "a sparse tensor": (_beside(lambda: torch.eye(8).to_sparse()), rf"_rebuild_sparse_tensor; {_PLAIN}.*to_dense"),
    "a nested tensor": (_odd(_nested), rf"_rebuild_nested_tensor; {_PLAIN}.*unbind"),
    "a tensor on the meta device": (_beside(lambda: torch.empty(8, 8, device="meta")), rf"_rebuild_meta_tensor_no_storage; {_PLAIN}.*with values"),
    "a tensor that is conjugated lazily": (_beside(lambda: torch.randn(4, dtype=torch.complex64).conj(), "block.freqs"), rf"of conjugated or negated values; {_PLAIN}.*resolve_conj"),
    "a lazy parameter without values": (_odd(_lazy), rf"UninitializedParameter; {_PLAIN}.*with values"),
    "a dtype of bits (torch.bits8)": (_beside(lambda: torch.zeros(8, dtype=torch.uint8).view(torch.bits8)), rf"a tensor of torch.bits8; {_PLAIN}.*view\(torch.uint8\)"),
    "a tensor of a subclass": (_beside(lambda: torch.randn(8, 8).as_subclass(Weights)), rf"of \S*Weights; {_PLAIN}load it with the code that wrote it"),
    "DTensors of one rank": (_of_one_rank(_dtensor), rf"of \S+DTensor; {_PLAIN}.*full_tensor"),
    "ShardedTensors of one rank": (_of_one_rank(_sharded_tensor), rf"of \S+ShardedTensor; {_PLAIN}.*full_tensor"),
}  # fmt: skip

_NOT_MEASURED: Final = refused(
    r"torch.float4_e2m1fn_x2; torch can neither copy nor convert a tensor of this dtype\nweighin cannot measure its load",
    all_but("inspect", "convert", "load"),
)

LAYOUTS: Final = [
    Layout("unsigned integers of 16 to 64 bits", GROUP, saved(_UNSIGNED), NO_FOLDER),
    Layout("unsigned integers in safetensors", GROUP, saved(_UNSIGNED, WEIGHTS), NO_FOLDER),
    Layout("four dtypes of 8-bit floats", GROUP, saved(_FLOAT8, WEIGHTS), NO_FOLDER),
    Layout("powers of two (F8_E8M0)", GROUP, saved(_scales, WEIGHTS), NO_FOLDER),
    Layout("complex numbers in safetensors (C64)", GROUP, saved(_complex64, WEIGHTS), NO_FOLDER),
    Layout(
        "three dtypes of complex numbers", GROUP, saved(_COMPLEX),
        NO_FOLDER | {"convert": "safetensors cannot store torch.complex32\n.*--format pt"},
    ),
    Layout("pairs of 4-bit floats in safetensors (F4)", GROUP, saved(_float4, WEIGHTS), _NOT_MEASURED),
    Layout("pairs of 4-bit floats in torch.save", GROUP, saved(_float4), _NOT_MEASURED),
    *(Layout(name, GROUP, make, refused(words)) for name, (make, words) in _NOT_READ.items()),
    Layout(
        "a model that torchao quantised", GROUP, _odd(_torchao),
        refused(rf"of torchao\.\S+; {_PLAIN}load it with the code that wrote it.*dequantize"), packages=("torchao",),
    ),
]  # fmt: skip
