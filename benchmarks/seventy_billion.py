"""Inspect and predict a folder of 70 billion parameters, and stream its first layers.

The folder has the shapes of Llama 3 70B in bfloat16: 141 GB in shards, which are sparse files with
structure but no data, and so need almost no disk space. Prints the time and the peak RSS of `weighin
inspect` and `weighin predict`, and of a process that streams single layers with ``load_streaming(...,
key="model.layers.0")``.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from weighin.cell import ModelSpec
from weighin.checkpoint import staging
from weighin.predict.sparse import make_sparse
from weighin.stream.pretrained_folder import BUILDER, CONFIG
from weighin.units import GIB

_CONFIG: Final = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256,
    "num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
_STREAM: Final = """
import sys, time
import torch
from weighin import load_streaming
from weighin.models.pretrained import pretrained_class
folder, layers = sys.argv[1], int(sys.argv[2])
torch.set_default_dtype(torch.bfloat16)
llama = pretrained_class("LlamaForCausalLM")
config = llama.config_class.from_pretrained(folder)
layer = sys.modules[llama.__module__].LlamaDecoderLayer
kept = []
start = time.perf_counter()
for number in range(layers):
    kept.append(load_streaming(lambda: layer(config, number), folder, key=f"model.layers.{number}"))
seconds = time.perf_counter() - start
size = sum(one.nbytes for layer in kept for one in layer.parameters())
print(f"{len(kept)} layers of {size / len(kept) / 2**30:.2f} GiB in {seconds:.2f} s")
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=2)
    options = parser.parse_args()
    staging.folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=staging.folder(), prefix="sparse-") as name:
        spec = ModelSpec("llama", BUILDER, {"architecture": "LlamaForCausalLM", "config": _CONFIG})
        folder = make_sparse(spec, "sharded", "bfloat16", Path(name) / "70b")
        (folder / CONFIG).write_text(json.dumps(_CONFIG))
        files = [*folder.iterdir()]
        disk = sum(file.stat().st_blocks * 512 for file in files)
        size = sum(file.stat().st_size for file in files)
        print(f"{len(files)} files, {size:,} bytes, {disk / 2**20:.1f} MiB on the disk")
        _timed("inspect", [sys.executable, "-m", "weighin", "inspect", str(folder), "--json", "-"])
        predict = ["predict", str(folder), "-s", "streaming,transformers"]
        print(_timed("predict", [sys.executable, "-m", "weighin", *predict]))
        print(_timed("stream", [sys.executable, "-c", _STREAM, str(folder), str(options.layers)]))


def _timed(what: str, command: list[str]) -> str:
    """Run a command; print its time and the highest RSS of its processes."""
    code = "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:]);"
    code += " print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr);"
    code += " sys.exit(done.returncode)"
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"{what}: {done.stderr.strip()}")
    peak_kib = int(done.stderr.split()[-1])
    print(f"{what}: {seconds:.2f} s, peak RSS {peak_kib * 1024 / GIB:.2f} GiB", flush=True)
    return done.stdout.rstrip()


if __name__ == "__main__":
    main()
