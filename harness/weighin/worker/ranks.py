"""Join the process group of the ranks (the processes that load one model), and compute checksums of
tensors sharded over the ranks.
"""

from datetime import timedelta

import torch
import torch.distributed as dist

from weighin.checkpoint.checksum import checksum


def join_group(device: torch.device, timeout_s: float) -> None:
    """Create the default process group: gloo for the CPU, gloo and nccl for CUDA."""
    timeout = timedelta(seconds=timeout_s)
    if device.type == "cuda":
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=timeout)


def checksums_of_sharded(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Return the checksum of each tensor that is sharded over the ranks.

    All ranks must call this function with the same names, because gathering a tensor needs all
    ranks. ``checksums_of_sharded`` gathers one tensor after the other, so that only one whole
    tensor is in memory.
    """
    return {
        name: checksum(tensor.full_tensor())
        for name, tensor in tensors.items()
        if hasattr(tensor, "full_tensor")  # an import of DTensor would take 40 MiB
    }
