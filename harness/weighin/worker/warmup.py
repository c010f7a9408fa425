"""Prepare a worker for its baseline: its memory before the load.

The functions of this module import torch, and not the module itself, because weighin measures the
import of torch as a phase.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from weighin.cell import ModelSpec
from weighin.formats.pretrained_library import library_of
from weighin.phase_reporter import read_text

if TYPE_CHECKING:
    from pathlib import Path

    import torch

_WARM_PIECE_BYTES = 1024**2


def import_model_package(
    model: ModelSpec, phase: Callable[[str], AbstractContextManager[None]]
) -> None:
    """Import a model's class of transformers, diffusers or timm in a ``phase`` of its own.

    These packages import a module when a class in it is first used. Without the phase of its own,
    this import would be part of the phase "prepare".

    Raises:
        ConfigError: the library is not installed, or has no such class.
    """
    library = library_of(model.builder)
    if library is None:
        return
    with phase(f"import {library.name}"):
        from weighin.models.pretrained_modules import module_of  # after torch

        module_of(library.builder).import_class(model.kwargs)


def settle_math() -> None:
    """Call MKL's vector functions on one thread, so that MKL selects its kernels there.

    If two threads make the first calls at the same time, MKL sometimes computes a part of the
    result with another kernel. In 1 of 100 processes on a busy machine, a table of rotary cosines
    was wrong by 1.5e-4 (torch 2.13, MKL 2024.2). weighin would blame the strategy for this error.
    """
    import torch

    for function in (torch.cos, torch.sin, torch.exp, torch.log, torch.tanh):
        function(torch.ones(8))


def read_through(checkpoint: "Path") -> None:
    """Read every file of the checkpoint, so that the kernel charges its pages to the cell's cgroup."""
    files = [checkpoint] if checkpoint.is_file() else sorted(checkpoint.iterdir())
    if checkpoint.suffix == ".json":  # an index of shards
        from weighin import formats

        files = formats.files(checkpoint)
    piece = bytearray(_WARM_PIECE_BYTES)
    for file in files:
        with file.open("rb", buffering=0) as source:
            while source.readinto(piece):
                pass


def join_group(device: "torch.device") -> None:
    """Join the process group of all ranks: gloo for the CPU, gloo and nccl for CUDA."""
    from datetime import timedelta

    import torch.distributed as dist

    timeout = timedelta(days=365)  # weighin itself ends the ranks at the cell's time-out
    if device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)


def check_preloaded() -> None:
    """Raise OSError if a library in LD_PRELOAD was not loaded, because the linker only prints a warning."""
    wanted = os.environ.get("LD_PRELOAD", "").replace(":", " ").split()
    if not wanted:
        return
    mapped = read_text("/proc/self/maps")
    for library in wanted:
        if os.path.realpath(library) not in mapped:
            raise OSError(
                f"the worker runs without the library {library} that LD_PRELOAD names,"
                " because the dynamic linker did not load it"
            )
