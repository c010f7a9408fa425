"""Read every byte of a model once: only then has it been loaded, and only so is it verified."""

from concurrent.futures import ThreadPoolExecutor

import torch

from weighin.checkpoint.checksum import checksum


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer by its full name, tied ones under each of their names."""
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    return tensors | dict(model.named_buffers(remove_duplicate=False))


def touch(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Read every byte of every tensor once; returns each one's checksum. Tied ones are read once."""
    once = {identity(tensor): tensor for tensor in tensors.values()}
    threads = torch.get_num_threads()
    # A thread a tensor: torch's own threads would wait for each other after every 4 MiB.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            checksums = dict(zip(once, pool.map(checksum, once.values()), strict=True))
    finally:
        torch.set_num_threads(threads)
    return {name: checksums[identity(tensor)] for name, tensor in tensors.items()}


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return what two tensors share if and only if they are the same memory, seen the same way."""
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
