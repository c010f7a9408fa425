"""Create a real CUDA context in the predicting process, to measure the RAM that it takes.

A measured process creates its context before the load. After the load, when the model is read, CUDA
loads the kernels for these reads. On an H200, the context took 30 MiB of anonymous memory and these
kernels took 29 MiB; each also took 10 MiB of shared memory.
"""

from contextlib import suppress

import torch

from weighin.probes.process import memory_of, read_status
from weighin.units import MIB
from weighin.worker.verify import touch


class GpuContext:
    """The CUDA context of this process; its sizes are 0 until ``create`` finds a GPU.

    Attributes:
        context_bytes: the anonymous memory of the context.
        kernels_bytes: the anonymous memory of the kernels that read a model.
    """

    def __init__(self) -> None:
        self.context_bytes = self.kernels_bytes = 0
        self._is_tried = False

    def create(self) -> None:
        """Create the context and load the kernels, once, if this machine has a GPU."""
        if self._is_tried or not torch.cuda.is_available():
            return
        self._is_tried = True
        before = _anon_bytes()
        with suppress(RuntimeError):  # no free memory on the GPU
            weight = torch.zeros(MIB, device="cuda")
            torch.cuda.synchronize()
            self.context_bytes = _anon_bytes() - before
            touch({"weight": weight})
            self.kernels_bytes = _anon_bytes() - before - self.context_bytes
            del weight
            torch.cuda.empty_cache()

    def hidden_bytes(self, *, needs_gpu: bool) -> int:
        """Return the bytes of kernels and context that a measured process lacks before its load."""
        return self.kernels_bytes + (0 if needs_gpu else self.context_bytes)


def _anon_bytes() -> int:
    return memory_of(read_status()).anon_bytes
