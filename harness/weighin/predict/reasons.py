"""Explain the peaks of a prediction in short phrases."""

from collections.abc import Iterator
from typing import Final

from weighin.units import format_bytes

_NUMBERS: Final = {1: "one copy", 2: "two copies", 3: "three copies"}
_WORTH_SAYING: Final = 0.03  # a share of the model's size; a smaller remainder is not mentioned


def reasons(
    model_bytes: int, tensor_bytes: int, mapped_bytes: int, cuda_bytes: int | None
) -> Iterator[str]:
    """Yield phrases that explain the peaks of tensors in RAM, mapped pages and GPU requests."""
    if cuda_bytes:
        yield f"keeps {_copies(cuda_bytes, model_bytes)} on the GPU"
    if tensor_bytes >= model_bytes * 0.5:
        yield f"keeps {_copies(tensor_bytes, model_bytes)} in memory"
    if mapped_bytes >= model_bytes * 0.5:
        yield f"maps {_copies(mapped_bytes, model_bytes)}, which the kernel may drop and read again"


def _copies(size: int, model_bytes: int) -> str:
    """Describe a size as a number of whole copies of the weights and a remainder."""
    number = int((size + _WORTH_SAYING * model_bytes) // model_bytes)
    rest = size - number * model_bytes
    words = [_NUMBERS.get(number, f"{number} copies") + " of the weights"] if number else []
    if rest > _WORTH_SAYING * model_bytes:
        words.append(format_bytes(rest))
    return " and ".join(words)
