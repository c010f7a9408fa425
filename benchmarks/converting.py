"""Measure the memory of conversions in fresh processes, and compare it with a limit.

    .venv/bin/python benchmarks/converting.py --model gpt2-xl      from one file to each format, verified
    .venv/bin/python benchmarks/converting.py --zero               a ZeRO-3 checkpoint, beside zero_to_fp32.py

"anonymous" is the sampled maximum of anonymous memory (1000 samples per second), "VmHWM" the kernel's
high-water mark, which includes mapped pages of the files; both above the memory after all imports. The limit
is the size of the largest tensor plus 300 MiB: for the anonymous memory of each format, and for the VmHWM of a
ZeRO-3 checkpoint. The script exits with 1 if weighin exceeds it, or if the two files of --zero differ.

For --zero, DeepSpeed itself writes the checkpoint on the CPU, with several ranks: bfloat16 weights, and float32
weights of the optimizer, by default 2 GB. Its optimizer is SGD, so that the ranks fit into 8 GB together. It
needs 8 GB of free disk space, and the package deepspeed, here or in another Python: --deepspeed PYTHON.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from weighin.checkpoint import cache, staging
from weighin.settings.definition import DTYPES
from weighin.show.table import Table
from weighin.stream import formats
from weighin.suite import registry
from weighin.units import GIB, MIB

SPARE_BYTES: Final = 300 * MIB
HEADS: Final = ("", "imports MiB", "anonymous above MiB", "VmHWM above MiB", "limit MiB", "s")
WIDTH, VOCABULARY = 1600, 50_257
WRITE_ZERO: Final = f"""
import os, sys
import torch
from torch import nn, multiprocessing

def write(rank, folder, ranks, blocks):
    os.environ |= {{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks),
                   "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29517"}}
    import deepspeed
    deepspeed.init_distributed("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    settings = {{"train_batch_size": ranks, "bf16": {{"enabled": True}},
                "zero_optimization": {{"stage": 3}}, "zero_allow_untested_optimizer": True}}
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = nn.ModuleDict({{"embedding": nn.Embedding({VOCABULARY}, {WIDTH})}})
        for number in range(blocks):
            model[f"up{{number}}"] = nn.Linear({WIDTH}, {4 * WIDTH})
            model[f"down{{number}}"] = nn.Linear({4 * WIDTH}, {WIDTH})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    engine.save_checkpoint(folder)
    deepspeed.comm.barrier()

if __name__ == "__main__":
    folder, ranks, blocks = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    multiprocessing.spawn(write, (folder, ranks, blocks), nprocs=ranks)
"""
# Another Python may lack weighin.
MEASURED: Final = """
import json, sys, threading, time
from pathlib import Path

def memory(key):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith(key))

{imports}
anonymous = most = memory("RssAnon")
resident, started, ended = memory("VmHWM"), time.monotonic(), threading.Event()

def watch():
    global most
    while not ended.wait(0.001):
        most = max(most, memory("RssAnon"))

