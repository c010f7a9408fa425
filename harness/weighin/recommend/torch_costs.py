"""Measure this machine's speeds in torch: ``python -m weighin.recommend.torch_costs``.

Each round runs in a forked process, because the import of a module can be timed only once in a process.
"""

import os
import sys
import tempfile
import time
from typing import Final

from weighin.parent_process import Parent, end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before the import of torch, which takes seconds

import torch
from torch import nn

ROUNDS: Final = 3
_LOADS: Final = 100
_WEIGHTS: Final = 32 * 1024**2


def main() -> None:
    """Measure each round in a forked process, which sends the costs to the parent as one event."""
    parent = Parent()
    for _ in range(ROUNDS):
        child = os.fork()
        if child == 0:
            end_with_parent()
            parent.send("costs", **measure())
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            sys.exit(1)  # the forked process has printed its error


def measure() -> dict[str, float]:
    """Measure ``archive_s``, ``module_s`` and ``init_bytes_per_s`` of ``Calibration`` one time."""
    modules_before = len(sys.modules)
    start = time.perf_counter()
    nn.Embedding(1, 1, device="meta")  # imports modules of torch that are needed only now
    module_s = (time.perf_counter() - start) / max(1, len(sys.modules) - modules_before)
    with tempfile.TemporaryFile() as file:  # it has no name, so a kill leaves no file
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
