"""Find the state dict in a pickled checkpoint, or say why there is none.

A training checkpoint also has settings, schedulers and random states, as objects of any class. In
the selected state dict, an object other than a tensor is allowed only if it holds no tensors.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.stream.foreign import select_key
from weighin.stream.pickles import Opaque, type_name
from weighin.stream.slices import Slice
from weighin.text import first_names, plain, shown

_DEEPEST: Final = 4
_DEEPEST_WALK: Final = 1000
_MOST_PLACES: Final = 3
_LONGEST_PLACE: Final = 100
_MOST_NAMED: Final = 1000  # items of a dict or list whose keys an error names
_HOLDING: Final = (dict, list, tuple, Opaque, Slice)
_OPTIM_STATES: Final = "_optim_states.pt"
_WEIGHTS_ALONE: Final = "save the weights alone: torch.save(model.state_dict(), ...)"
_IF_TRUSTED: Final = (
    "if you trust the file, load it and save plain weights: torch.save(model.state_dict(), ...)"
)


def is_extra_state(name: object) -> bool:
    """Tell whether a name in a state dict is the name of a module's extra state."""
    return isinstance(name, str) and "_extra_state" in name.split(".")


def state_dict(path: Path, value: Any, key: str) -> tuple[dict[str, Slice], dict[str, Any], Any]:
    """Return the tensors, the other values and the modules' version metadata of a state dict.

    ``key`` is the dotted key of the state dict in nested dicts; "" means the value itself. With a
    key, the state dict may also have other values that hold no tensors. Without a key, the only
    other values that it may have are the extra states of modules, because a file of tensors and
    settings is more likely a training checkpoint.

    Raises:
        CheckpointError: there is no state dict. The message names an object that a state dict
            cannot have. The repair (advice) lists the keys and sizes of the largest state dicts.
    """
    inside = _inner(path, value, key)
    if not isinstance(inside, dict):
        raise _no_state_dict(path, value, key, {"": inside}, "")
    tensors: dict[str, Slice] = {}
    values: dict[Any, Any] = {}
    for name, item in inside.items():
        is_tensor = isinstance(name, str) and isinstance(item, Slice)
        (tensors if is_tensor else values)[name] = item
    seen: set[int] = set()
    for name, item in values.items():
        is_extra = is_extra_state(name)
        fits = bool(tensors) and isinstance(name, str) and (bool(key) or is_extra)
        holds = Opaque if is_extra else (Opaque, Slice)  # torch.load reads an extra state
        if not fits or any(
            isinstance(one, holds) and getattr(one, "way", "tensor")
            for _, one in _walk(item, "", seen)
        ):
            raise _no_state_dict(path, value, key, values, name)
    return tensors, values, getattr(inside, "metadata", None)


def _inner(path: Path, value: Any, key: str) -> Any:
    """Return the value at a dotted key of nested dicts.

    If the dicts lack this key, return the values whose names begin with the key and a dot, as a
    dict of their remaining names.
    """
    if not key:
        return value
    for found in _found(value, key):
        return found
    items = value if isinstance(value, dict) else {}
    names = [name for name in items if isinstance(name, str) and name.startswith(f"{key}.")]
    if not names:
        raise no_key(path, key, items)
    return {name.removeprefix(f"{key}."): items[name] for name in names}


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
    names = first_names(plain(one) for one in dict.fromkeys(keys) if isinstance(one, str))
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
            tensors = [one for one in item.values() if isinstance(one, Slice)]
            if tensors and all(
                isinstance(one, str) and (isinstance(item[one], Slice) or is_extra_state(one))
                for one in item
            ):
                places[place] = sum(one.nbytes for one in tensors)
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
    if not is_beside_weights(path):
        return CheckpointError(
            f"{path}: all tensors have 0 elements, so the checkpoint holds no weights",
            "save the whole weights: a process that shards a model (ZeRO-3, FSDP) must gather them"
            " before it calls state_dict()",
        )
    return CheckpointError(
        f"{path}: all tensors are empty: ZeRO-3 keeps the weights in *{_OPTIM_STATES}",
        f"give the folder of all its files: {path if path.is_dir() else path.parent}",
    )


