"""A 41 GB float32 checkpoint as a 20.6 GB bfloat16 model, in less RAM than a copy more would take.

The case of the request that asked PyTorch for it: 40 GB on the disk, a half-precision model of 20 GB,
and a machine on which the model fits once. The checkpoint is sparse: it has the structure and no
data, so that it takes no room on the disk and reads as zeros, which memory has to hold all the same.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from weighin.checkpoint import cache
from weighin.models.skeleton import build_skeleton, resolve_builder
from weighin.suite import registry


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-10b")
    parser.add_argument("--ram", default="21.5GiB")
    parser.add_argument("--strategies", default="streaming,mmap_assign,load_assign")
    parser.add_argument("--isolation", default="auto")
    parser.add_argument("--out", default="results/forty-gigabytes")
    options = parser.parse_args()
    cache.folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache.folder(), prefix="sparse-") as folder:
        checkpoint = Path(folder) / "model.pt"
        write_sparse(options.model, checkpoint)
        held = checkpoint.stat().st_blocks * 512 / 2**20
        print(f"{checkpoint.stat().st_size:,} bytes, {held:.0f} MiB on the disk", flush=True)
        command = [
            *(sys.executable, "-m", "weighin", "bench", options.model),
            *("--checkpoint", str(checkpoint), "--dtype", "bf16", "--ram", options.ram),
            *("--strategies", options.strategies, "--out", options.out),
            *("--isolation", options.isolation),
        ]
        sys.exit(subprocess.run(command, check=False).returncode)


def write_sparse(model: str, path: Path) -> None:
    """Write the checkpoint that ``torch.save`` would write, with holes where the values would be."""
    spec = registry.model(model)
    skeleton = build_skeleton(
        resolve_builder(spec.builder), spec.kwargs, real_buffers="non_persistent"
    )
    # Memory that is never touched takes no room either.
    state = {name: torch.empty_like(t, device="cpu") for name, t in skeleton.state_dict().items()}
    with torch.serialization.skip_data():
        torch.save(state, path)


if __name__ == "__main__":
    main()
