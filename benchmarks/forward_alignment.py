"""Compare a model's speed and outputs for two alignments: torch's, and that of a safetensors file.

``.venv/bin/python benchmarks/forward_alignment.py [--rounds 9] [--models gpt2-medium,resnet50]``

torch aligns tensors to 64 bytes, a safetensors file to 8, and ``load_streaming`` keeps the offsets
of the file. Forward passes with the same weights in both alignments alternate in one process. With
``OMP_NUM_THREADS=1`` the figures are CPU time. The script needs 4 GiB of RAM and, for torchvision's
resnet50, the extra ``zoo``.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from rounds import interleaved, ratios, spread
from safetensors.torch import save_model

from weighin.models.gpt2 import gpt2
from weighin.stream.model import load_streaming


def resnet50() -> torch.nn.Module:
    sys.path.append(str(Path(__file__).parents[1] / "tests" / "zoo"))
    from vision import models

    model: torch.nn.Module = models.resnet50(weights=None)
    return model


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], torch.Tensor]]] = {
    "gpt2-medium": (
        lambda: gpt2(emb_dim=1024, n_layers=24, n_heads=16),
        lambda: (torch.arange(64) * 7919 % 50_257).unsqueeze(0),
    ),
    "resnet50": (resnet50, lambda: torch.rand(1, 3, 224, 224)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated names")
    options = parser.parse_args()
    for name in options.models.split(","):
        build, example = MODELS[name]
        torch.manual_seed(0)
        allocated = build().eval()
        with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="weighin-alignment-") as folder:
            save_model(allocated, f"{folder}/model.safetensors")
            loaded = load_streaming(build, f"{folder}/model.safetensors").eval()
        print(f"{name}: {_compared(allocated, loaded, example(), options.rounds)}", flush=True)


def _compared(
    allocated: torch.nn.Module, loaded: torch.nn.Module, inputs: torch.Tensor, rounds: int
) -> str:
    # One unmeasured pass of each model warms up pages, kernels and threads.
    with torch.inference_mode():
        first, second = allocated(inputs), loaded(inputs)
    ways = {"allocated": partial(_seconds, allocated, inputs), "loaded": partial(_seconds, loaded, inputs)}  # fmt: skip
    taken = interleaved(ways, rounds)
    error = float((first - second).abs().max() / first.abs().max())
    equal = "equal bit by bit" if torch.equal(first, second) else f"differ by up to {error:.1e} of the largest value"  # fmt: skip
    counts = Counter(
        next(power for power in (64, 32, 16, 8, 4, 2, 1) if tensor.data_ptr() % power == 0)
        for tensor in loaded.state_dict().values()
        if tensor.numel()
    )
    alignments = ", ".join(f"{power}: {counts[power]}" for power in sorted(counts, reverse=True))
    return (
        f"{spread(taken['allocated'], digits=4)} s allocated by torch, {spread(taken['loaded'], digits=4)} s"
        f" loaded; ratio {spread([*ratios(taken['loaded'], taken['allocated'])], digits=3)}, {rounds} rounds,"
        f" {torch.get_num_threads()} threads\n  outputs {equal}; number of loaded tensors by alignment in"
        f" bytes: {alignments}"
    )


def _seconds(model: torch.nn.Module, inputs: torch.Tensor) -> float:
    # With one thread use CPU time, which does not include waiting for other processes.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    with torch.inference_mode():
        start = clock()
        model(inputs)
        return clock() - start


if __name__ == "__main__":
    main()
