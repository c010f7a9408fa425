"""Measure the costs that need torch, for a calibration: ``python -m weighin.recommend.torch_costs``.

Each round runs in a process of its own, which has imported torch, and sends one event, ``costs``.
"""

import os
import sys
import tempfile
import time
from typing import Final

from weighin.parent_process import Parent, end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before the imports that take seconds

import torch
from torch import nn

ROUNDS: Final = 3
_LOADS: Final = 100
_WEIGHTS: Final = 32 * 1024**2


def main() -> None:
    """Send the costs of each round."""
    parent = Parent()
    for _ in range(ROUNDS):
        child = os.fork()
        if child == 0:
            end_with_parent()
            parent.send("costs", **measure())
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(1)  # the child has printed its error


def measure() -> dict[str, float]:
    """Return ``archive_s``, ``module_s`` and ``init_bytes_per_s`` of a ``Calibration``."""
    modules_before = len(sys.modules)
    start = time.perf_counter()
    nn.Embedding(1, 1, device="meta")  # imports a part of torch
    module_s = (time.perf_counter() - start) / max(1, len(sys.modules) - modules_before)
    with tempfile.TemporaryFile() as file:  # nameless, so that nothing is ever left
        path = f"/proc/self/fd/{file.fileno()}"
        torch.save(torch.zeros(1), path)
        torch.load(path, weights_only=True)
        start = time.perf_counter()
        for _ in range(_LOADS):
            torch.load(path, weights_only=True)
        archive_s = (time.perf_counter() - start) / _LOADS
    weights = torch.empty(_WEIGHTS)
    weights.fill_(0)
    start = time.perf_counter()
    nn.init.normal_(weights)
    init_s = time.perf_counter() - start
    return {
        "archive_s": archive_s,
        "module_s": module_s,
        "init_bytes_per_s": weights.nbytes / init_s,
    }


if __name__ == "__main__":
    main()
