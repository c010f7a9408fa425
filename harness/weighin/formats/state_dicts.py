"""Find the state dict in a pickled checkpoint, or say why there is none.

A training checkpoint also has settings, schedulers and random states, as objects of any class. In
the selected state dict, an object other than a tensor is allowed only if it holds no tensors.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.formats.base import Slices, TensorSlice
from weighin.formats.dtypes import ITEM_BYTES
from weighin.formats.misfit import first_names, plain, select_key
from weighin.formats.tensor_refs import Opaque, OtherTensor, TensorRef, type_name
from weighin.formats.unknown_file import shown

_DEEPEST: Final = 4
_MOST_PLACES: Final = 3
_LONGEST_PLACE: Final = 100
_MOST_NAMED: Final = 1000  # items of a dict or list whose keys an error names
_NOT_PLAIN: Final = (dict, list, tuple, Opaque, TensorRef)
_ARRAY: Final = "NumPy array"
_EXTRA_STATE: Final = "_extra_state"
"""A name in a state dict has this part if ``Module.get_extra_state`` returned the value."""

_OPTIM_STATES: Final = "_optim_states.pt"
_WEIGHTS_ALONE: Final = "save the weights alone: torch.save(model.state_dict(), ...)"
_SAVE_AGAIN: Final = (
    "if you trust the file, load it and save plain weights: torch.save(model.state_dict(), ...)"
)
_ARRAYS: Final = (
    "save tensors instead: torch.save({name: torch.from_numpy(array) for name, array in ...}, ...)"
)


@dataclass(frozen=True, slots=True)
class StateDictParts:
    """A state dict: its tensors, its other values, and the modules' version metadata."""

    tensors: dict[str, TensorRef]
    values: dict[str, Any]
    metadata: Mapping[str, Mapping[str, object]] | None

    def located(self, place: Callable[[str, TensorRef], TensorSlice], refused: str) -> Slices:
        """Return the tensors' files and offsets, with ``refused`` as the attribute ``refused``."""
        slices = Slices(place(name, tensor) for name, tensor in self.tensors.items())
        slices.metadata, slices.values, slices.refused = self.metadata, self.values, refused
        return slices


def is_extra_state(name: object) -> bool:
    """Tell whether a name in a state dict is the name of a module's extra state."""
    return isinstance(name, str) and _EXTRA_STATE in name.split(".")


def state_dict(path: Path, value: Any, key: str) -> StateDictParts:
    """Return the state dict at a dotted key in a pickled value; the key "" means the value itself.

    With a key, the state dict may also have other values that hold no tensors. Without a key, the
    only other values that it may have are the extra states of modules, because a file of tensors
    and settings is more likely a training checkpoint.

    Raises:
        CheckpointError: there is no state dict. The message names an object that a state dict
            cannot have. The repair (advice) lists the keys and sizes of the largest state dicts.
    """
    inside = inner(path, value, key)
    if not isinstance(inside, dict):
        raise _no_dict(path, inside, value)
    tensors, values = {}, {}
    for name, item in inside.items():
        if isinstance(name, str) and isinstance(item, TensorRef):
            tensors[name] = item
        else:
            values[name] = item
    seen: set[int] = set()
    for name, item in values.items():
        fits = isinstance(name, str) and (bool(key) or is_extra_state(name))
        if not fits or any(
            isinstance(one, TensorRef | OtherTensor) for _, one in _walk(item, "", seen)
        ):
            raise _no_state_dict(path, value, key, values, name)
    if values and not tensors:
        raise _no_state_dict(path, value, key, values, next(iter(values)))
    return StateDictParts(tensors, values, getattr(inside, "metadata", None))