watcher = threading.Thread(target=watch)
watcher.start()
{convert}
ended.set()
watcher.join()
print(json.dumps([resident, most - anonymous, memory("VmHWM") - resident, time.monotonic() - started]))
"""
WEIGHIN: Final = MEASURED.format(
    imports="import torch\nfrom weighin.checkpoint.convert import Conversion",
    convert="source, target, fmt, dtype = sys.argv[1:]\n"
    "Conversion(Path(source), Path(target), fmt, dtype or None, verify=bool(dtype)).write()",
)
DEEPSPEED: Final = MEASURED.format(
    imports="from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict",
    convert="convert_zero_checkpoint_to_fp32_state_dict(*sys.argv[1:3], max_shard_size=None,"
    " safe_serialization=True)",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="gpt2-xl")
    parser.add_argument("--dtype", default="float32", choices=DTYPES, help="target dtype")
    parser.add_argument("--formats", nargs="+", choices=formats.NAMES, default=list(formats.NAMES))
    parser.add_argument("--zero", action="store_true", help="convert a ZeRO-3 checkpoint")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=21, help="82 MB of float32 weights each")
    parser.add_argument("--deepspeed", default=sys.executable, help="a Python with deepspeed")
    options = parser.parse_args()
    staging.folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="converting-", dir=staging.folder()) as folder:
        sys.exit((_zero if options.zero else _formats)(options, Path(folder)))


def _formats(options: argparse.Namespace, folder: Path) -> bool:
    """Convert one file to each format; return whether one needs more than the limit."""
    source = cache.ensure(registry.model(options.model), "pt")
    stored = [one for one in source.manifest().tensors if one.kind != "non_persistent_buffer"]
    limit = max(one.bytes for one in stored) + SPARE_BYTES
    size_bytes = sum(one.bytes for one in stored if one.shared_with is None)
    print(f"{options.model}: {size_bytes / GIB:.2f} GiB to {DTYPES[options.dtype]}\n")
    found = {}
    for fmt in options.formats:
        target = folder / fmt / f"model{formats.suffix_of(fmt)}"
        target.parent.mkdir()
        arguments = (str(source.path), str(target), fmt, DTYPES[options.dtype])
        found[fmt] = _measured(sys.executable, WEIGHIN, *arguments)
        shutil.rmtree(target.parent)
    _print(found, limit)
    return any(anonymous > limit for _, anonymous, _, _ in found.values())


def _zero(options: argparse.Namespace, folder: Path) -> bool:
    """Write a ZeRO-3 checkpoint, and convert it twice; return whether anything is wrong."""
    script, run = folder / "write.py", folder / "run"
    script.write_text(WRITE_ZERO)  # spawned processes import it
    os.environ["DS_ACCELERATOR"] = "cpu"
    writing = [options.deepspeed, str(script), str(run), str(options.ranks), str(options.blocks)]
    subprocess.run(writing, check=True, capture_output=True)
    slices = formats.read(run)
    total, largest = (kind(one.nbytes for one in slices) for kind in (sum, max))
    print(f"{total / GIB:.2f} GiB of {options.ranks} ranks, largest tensor {largest / MIB:.1f} MiB\n")  # fmt: skip
    ours, theirs = folder / "weighin.safetensors", folder / "zero_to_fp32"
    found = {
        "weighin": _measured(sys.executable, WEIGHIN, str(run), str(ours), "safetensors", ""),
        "zero_to_fp32": _measured(options.deepspeed, DEEPSPEED, str(run), str(theirs)),
    }
    _print(found, largest + SPARE_BYTES)
    same = _equal(ours, theirs / "model.safetensors")
    print(f"\nThe files are {'' if same else 'NOT '}equal.")
    return not same or found["weighin"][2] > largest + SPARE_BYTES


def _measured(python: str, code: str, *arguments: str) -> tuple[int, int, int, float]:
    """Convert in a fresh process; return its memory after the imports, the two peaks above it, and seconds."""
    command = [python, "-c", code, *arguments]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    imported, anonymous, resident, seconds = json.loads(done.stdout.splitlines()[-1])
    return imported, anonymous, resident, seconds


def _print(found: Mapping[str, tuple[int, int, int, float]], limit: int) -> None:
    rows = [
        [name, *(f"{size / MIB:.1f}" for size in (*sizes, limit)), f"{seconds:.2f}"]
        for name, (*sizes, seconds) in found.items()
    ]
    print(Table.of(HEADS, rows).markdown())


def _equal(one: Path, other: Path) -> bool:
    """Tell whether two files of safetensors hold the same tensors."""
    import torch
    from safetensors import safe_open

    with safe_open(one, "pt") as ours, safe_open(other, "pt") as theirs:
        names = ours.keys()
        return set(names) == set(theirs.keys()) and all(
            torch.equal(ours.get_tensor(name), theirs.get_tensor(name)) for name in names
        )


if __name__ == "__main__":
    main()