def holds_more(path: Path, place: str, item: Opaque) -> CheckpointError:
    """Return the exception for a file that has an object in the place of a tensor."""
    if item.is_module:
        at = f" at {place}" if place != "it" else ""
        what = f"holds a whole pickled module ({item.kind}){at}, which cannot be loaded without"
        return CheckpointError(
            f"{path}: {what} executing its code: it was NOT executed", _IF_TRUSTED
        )
    what = f"is a {title}" if (title := type_name(item)) != item.kind else f"refers to {title}"
    return CheckpointError(
        f"{path}: holds more than tensors, and was NOT executed: {place} {what}", _IF_TRUSTED
    )


def unread(path: Path, place: str, tensor: Opaque) -> CheckpointError:
    return CheckpointError(
        f"{path}: {place} is a {tensor.kind}; weighin reads plain tensors", tensor.way
    )


def _no_state_dict(
    path: Path, value: Any, key: str, values: Mapping[Any, Any], name: Any
) -> CheckpointError:
    """Return the exception for a dict whose item ``name`` cannot be in a state dict.

    ``values`` are the dict's items other than tensors, or {"": a value that is no dict}. If
    torch.load(weights_only=True) refuses an object in them, the message names the first such object.
    """
    item, sizes = values[name], _sizes(value)
    places = largest(sizes)
    if sizes and not places:
        return all_empty(path)
    seen: set[int] = set()
    objects = [
        (shown(place) if place else "it", one)
        for each in ([name] if key else values)
        for place, one in _walk(values[each], _join(key, each) if each != "" else "", seen)
        if isinstance(one, Opaque)
    ]
    unreads = [unread(path, *one) for one in objects if one[1].way]
    foreign = next((one for one in objects if one[1].is_foreign), None)
    if unreads and not places:
        return unreads[0]
    if isinstance(name, Opaque):
        error = CheckpointError(
            f"{path}: not a state dict: a dict has a key of type {name.kind}", ""
        )
    elif name == "" and (foreign is None or foreign[1] is not item):
        error = CheckpointError(f"{path}: holds a {type_name(item)}, not a state dict", "")
    elif foreign is None:
        what = f"not a flat state dict: {shown(name)} holds a {type_name(item)}"
        error = CheckpointError(f"{path}: {what}", "")
    elif foreign[1] is item and type_name(item) == "NumPy array":
        error = CheckpointError(
            f"{path}: {foreign[0]} is a NumPy array, not a tensor",
            "save tensors instead: torch.save({name: torch.from_numpy(array) for name, array in ...}, ...)",
        )
    else:
        error = holds_more(path, *foreign)
    return CheckpointError(
        error.message, with_key(places) if places else error.repair or _WEIGHTS_ALONE
    )


def _walk(value: Any, place: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, dicts, lists and objects in a value, in order, each with its dotted key.

    A value whose id is in ``seen`` is left out: a crafted pickle may refer to one value many times.
    Values deeper than 1,000 levels are left out, too.
    """
    todo = [iter([(place, value)] if isinstance(value, _HOLDING) else [])]
    while todo:
        at, one = next(todo[-1], ("", None))
        if one is None:
            todo.pop()
        elif isinstance(one, Slice):
            yield at, one
        elif id(one) not in seen:
            seen.add(id(one))
            yield at, one
            if len(todo) < _DEEPEST_WALK:
                todo.append(_inside(one, at))


def _inside(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    contents: Any = value.contents if isinstance(value, Opaque) else value
    is_named = contents is value and len(contents) <= _MOST_NAMED
    for name, item in contents.items() if isinstance(contents, dict) else enumerate(contents):
        if isinstance(item, _HOLDING):
            yield (_join(place, name) if is_named else place), item
        if isinstance(name, Opaque):
            yield place, name


def _join(place: str, name: object) -> str:
    """Append ``name`` to the dotted key ``place``, unless ``place`` has over 100 characters."""
    if not isinstance(name, str | int) or len(place) > _LONGEST_PLACE:
        return place
    return f"{place}.{plain(str(name))}" if place else plain(str(name))
