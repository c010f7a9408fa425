"""Tell which tensors an operation of torch takes, writes and returns, from the operation's schema.

A call of ``torch.nn.init`` that only writes random numbers is recognised as a whole, because the write
log records it faster than the ten operations of which it consists.
"""

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final, NamedTuple

import torch

_SHAPES: Final = frozenset({
    "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like",
    "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full", "is_same_size",
})  # fmt: skip
"""Operations that use only a tensor's shape and dtype, not its values."""

_RESIZES: Final = frozenset({"set_", "resize_", "resize_as_", "_resize_output_"})
_KAIMING: Final = torch.nn.init.kaiming_uniform_
_UNIFORM: Final = torch.nn.init.uniform_
_NORMAL: Final = torch.nn.init.normal_
INITIALISERS: Final = frozenset({_KAIMING, _UNIFORM, _NORMAL})
_PLAIN_TYPES: Final = frozenset({torch.Tensor, torch.nn.Parameter})
_DTYPES: Final = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})
_LARGEST_NUMBER: Final = 1e4  # representable in each of these dtypes


class OperationKind(NamedTuple):
    """The properties of an operation, derived from its schema.

    Attributes:
        given: the position and name of each argument that may be a tensor.
        written: the position and name of the argument that the operation writes and returns; None
            if there is none, or the operation resizes tensors or writes to several arguments.
    """

    is_view: bool
    reads_shape: bool
    resizes: bool
    random: bool
    given: tuple[tuple[int, str], ...]
    written: tuple[int, str] | None

    def tensors(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """Return all tensors among the arguments."""
        count, found = len(args), []
        for position, name in self.given:
            value = args[position] if position < count else kwargs.get(name)
            if isinstance(value, torch.Tensor):
                found.append(value)
            elif value is not None:
                found += tensors_in(value)
        return found

    def target(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """Return the tensor that an operation both writes to and returns; None if there is no such
        tensor, or the operation resizes it or writes to several tensors.
        """
        if self.written is None:
            return None
        position, name = self.written
        target = args[position] if position < len(args) else kwargs.get(name)
        return target if isinstance(target, torch.Tensor) else None


@cache
def kind_of(func: Any) -> OperationKind:
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    writes = [
        (number, argument.name)
        for number, argument in enumerate(schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    ]
    moves_only = torch.Tag.inplace_view in func.tags and name not in _RESIZES
    is_view = moves_only or (not writes and any(result.alias_info for result in schema.returns))
    returned = schema.returns[0].alias_info if len(schema.returns) == 1 else None
    waits = len(writes) == 1 and returned is not None and returned.is_write
    return OperationKind(
        is_view=is_view,
        reads_shape=name in _SHAPES,
        resizes=name in _RESIZES,
        random=torch.Tag.nondeterministic_seeded in func.tags,
        given=tuple(
            (number, argument.name)
            for number, argument in enumerate(schema.arguments)
            if "Tensor" in str(argument.type)
        ),
        written=writes[0] if waits and name not in _RESIZES else None,
    )


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value: one tensor, or nested tuples, lists and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | tuple | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(item)


def with_aliases(value: Any) -> Any:
    """Return ``value`` with each tensor replaced by a second tensor object for the same memory."""
    if isinstance(value, torch.Tensor):
        return value.detach()
    return type(value)(map(with_aliases, value)) if isinstance(value, list | tuple) else value


def is_plain_call(func: Any, tensor: torch.Tensor, settings: Mapping[str, Any]) -> bool:
    """Tell whether a call is surely valid, and fills a contiguous CPU tensor with random numbers."""
    return (
        type(tensor) in _PLAIN_TYPES
        and tensor.dtype in _DTYPES
        and tensor.is_cpu
        and tensor.is_contiguous()
        and tensor.numel() > 0
        and _is_valid(func, tensor, **settings)
    )


def _is_valid(
    func: Any,
    tensor: torch.Tensor,
    a: float = 0,
    b: float = 1,
    mean: float = 0,
    std: float = 1,
    mode: str = "fan_in",
    nonlinearity: str = "leaky_relu",
    generator: object = None,
) -> bool:
    """Tell whether ``func`` surely accepts the settings; False also for some rare, valid settings."""
    if generator is not None:
        return False
    if func is _KAIMING:
        known = nonlinearity == "leaky_relu" and mode in {"fan_in", "fan_out"}
        return known and tensor.ndim >= 2 and -_LARGEST_NUMBER <= a <= _LARGEST_NUMBER
    low, high = (a, b) if func is _UNIFORM else (mean, std)
    if func is _NORMAL and std < 0:
        return False
    return (
        abs(low) <= _LARGEST_NUMBER
        and abs(high) <= _LARGEST_NUMBER
        and (func is _NORMAL or low <= high)
    )
