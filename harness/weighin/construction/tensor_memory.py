"""Tell which bytes of its storage a tensor uses, and how many tensors use the storage."""

import torch


def storage_key(tensor: torch.Tensor) -> int:
    """Return a number that identifies a tensor's storage; 0 if the tensor has no storage."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, ValueError):  # a sparse tensor, or a tensor of a lazy module
        return 0


def use_count(tensor: torch.Tensor) -> int:
    """Return how many tensors use the storage of ``tensor``, ``tensor`` itself included."""
    storage = tensor.untyped_storage()  # this Python object adds one reference
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the start and the end of a tensor's elements within its storage, in bytes."""
    start, size = int(tensor.storage_offset()), tensor.element_size()
    if not tensor.numel():
        return start * size, start * size
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start * size, (start + last + 1) * size


def is_dense(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's elements fill one range of its storage without gaps, in any order."""
    expected = 1
    for step, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and step != expected:
            return tensor.numel() == 0
        expected *= size
    return True


def is_whole_storage(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is contiguous and takes up its whole storage."""
    return (
        tensor.is_contiguous()
        and tensor.storage_offset() == 0
        and tensor.nbytes == tensor.untyped_storage().nbytes()
    )
