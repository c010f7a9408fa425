"""Measure checkpoints that are larger than this machine: sparse files with structure but no data.

    .venv/bin/python benchmarks/sparse_checkpoints.py 40GB      loads a 41 GB checkpoint as a 20.6 GB model
    .venv/bin/python benchmarks/sparse_checkpoints.py 70B       inspects, predicts and streams 141 GB

Sparse files need almost no disk space and read as zeros, which take as much memory as any other values. "40GB" is
the case of a PyTorch feature request: a float32 checkpoint of 40 GB, a half-precision model of 20 GB and RAM for
little more than one copy of the model. "70B" has the shapes of Llama 3 70B in bfloat16, in shards: prints the time
and the peak RSS of `weighin inspect` and `weighin predict`, and of a process that streams single layers with
``load_streaming(..., key="model.layers.0")``.
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
from weighin.predict.simulate import make_sparse
from weighin.stream.pretrained_folder import BUILDER, CONFIG
from weighin.suite import registry
from weighin.units import GIB, KIB, MIB

WEIGHIN: Final = (sys.executable, "-m", "weighin")
LLAMA: Final = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
    "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "vocab_size": 128256,
    "num_attention_heads": 64, "num_key_value_heads": 8, "tie_word_embeddings": False,
}  # fmt: skip
STREAM: Final = """
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
TIMED: Final = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:])
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss, file=sys.stderr)
sys.exit(done.returncode)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("case", choices=("40GB", "70B"))
    parser.add_argument("--layers", type=int, default=2, help="of 70B")
    parser.add_argument("--model", default="gpt2-10b", help="of 40GB, as all that follow")
    parser.add_argument("--ram", default="21.5GiB")
    parser.add_argument("--strategies", default="streaming,mmap_assign,load_assign")
    parser.add_argument("--isolation", default="auto")
    parser.add_argument("--out", default="results/forty-gigabytes")
    options = parser.parse_args()
    staging.folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=staging.folder(), prefix="sparse-") as name:
        (forty_gigabytes if options.case == "40GB" else seventy_billion)(options, Path(name))


def forty_gigabytes(options: argparse.Namespace, folder: Path) -> None:
    made = make_sparse(registry.model(options.model), "pt", None, folder / "model")
    _say_size([made])
    limits = ("--ram", options.ram, "--isolation", options.isolation, "--set", "wait=true")
    what = (options.model, "--checkpoint", str(made), "--dtype", "bf16", "-s", options.strategies)
    command = (*WEIGHIN, "bench", *what, *limits, "--out", options.out)
    sys.exit(subprocess.run(command, check=False).returncode)


def seventy_billion(options: argparse.Namespace, folder: Path) -> None:
    spec = ModelSpec("llama", BUILDER, {"architecture": "LlamaForCausalLM", "config": LLAMA})
    made = make_sparse(spec, "sharded", "bfloat16", folder / "70b")
    (made / CONFIG).write_text(json.dumps(LLAMA))
    _say_size([*made.iterdir()])
    _timed("inspect", *WEIGHIN, "inspect", str(made), "--json", "-")
    print(_timed("predict", *WEIGHIN, "predict", str(made), "-s", "streaming,transformers"))
    print(_timed("stream", sys.executable, "-c", STREAM, str(made), str(options.layers)))


def _say_size(files: list[Path]) -> None:
    disk = sum(file.stat().st_blocks * 512 for file in files)
    size = sum(file.stat().st_size for file in files)
    print(f"{len(files)} files, {size:,} bytes, {disk / MIB:.1f} MiB on the disk", flush=True)


def _timed(what: str, *command: str) -> str:
    """Run a command; print its time and the highest RSS of its processes."""
    start_s = time.perf_counter()
    timed = [sys.executable, "-c", TIMED, *command]
    done = subprocess.run(timed, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - start_s
    if done.returncode:
        sys.exit(f"{what}: {done.stderr.strip()}")
    peak_bytes = int(done.stderr.split()[-1]) * KIB
    print(f"{what}: {seconds:.2f} s, peak RSS {peak_bytes / GIB:.2f} GiB", flush=True)
    return done.stdout.rstrip()


if __name__ == "__main__":
    main()
