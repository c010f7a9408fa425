"""A coverage-guided fuzz target for the readers of every layout: see README.md beside it.

    python tests/fuzz/fuzz_readers.py FOLDER -max_total_time=60

FOLDER holds the corpus; an empty one is filled with seeds that our own writers make.
"""

import pickle
import resource
import sys
import tempfile
from pathlib import Path

import atheris

# Only what reads foreign bytes is worth guiding by: torch and the writers would drown it.
with atheris.instrument_imports(include=["weighin.stream"]):
    from weighin.stream import (
        dcp_files,
        foreign,
        formats,
        pickles,
        safetensors_files,
        sharded_files,
        torch_files,
    )
    from weighin.stream.slices import Slice

from weighin.errors import CheckpointError

MODULES = (torch_files, sharded_files, dcp_files, foreign, safetensors_files, pickles)
LONGEST = 16 * 1024
MEMORY_BYTES = 200 * 1024**2

# The first byte of an input says which file it is, of a folder whose other files are sound.
TARGETS: tuple[tuple[str, str], ...] = (
    ("pt", ""), ("pt_legacy", ""), ("safetensors", ""), ("sharded", "model.safetensors.index.json"),
    ("sharded_pt", "pytorch_model.bin.index.json"), ("dcp", ".metadata"), ("dcp", "__0_0.distcp"),
    ("per_module", "index.json"), ("per_param", "index.json"),
    ("sharded", "model-00001-of-00001.safetensors"), ("sharded_pt", "pytorch_model-00001-of-00001.bin"),
    ("per_module", "a.pt"), ("per_param", "a.weight.pt"), ("dcp", ".metadata"),
)  # fmt: skip
IN_BLOCKS = len(TARGETS) - 1  # its a.weight lies in two


class Fuzzer:
    """Writes each input in the place of one file of a sound checkpoint, and reads it."""

    def __init__(self, folder: Path) -> None:
        self.paths = [
            make(folder / str(number), target[0]) for number, target in enumerate(TARGETS)
        ]
        split(self.paths[IN_BLOCKS])
        self.runs = self.refused = 0
        self.limit_kib = (peak_bytes() + MEMORY_BYTES) // 1024

    def seeds(self) -> list[bytes]:
        return [bytes([n]) + self.file(n).read_bytes() for n in range(len(TARGETS))]

    def file(self, number: int) -> Path:
        path, name = self.paths[number], TARGETS[number][1]
        return path / name if name else path

    def run(self, data: bytes) -> None:
        if not data:
            return
        number = data[0] % len(TARGETS)
        file, path = self.file(number), self.paths[number]
        file.write_bytes(data[1:])
        self.runs += 1
        try:
            for place in formats.read(path):
                check(place, path)
        except CheckpointError as error:
            self.refused += 1
            assert str(path) in error.message, error.message
        assert peak_bytes() // 1024 < self.limit_kib, "more than 200 MiB of memory"


def check(place: Slice, root: Path) -> None:
    """Assert that a slice lies inside a file of the checkpoint."""
    size = place.file.stat().st_size
    assert root in {place.file, place.file.parent}, place
    assert 0 <= place.storage_offset <= place.offset, place
    assert place.storage_offset + place.storage_bytes <= size, place
    for part in place.parts:
        check(part, root)
    reach = sum((n - 1) * step for n, step in zip(place.shape, place.stride, strict=True))
    if place.nbytes and not place.parts:
        end = place.offset + (reach + 1) * place.dtype.itemsize
        assert end <= place.storage_offset + place.storage_bytes, place


def make(path: Path, fmt: str) -> Path:
    """Write a small, sound checkpoint with tied weights and several dtypes."""
    import torch

    from weighin.stream.slices import TensorPlan
    from weighin.stream.write import write

    plans = [
        TensorPlan("a.weight", (3, 2), torch.float32),
        TensorPlan("b.0.half", (5,), torch.bfloat16),
        TensorPlan("b.0.steps", (), torch.int64),
        TensorPlan("b.0.none", (0, 4), torch.bool),
        TensorPlan("c.weight", (3, 2), torch.float32, "a.weight"),
    ]
    values = {plan.name: torch.ones(plan.shape, dtype=plan.dtype) for plan in plans}
    if fmt == "pt_legacy":
        state = {plan.name: values[plan.shared_with or plan.name] for plan in plans}
        torch.save(state, path, _use_new_zipfile_serialization=False)
    else:
        write(fmt, path, plans, lambda name: [values[name]])
    return path


def split(path: Path) -> None:
    """Say of a dcp checkpoint that a.weight and c.weight are the halves of one tensor."""
    from torch import Size
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

    metadata = pickle.loads((path / ".metadata").read_bytes())
    del metadata.state_dict_metadata["c.weight"]
    one = metadata.state_dict_metadata["a.weight"]
    one.size = Size([6, 2])
    one.chunks = [ChunkStorageMetadata(Size([at, 0]), Size([3, 2])) for at in (0, 3)]
    for index in [index for index in metadata.storage_data if index.fqn == "c.weight"]:
        place = metadata.storage_data.pop(index)
        metadata.storage_data[MetadataIndex("a.weight", Size([3, 0]), 1)] = place
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    """Fuzz until libFuzzer's own options say stop."""
    corpus = Path(sys.argv[1])
    corpus.mkdir(parents=True, exist_ok=True)
    shared = Path("/dev/shm")  # a write there costs no disk
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        fuzzer = Fuzzer(Path(name))
        for number, seed in enumerate(fuzzer.seeds()):
            (corpus / f"seed-{number}").write_bytes(seed)
        options = ["-rss_limit_mb=2000", "-timeout=10", f"-max_len={LONGEST}"]
        atheris.Setup([sys.argv[0], str(corpus), *options, *sys.argv[2:]], fuzzer.run)
        atheris.Fuzz()


if __name__ == "__main__":
    main()
