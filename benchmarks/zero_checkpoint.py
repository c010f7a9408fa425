"""Measure the memory of making one file of a ZeRO-3 checkpoint, by weighin and by DeepSpeed's converter.

DeepSpeed itself writes the checkpoint on the CPU, with several ranks: bfloat16 weights, and float32
weights of the optimizer, by default 2 GB. Its optimizer is SGD, so that the ranks fit into 8 GB together.
Then ``weighin convert`` and ``zero_to_fp32.py`` each write one safetensors file of it in a fresh process.
The figures are the kernel's high-water marks of these processes (VmHWM). They include mapped pages of
the files. The limit for weighin, above its imports, is the largest tensor plus 300 MiB. The script exits
with 1 if weighin exceeds the limit or if the two files differ.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from weighin.stream import formats
from weighin.units import GIB, MIB

SPARE_BYTES = 300 * MIB
WIDTH, VOCABULARY = 1600, 50_257
WRITE = f"""
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
PEAK = """
import json, sys, time

def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))

{imports}
before, started = peak(), time.monotonic()
{convert}
print(json.dumps([before, peak(), time.monotonic() - started]))
"""
WEIGHIN = PEAK.format(
    imports="from pathlib import Path\nfrom weighin.checkpoint.convert import Conversion",
    convert="Conversion(Path(sys.argv[1]), Path(sys.argv[2]), 'safetensors').write()",
)
DEEPSPEED = PEAK.format(
    imports="from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict",
    convert="convert_zero_checkpoint_to_fp32_state_dict(*sys.argv[1:3], max_shard_size=None,"
    " safe_serialization=True)",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=21, help="82 MB of float32 weights each")
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="8 GB of free disk space")
    parser.add_argument("--deepspeed", default=sys.executable, help="a Python with deepspeed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="zero-", dir=options.folder) as name:
        sys.exit(measure(Path(name), options.deepspeed, options.ranks, options.blocks))


def measure(folder: Path, deepspeed: str, ranks: int, blocks: int) -> bool:
    """Write a checkpoint, convert it twice, and print the peaks; return whether anything is wrong."""
    script, run = folder / "write.py", folder / "run"
    script.write_text(WRITE)  # spawned processes import it
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    subprocess.run(
        [deepspeed, str(script), str(run), str(ranks), str(blocks)],
        check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    slices = formats.read(run)
    total, largest = (kind(one.nbytes for one in slices) for kind in (sum, max))
    print(f"{total / GIB:.2f} GiB of {ranks} ranks, largest tensor {largest / MIB:.1f} MiB")
    print(f"{'':<14}{'imports MiB':>12}{'VmHWM MiB':>12}{'above MiB':>12}{'s':>8}")
    above = {}
    ways = {"weighin": (WEIGHIN, sys.executable), "zero_to_fp32": (DEEPSPEED, deepspeed)}
    for name, (code, python) in ways.items():
        target = folder / name
        file = target if name == "weighin" else target / "model.safetensors"
        done = subprocess.run(
            [python, "-c", code, str(run), str(target)],
            check=True, env=environment, capture_output=True, text=True,
        )  # fmt: skip
        before, peak, seconds = json.loads(done.stdout.splitlines()[-1])
        above[name] = peak - before
        figures = (
            f"{before / MIB:>12.1f}{peak / MIB:>12.1f}{above[name] / MIB:>12.1f}{seconds:>8.1f}"
        )
        print(f"{name:<14}{figures}", flush=True)
        shutil.move(file, folder / f"{name}.safetensors")
    same = equal(*(folder / f"{name}.safetensors" for name in ways))
    limit = largest + SPARE_BYTES
    print(
        f"limit {limit / MIB:.1f} MiB above the imports; the files are {'' if same else 'NOT '}equal"
    )
    return not same or above["weighin"] > limit


def equal(one: Path, other: Path) -> bool:
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
