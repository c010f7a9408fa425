"""Load a 41 GB float32 checkpoint as a 20.6 GB bfloat16 model, in RAM for little more than the model.

This is the case of a PyTorch feature request: a checkpoint of 40 GB, a half-precision model of 20 GB
and RAM for one copy of the model. The checkpoint is a sparse file with structure but no data. It
needs almost no disk space and reads as zeros, which take as much memory as any other values.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from weighin.checkpoint import staging
from weighin.stream.construct import build_skeleton, resolve_builder
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
    staging.folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=staging.folder(), prefix="sparse-") as folder:
        checkpoint = Path(folder) / "model.pt"
        write_sparse(options.model, checkpoint)
        disk_mib = checkpoint.stat().st_blocks * 512 / 2**20
        print(f"{checkpoint.stat().st_size:,} bytes, {disk_mib:.0f} MiB on the disk", flush=True)
        command = [
            *(sys.executable, "-m", "weighin", "bench", options.model),
            *("--checkpoint", str(checkpoint), "--dtype", "bf16", "--ram", options.ram),
            *("--strategies", options.strategies, "--out", options.out),
            *("--isolation", options.isolation),
        ]
        sys.exit(subprocess.run(command, check=False).returncode)


def write_sparse(model: str, path: Path) -> None:
    """Write a checkpoint as ``torch.save`` does, with holes in place of the values."""
    spec = registry.model(model)
    skeleton = build_skeleton(
        resolve_builder(spec.builder), spec.kwargs, real_buffers="non_persistent"
    )
    # Memory that is never touched needs no RAM either.
    state = {name: torch.empty_like(t, device="cpu") for name, t in skeleton.state_dict().items()}
    with torch.serialization.skip_data():
        torch.save(state, path)


if __name__ == "__main__":
    main()