def inner(path: Path, value: Any, key: str) -> Any:
    """Return the value at a dotted key of nested dicts.

    If the dicts lack this key, return the values whose names begin with the key and a dot, as a
    dict of their remaining names.

    Raises:
        CheckpointError: no name is the key, or begins with the key and a dot.
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
    """Yield every value that a dotted key can mean in nested dicts, because a name in a dict may
    itself contain dots; try the longest first name first.
    """
    if not isinstance(value, dict):
        return
    if key in value:
        yield value[key]
    parts = key.split(".")
    for size in range(len(parts) - 1, 0, -1):
        yield from _found(value.get(".".join(parts[:size])), ".".join(parts[size:]))


def no_key(path: Path, key: str, keys: Sequence[object] | Mapping[Any, object]) -> CheckpointError:
    names = first_names(plain(str(one)) for one in dict.fromkeys(keys) if isinstance(one, str))
    places = largest(_sizes(keys)) if isinstance(keys, Mapping) else {}
    repair = with_key(places) if places else f"its keys: {names or 'none'}"
    return CheckpointError(f"{path}: has no key {shown(key)}", repair)


def _sizes(value: Any) -> dict[str, int]:
    """Map the dotted key of each nested state dict to its size in bytes; leave out optimizers."""
    seen: set[int] = set()  # a crafted pickle may refer to one dict from many places
    places: dict[str, int] = {}

    def look(inside: Mapping[Any, Any], key: str, depth: int) -> None:
        for name, item in inside.items():
            if not isinstance(name, str) or "optim" in name.lower() or id(item) in seen:
                continue
            if not isinstance(item, dict) or not item:
                continue
            seen.add(id(item))
            place = f"{key}.{name}" if key else name
            tensors = [one for one in item.values() if isinstance(one, TensorRef)]
            if tensors and all(
                isinstance(one, str) and (isinstance(item[one], TensorRef) or is_extra_state(one))
                for one in item
            ):
                places[place] = sum(prod(one.shape) * ITEM_BYTES[one.dtype] for one in tensors)
            elif depth < _DEEPEST:
                look(item, place, depth + 1)

    if isinstance(value, Mapping):
        look(value, "", 1)
    return places


def largest(places: Mapping[str, int]) -> dict[str, int]:
    """Return the three entries with the largest sizes, the largest first, without sizes of 0."""
    found = sorted(places, key=lambda place: -places[place])[:_MOST_PLACES]
    return {plain(place): places[place] for place in found if places[place]}


def with_key(places: Mapping[str, int]) -> str:
    """Return the advice to select a state dict with --key; ``places`` maps their keys to bytes."""
    from weighin.units import format_bytes  # imports decimal, which few loads need

    ways = " or ".join(f"--key {place} ({format_bytes(size)})" for place, size in places.items())
    return select_key(ways, next(iter(places)))


def is_beside_weights(path: Path) -> bool:
    """Tell whether a folder, or a file's folder, has files in which ZeRO-3 keeps weights."""
    folder = path if path.is_dir() else path.parent
    return next(folder.glob(f"*{_OPTIM_STATES}"), None) is not None


def all_empty(path: Path) -> CheckpointError:
    """Return the exception for a checkpoint whose tensors are all empty.

    DeepSpeed's ZeRO-3 writes a checkpoint of empty tensors, and the weights into
    ``*_optim_states.pt`` beside it.
    """
    folder = path if path.is_dir() else path.parent
    if not is_beside_weights(path):
        return CheckpointError(
            f"{path}: all tensors have 0 elements, so the checkpoint holds no weights",
            "save the whole weights: a process that shards a model (ZeRO-3, FSDP) must gather them"
            " before it calls state_dict()",
        )
    return CheckpointError(
        f"{path}: all tensors are empty: ZeRO-3 keeps the weights in *{_OPTIM_STATES}",
        f"give the folder of all its files: {folder}",
    )


def holds_more(path: Path, place: str, item: Opaque) -> CheckpointError:
    """Return the exception for a file that has an object in the place of a tensor."""
    what = f"is a {title}" if (title := type_name(item)) != item.kind else f"refers to {title}"
    return CheckpointError(
        f"{path}: holds more than tensors, and was NOT executed: {place} {what}", _SAVE_AGAIN
    )


def unread(path: Path, place: str, tensor: OtherTensor) -> CheckpointError:
    return CheckpointError(
        f"{path}: {place} is a {tensor.kind}; weighin reads plain tensors", tensor.way
    )


