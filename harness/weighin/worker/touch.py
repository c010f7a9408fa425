"""Read every byte of a model to compute checksums; the reads also complete lazy loads."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from weighin.checkpoint.checksum import checksum
from weighin.construction import module_tree


def named_tensors(model: torch.nn.Module, wanted: Iterable[str] = ()) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer by its full name; a tied tensor appears under each name.

    A name in ``wanted`` that is no parameter or buffer is looked up in the state dict, because the
    modules of bitsandbytes add their scales only to the state dict.
    """
    tensors = module_tree.named_tensors(model)
    if others := set(wanted) - tensors.keys():
        state = model.state_dict()
        tensors |= {name: state[name] for name in others if torch.is_tensor(state.get(name))}
    return tensors


def touch(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """Read every byte of every tensor, and return the checksums; read tied tensors only once.

    Of a sharded tensor, only this process's shard is read.
    """
    once = {identity(tensor): local(tensor) for tensor in tensors.values()}
    threads = torch.get_num_threads()
    # One thread for each tensor: torch's own threads would synchronise after every 4 MiB.
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads) as pool:
            checksums = dict(zip(once, pool.map(checksum, once.values()), strict=True))
    finally:
        torch.set_num_threads(threads)
    return {name: checksums[identity(tensor)] for name, tensor in tensors.items()}


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's shard of a tensor that is sharded over ranks, or the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def identity(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return a key that two tensors share only if they view the same memory in the same way."""
    tensor = local(tensor)
    return tensor.device, tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
