"""Select the weights in a checkpoint that also holds other data, or has longer names.

This module uses only the standard library.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.formats.base import Slices, TensorSlice
from weighin.formats.misfit import first_names, plain
from weighin.formats.sniff import shown
from weighin.formats.tensor_refs import TensorRef, type_name

_DEEPEST: Final = 4
_MOST_PLACES: Final = 3


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of a checkpoint that is the model's state dict.

    Attributes:
        key: the key of the state dict in nested dicts, such as "model" or "state.model"; empty if
            the checkpoint itself is the state dict. In a format without nested dicts, ``key``
            selects the names that begin with it and a dot: "model" selects "model.weight".
        strip_prefix: a prefix that each name has before the model's name, "module."; empty for
            none.
    """

    key: str = ""
    strip_prefix: str = ""

    def __bool__(self) -> bool:
        """Tell whether the selection is only a part of the checkpoint, or renames its tensors."""
        return bool(self.key or self.strip_prefix)

    @property
    def options(self) -> tuple[str, ...]:
        """The command-line options that make the same selection."""
        key = (f"--key={self.key}",) if self.key else ()
        return (*key, f"--strip-prefix={self.strip_prefix}") if self.strip_prefix else key


WHOLE: Final = Selection()


def inner(path: Path, value: Any, key: str) -> Any:
    """Return the value at a dotted key of nested dicts.

    If there is no such key, return the tensors whose names begin with the key and a dot.

    Raises:
        CheckpointError: the dicts have neither; the repair lists the existing keys.
    """
    if not key:
        return value
    found = next(_found(value, key), None)
    if found is not None:
        return found
    start = f"{key}."
    if isinstance(value, dict):
        named = {
            name.removeprefix(start): item
            for name, item in value.items()
            if isinstance(name, str) and name.startswith(start)
        }
        if named:
            return named
    raise no_key(path, key, value if isinstance(value, dict) else ())


def _found(value: Any, key: str) -> Iterator[Any]:
    """Yield all values at a dotted key, longest first part first; single keys may contain dots."""
    if not isinstance(value, dict):
        return
    if key in value:
        yield value[key]
    parts = key.split(".")
    for size in range(len(parts) - 1, 0, -1):
        yield from _found(value.get(".".join(parts[:size])), ".".join(parts[size:]))


def below(path: Path, slices: Sequence[TensorSlice], key: str) -> Slices:
    """Return the tensors whose names begin with ``key`` and a dot, with this prefix removed."""
    start = f"{key}."
    chosen = Slices(
        replace(one, name=one.name.removeprefix(start))
        for one in slices
        if one.name.startswith(start)
    )
    if not chosen:
        raise no_key(path, key, [one.name.partition(".")[0] for one in slices])
    return chosen


def no_key(path: Path, key: str, keys: Sequence[object] | Mapping[Any, object]) -> CheckpointError:
    """Return the exception for a checkpoint that does not have ``key``."""
    names = first_names(plain(str(one)) for one in dict.fromkeys(keys))
    places = weights_in(keys) if isinstance(keys, Mapping) else []
    repair = with_key(places) if places else f"its keys: {names or 'none'}"
    return CheckpointError(f"{path}: has no key {shown(key)}", repair)


def stripped(path: Path, slices: Sequence[TensorSlice], prefix: str) -> Slices:
    """Return the tensors with ``prefix`` removed from the names that begin with it.

    Raises:
        CheckpointError: no name begins with the prefix, or two names are equal without it.
    """
    prefix = prefix if prefix.endswith(".") else f"{prefix}."
    if not any(one.name.startswith(prefix) for one in slices):
        raise CheckpointError(
            f"{path}: no tensor's name begins with {shown(prefix)}",
            f"its names: {first_names(plain(one.name) for one in slices)}",
        )
    renamed = Slices(replace(one, name=one.name.removeprefix(prefix)) for one in slices)
    names = {one.name for one in renamed}
    if len(names) != len(renamed):
        raise CheckpointError(
            f"{path}: two tensors have the same name without {shown(prefix)}",
            "leave --strip-prefix out, or convert the checkpoint with your own code",
        )
    metadata = getattr(slices, "metadata", None)
    if metadata is not None:  # as in torch.nn.modules.utils.consume_prefix_in_state_dict_if_present
        renamed.metadata = {
            f"{name}.".removeprefix(prefix).removesuffix("."): local
            for name, local in metadata.items()
            if name
        }
    return renamed


def weights_in(value: Any) -> list[str]:
    """Return the keys of the state dicts in nested dicts, largest first, without optimizers'."""
    seen: set[int] = set()  # a crafted pickle may refer to one dict from many places
    places: list[tuple[int, str]] = []

    def look(inside: Mapping[Any, Any], key: str, depth: int) -> None:
        for name, item in inside.items():
            if not isinstance(name, str) or "optim" in name.lower() or id(item) in seen:
                continue
            if not isinstance(item, dict) or not item:
                continue
            seen.add(id(item))
            place = f"{key}.{name}" if key else name
            if all(isinstance(one, str) for one in item) and all(
                isinstance(one, TensorRef) for one in item.values()
            ):
                places.append((len(item), place))
            elif depth < _DEEPEST:
                look(item, place, depth + 1)

    if isinstance(value, Mapping):
        look(value, "", 1)
    return [plain(place) for _, place in sorted(places, key=lambda one: -one[0])][:_MOST_PLACES]


def with_key(places: Sequence[str]) -> str:
    """Return the advice in the error for a checkpoint with state dicts at these keys."""
    ways = " or ".join(f"--key {place}" for place in places)
    return (
        f"select the weights: {ways}; in load_streaming: key={shown(places[0])}"
        f"; in a suite: key: {places[0]}"
    )


def flat(path: Path, value: Any) -> dict[str, TensorRef]:
    """Return the pickled value if it is a flat state dict.

    Raises:
        CheckpointError: the value is not a flat state dict; the message names the value's kind. The
            repair names the option that selects a state dict in it, or tells how to save one.
    """
    weights_alone = "save the weights alone: torch.save(model.state_dict(), ...)"
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path}: holds a {type_name(value)}, not a state dict", weights_alone
        )
    for key, item in value.items():
        if isinstance(key, str) and isinstance(item, TensorRef):
            continue
        places = weights_in(value)
        raise CheckpointError(
            f"{path}: not a flat state dict: {shown(key)} holds a {type_name(item)}",
            with_key(places) if places else weights_alone,
        )
    return value


def tensors_of(value: Any) -> dict[str, TensorRef]:
    """Return all tensors in nested dicts, lists and tuples, under arbitrary names."""
    tensors: dict[str, TensorRef] = {}
    todo, seen = [value], set[int]()
    while todo:
        item = todo.pop()
        if isinstance(item, TensorRef):
            tensors[str(len(tensors))] = item
        elif isinstance(item, dict | list | tuple) and id(item) not in seen:
            seen.add(id(item))
            todo += item.values() if isinstance(item, dict) else item
    return tensors
