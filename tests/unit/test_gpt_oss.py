"""A small model with blocks and scales, as gpt-oss has them: every strategy loads its bytes as they are."""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from weighin import formats
from weighin.cell import ModelSpec
from weighin.checkpoint import generate
from weighin.models.skeleton import resolve_builder
from weighin.suite import registry
from weighin.worker import touch, verify
from weighin.worker.loading import WorkerLoad, import_strategy

SPEC = ModelSpec(
    "small-gpt-oss",
    "weighin.models.gpt_oss:gpt_oss",
    {
        "dtype": "bfloat16", "dim": 64, "hidden_dim": 96, "head_dim": 8, "n_heads": 4,
        "n_kv_heads": 2, "n_layers": 2, "n_experts": 3, "vocab_size": 50,
    },
)  # fmt: skip
LOADS = [
    (name, fmt)
    for name, info in registry.strategies().items()
    if "cpu" in info.devices and not info.missing and not info.pretrained
    for fmt in info.formats
]


class NoPhases:
    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpt-oss")


def made(folder: Path, fmt: str) -> generate.Made:
    (folder / fmt).mkdir()
    return generate.make(SPEC.name, SPEC.builder, SPEC.kwargs, seed=0, fmt=fmt, folder=folder / fmt)


@pytest.mark.usefixtures("torch_threads_restored")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # dcp in one process
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("name", "fmt"), LOADS)
def test_a_strategy_loads_blocks_and_scales(
    tmp_path: Path, name: str, fmt: str, dtype: torch.dtype
) -> None:
    manifest = made(tmp_path, fmt).manifest
    cpu, builder = torch.device("cpu"), resolve_builder(SPEC.builder)
    path = formats.checkpoint_in(tmp_path / fmt, fmt)
    load = WorkerLoad(path, cpu, dtype, MappingProxyType({}), SPEC, builder, NoPhases())
    model = import_strategy(registry.strategy(name).path)(load)
    tensors = touch.named_tensors(model)
    verify.check_structure(tensors, manifest, cpu, dtype)
    verify.check_values(touch.touch(tensors), manifest, dtype)
    blocks = tensors["model.layers.1.mlp.experts.down_proj_blocks"]
    assert blocks.dtype == torch.uint8
    assert len(blocks.unique()) > 100  # random bytes: a wrong offset would be seen


@pytest.mark.usefixtures("torch_threads_restored")
def test_the_bytes_follow_from_the_seed_and_the_name(folder: Path) -> None:
    first = {one.name: one.checksums for one in made(folder, "pt").manifest.tensors}
    second = {one.name: one.checksums for one in made(folder, "per_param").manifest.tensors}
    assert first == second
    scales = {value["uint8"] for name, value in first.items() if name.endswith("_scales")}
    assert len(scales) == 4
