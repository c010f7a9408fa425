"""Compare a model's speed and outputs for two alignments: torch's, and that of a safetensors file.

``.venv/bin/python benchmarks/forward_alignment.py [--rounds 9] [--models gpt2-medium,resnet50]``

torch aligns tensors to 64 bytes, a safetensors file to 8, and ``load_streaming`` keeps the offsets
of the file. Forward passes with the same weights in both alignments alternate in one process. With
``OMP_NUM_THREADS=1`` the figures are CPU time. The script needs 4 GiB of RAM and, for torchvision's
resnet50, the extra ``zoo``.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_model

from weighin.models.gpt2 import gpt2
from weighin.stream.model import load_streaming

_POWERS = (64, 32, 16, 8, 4, 2, 1)


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
        with tempfile.TemporaryDirectory(dir="/var/tmp", prefix="weighin-alignment-") as folder:
            _compare(name, Path(folder) / "model.safetensors", options.rounds)


def _compare(name: str, file: Path, rounds: int) -> None:
    build, example = MODELS[name]
    torch.manual_seed(0)
    allocated = build().eval()
    save_model(allocated, str(file))
    loaded = load_streaming(build, file).eval()
    torch.manual_seed(0)
    inputs = example()
    seconds = []
    # One unmeasured pass of each model warms up pages, kernels and threads.
    outputs = [_forward(model, inputs)[0] for model in (allocated, loaded)]
    for number in range(rounds):
        turn = [_forward(model, inputs)[1] for model in _in_turn(number, allocated, loaded)]
        seconds.append(turn if number % 2 == 0 else turn[::-1])
    ratios = [after / before for before, after in seconds]
    medians = [statistics.median(column) for column in zip(*seconds, strict=True)]
    print(
        f"{name}: {medians[0]:.4f} s allocated by torch, {medians[1]:.4f} s loaded; ratio "
        f"{statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f}), {rounds} rounds, "
        f"{torch.get_num_threads()} threads\n  {_difference(*outputs)}; number of loaded tensors by "
        f"alignment in bytes: {_alignments(loaded)}",
        flush=True,
    )


def _in_turn(number: int, *models: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Return the models, in reverse order in every second round."""
    return models if number % 2 == 0 else models[::-1]


def _forward(model: torch.nn.Module, inputs: torch.Tensor) -> tuple[torch.Tensor, float]:
    with torch.inference_mode():
        # With one thread use CPU time, which does not include waiting for other processes.
        clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
        start = clock()
        output: torch.Tensor = model(inputs)
        return output, clock() - start


def _difference(allocated: torch.Tensor, loaded: torch.Tensor) -> str:
    if torch.equal(allocated, loaded):
        return "outputs equal bit by bit"
    error = float((allocated - loaded).abs().max() / allocated.abs().max())
    return f"outputs differ by up to {error:.1e} of the largest value"


def _alignments(model: torch.nn.Module) -> str:
    counts = Counter(
        next(power for power in _POWERS if tensor.data_ptr() % power == 0)
        for tensor in model.state_dict().values()
        if tensor.numel()
    )
    return ", ".join(f"{power}: {counts[power]}" for power in _POWERS if counts[power])


if __name__ == "__main__":
    main()