def _no_dict(path: Path, inside: Any, value: Any) -> CheckpointError:
    places = largest(_sizes(value))
    if isinstance(inside, Opaque) and inside.is_foreign:
        error = (
            _whole_module(path, "", inside) if inside.is_module else holds_more(path, "it", inside)
        )
    else:
        what = f"holds a {type_name(inside)}, not a state dict"
        error = CheckpointError(f"{path}: {what}", _WEIGHTS_ALONE)
    return CheckpointError(error.message, with_key(places)) if places else error


def _no_state_dict(
    path: Path, value: Any, key: str, values: Mapping[Any, Any], name: Any
) -> CheckpointError:
    """Return the exception for a dict whose item ``name`` cannot be in a state dict.

    ``values`` are the dict's items other than tensors. If torch.load(weights_only=True) refuses an
    object in them, the message names the first such object instead of ``name``.
    """
    item, sizes = values[name], _sizes(value)
    places = largest(sizes)
    if sizes and not places:
        return all_empty(path)
    objects = list(_objects(key, {name: item} if key else values))
    foreign = next((one for one in objects if one[1].is_foreign), None)
    for place, one in objects:
        if isinstance(one, OtherTensor) and not places:
            return unread(path, shown(place), one)
    if isinstance(name, Opaque):
        error = CheckpointError(
            f"{path}: not a state dict: a dict has a key of type {name.kind}", _WEIGHTS_ALONE
        )
    elif foreign is None:
        what = f"{shown(name)} holds a {type_name(item)}"
        error = CheckpointError(f"{path}: not a flat state dict: {what}", _WEIGHTS_ALONE)
    elif foreign[1].is_module and not places:
        error = _whole_module(path, *foreign)
    elif foreign[1] is item and type_name(item) == _ARRAY:
        what = f"{shown(foreign[0])} is a {_ARRAY}, not a tensor"
        error = CheckpointError(f"{path}: {what}", _ARRAYS)
    else:
        error = holds_more(path, shown(foreign[0]), foreign[1])
    return CheckpointError(error.message, with_key(places)) if places else error


def _objects(key: str, values: Mapping[Any, Any]) -> Iterator[tuple[str, Opaque]]:
    """Yield the dotted key, beginning with ``key``, and the record of each object in ``values``."""
    seen: set[int] = set()
    for name, item in values.items():
        for place, one in _walk(item, _join(key, name), seen):
            if isinstance(one, Opaque):
                yield place, one


def _whole_module(path: Path, place: str, module: Opaque) -> CheckpointError:
    at = f" at {shown(place)}" if place else ""
    return CheckpointError(
        f"{path}: holds a whole pickled module ({module.kind}){at}, which cannot be loaded without"
        " executing its code: it was NOT executed",
        "if you trust that code, load the module with it and save plain weights:"
        " torch.save(model.state_dict(), ...)",
    )


def _walk(value: Any, place: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, dicts, lists and objects in a value, in order, each with its dotted key.

    A value whose id is in ``seen`` is left out: a crafted pickle may refer to one value many times.
    """
    todo = [(place, value)]
    while todo:
        at, one = todo.pop()
        if not isinstance(one, TensorRef):
            if not isinstance(one, dict | list | tuple | Opaque) or id(one) in seen:
                continue
            seen.add(id(one))
        yield at, one
        pairs: Iterable[tuple[object, Any]] = ()
        if isinstance(one, dict):
            pairs = one.items()
            todo += [(at, key) for key in one if isinstance(key, Opaque)]
        elif not isinstance(one, TensorRef):
            pairs = enumerate(one.contents if isinstance(one, Opaque) else one)
        inside = [
            (at if isinstance(one, Opaque) or len(one) > _MOST_NAMED else _join(at, name), item)
            for name, item in pairs
            if isinstance(item, _NOT_PLAIN)
        ]
        todo += reversed(inside)


def _join(place: str, name: object) -> str:
    """Append ``name`` to the dotted key ``place``, unless ``place`` has over 100 characters."""
    if not isinstance(name, str | int) or len(place) > _LONGEST_PLACE:
        return place
    return f"{place}.{plain(str(name))}" if place else plain(str(name))
