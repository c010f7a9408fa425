"""A shard of torch's distributed checkpoint in safetensors holds a part of each tensor: it is refused."""

import json
from pathlib import Path

import pytest
import torch
from harms import complaint
from safetensors.torch import save_file

from weighin import load_streaming
from weighin.checkpoint.convert import Conversion
from weighin.stream import formats

WHOLE = "model-00001-of-00001.safetensors"
SHARD = "shard-00001-model-00001-of-00001.safetensors"


def written(file: Path, begin: int) -> Path:
    """Write four rows of a matrix as HuggingFaceStorageWriter does, of which the first is ``begin``."""
    info = json.dumps({"weight": {"saved_offsets": [begin, 0]}})
    metadata = {"DCP_SHARDING_INFO": info, "DCP_VERSION": "1.0", "format": "pt"}
    save_file({"weight": torch.ones(4, 10)}, file, metadata)
    return file


@pytest.mark.parametrize(
    ("name", "begin"),
    [(SHARD, 0), (SHARD, 4), (WHOLE, 10), ("model.safetensors", 0), ("renamed.safetensors", 12)],
)
def test_a_shard_is_refused_by_every_verb(tmp_path: Path, name: str, begin: int) -> None:
    file = written(tmp_path / name, begin)
    model = torch.nn.Linear(10, 4, bias=False)
    for act in (
        lambda: formats.read(file),
        lambda: load_streaming(model, file),
        lambda: Conversion(file, tmp_path / "made.pt").write(),
    ):
        assert str(complaint(act)).startswith(
            f"{file}: a shard of torch's distributed checkpoint (DCP_SHARDING_INFO in its header),"
            " which may hold only one rank's part of each tensor\n"
            "join the shards of all ranks: consolidate_safetensors_files("
        )
    assert not (tmp_path / "made.pt").exists()


def test_a_file_that_one_rank_wrote_for_all_is_read(tmp_path: Path) -> None:
    slices = formats.read(written(tmp_path / WHOLE, 0))
    assert [(one.name, one.shape) for one in slices] == [("weight", (4, 10))]
