"""Find the state dict in a pickled checkpoint, or say why there is none.

A training checkpoint also has settings, schedulers and random states, as objects of any class. In
the selected state dict, an object other than a tensor is allowed only if it holds no tensors.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any, Final

from weighin.errors import CheckpointError
from weighin.stream.foreign import select_key
from weighin.stream.pickles import IF_TRUSTED, Opaque, type_name
from weighin.stream.slices import Slice
from weighin.text import first_names, plain, shown

_KINDS: Final = (dict, list, tuple, Opaque, Slice)
_LONGEST_KEY: Final = 200  # characters of a key that advice names, which must be whole
_OPTIM_STATES: Final = "_optim_states.pt"
_SAVE: Final = "save the weights alone: torch.save(model.state_dict(), ...)"
_PLAIN: Final = (
    "load it with the code that wrote it, make it a plain tensor with values (tensor.to_dense(),"
    " dequantize(), unbind(), full_tensor(), resolve_conj(), view(torch.uint8), cpu()), and save it:"
    " torch.save({NAME: TENSOR, ...}, ...)"
)
_FROM_NUMPY: Final = (
    "save tensors instead: torch.save({name: torch.from_numpy(array) for name, array in ...}, ...)"
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
        raise _no_state_dict(path, value, key if isinstance(inside, Opaque) else "", inside)
    tensors: dict[str, Slice] = {}
    values: dict[Any, Any] = {}
    for name, item in inside.items():
        is_tensor = isinstance(name, str) and isinstance(item, Slice)
        (tensors if is_tensor else values)[name] = item
    seen: set[int] = set()
    for name, item in values.items():
        if tensors and is_extra_state(name):
            continue  # torch.load reads it
        inner = [*_walk([(name, item)], key, seen)]
        objects = [(place, one) for place, one in inner if isinstance(one, Opaque)]
        holds = any(isinstance(one, Slice) or getattr(one, "is_tensor", False) for _, one in inner)
        if holds or not (key and tensors and isinstance(name, str)):
            odd = (each for each in objects if each[1].is_tensor or each[1].is_foreign)
            raise _no_state_dict(path, value, *next(odd, (name, item)))
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
    repair = with_key(_sizes(keys)) or f"its keys: {names or 'none'}"
    return CheckpointError(f"{path}: has no key {shown(key)}", repair)


def _sizes(value: Any) -> dict[str, int]:
    """Map the dotted key of each nested state dict to its size in bytes; leave out optimizers."""
    seen: set[int] = set()  # a crafted pickle may refer to one dict from many places
    places: dict[str, int] = {}

    def look(inside: Mapping[Any, Any], above: str) -> None:
        for name, item in inside.items():
            if not isinstance(name, str) or not name or len(above) + len(name) >= _LONGEST_KEY:
                continue
            if not isinstance(item, dict) or "optim" in name.lower() or is_extra_state(name):
                continue
            if id(item) in seen:
                continue
            seen.add(id(item))
            place = f"{above}.{name}" if above else name
            tensors = [one for one in item.values() if isinstance(one, Slice)]
            if tensors and all(
                isinstance(key, str) and (isinstance(one, Slice) or is_extra_state(key))
                for key, one in item.items()
            ):
                places[place] = sum(one.nbytes for one in tensors)
            else:
                look(item, place)

    if isinstance(value, Mapping):
        look(value, "")
    return places


def with_key(sizes: Mapping[str, int]) -> str:
    """Return the advice to select one of the three largest state dicts, or "" if none has bytes.

    ``sizes`` maps their keys to bytes.
    """
    from weighin.units import format_bytes  # imports decimal, which few loads need

    usual = (place for place in sizes if sizes[place] and len(place) <= _LONGEST_KEY)
    places = sorted(usual, key=lambda place: -sizes[place])[:3]
    ways = " or ".join(f"--key {one} ({format_bytes(sizes[one])})" for one in places)
    return select_key(ways, places[0]) if places else ""


def is_beside_weights(path: Path) -> bool:
    """Tell whether a folder, or a file's folder, has files in which ZeRO-3 keeps weights."""
    folder = path if path.is_dir() else path.parent
    return next(folder.glob(f"*{_OPTIM_STATES}"), None) is not None


def all_empty(path: Path) -> CheckpointError:
    """Return the exception for a checkpoint whose tensors are all empty, as in ZeRO-3's model states."""
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


def no_tensor(path: Path, place: Any, item: Any) -> CheckpointError:
    """Return the exception for a value that is no plain tensor, at the dotted key ``place`` of a file."""
    where, title = "it" if place == "" else shown(place), type_name(item)
    if isinstance(place, Opaque):
        what, repair = f"not a state dict: a dict has a key of type {place.kind}", _SAVE
    elif isinstance(item, Opaque) and item.is_tensor:
        what, repair = f"{where} is a {title}; weighin reads plain tensors", _PLAIN
    elif title.endswith("multiarray._reconstruct"):
        what, repair = f"{where} is a NumPy array, not a tensor", _FROM_NUMPY
    elif isinstance(item, Opaque) and item.is_module:
        what = f"{where} is a whole pickled module ({title}), and was NOT executed"
        repair = IF_TRUSTED
    elif isinstance(item, Opaque) and item.is_foreign:
        what = f"holds more than tensors, and was NOT executed: {where} refers to {title}"
        repair = IF_TRUSTED
    elif place == "":
        what, repair = f"holds a {title}, not a state dict", _SAVE
    else:
        what, repair = f"not a flat state dict: {where} holds a {title}", _SAVE
    return CheckpointError(f"{path}: {what}", repair)


def _no_state_dict(path: Path, value: Any, place: Any, item: Any) -> CheckpointError:
    """Return the exception for a file whose state dict cannot have ``item``."""
    sizes = _sizes(value)
    if sizes and not any(sizes.values()):
        return all_empty(path)
    error = no_tensor(path, place, item)
    return CheckpointError(error.message, with_key(sizes) or error.repair)


def _walk(
    items: Iterable[tuple[Any, Any]], above: str, seen: set[int]
) -> Iterator[tuple[str, Any]]:
    """Yield the tensors, dicts, lists and objects in values, in order, each with its dotted key.

    A value whose id is in ``seen`` is left out: a crafted
    pickle may refer to one value many times. Values deeper than 1,000 levels are left out, too.
    """
    todo = [(above, iter(items))]
    while todo:
        place, rest = todo[-1]
        for name, one in rest:
            if not isinstance(one, _KINDS) or id(one) in seen:
                continue
            seen.add(id(one))
            inner = _join(place, name)
            yield inner, one
            if not isinstance(one, Slice) and len(todo) < 1000:
                todo.append((inner, _inside(one)))
                break
        else:
            todo.pop()


def _inside(value: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(value, dict):
        return iter(value.items())
    return zip(repeat(None), value.contents) if isinstance(value, Opaque) else enumerate(value)


def _join(place: str, name: object) -> str:
    """Append ``name`` to the dotted key ``place``, unless ``place`` has over 100 characters."""
    if not isinstance(name, str | int) or len(place) > 100:
        return place
    return f"{place}.{plain(str(name))}" if place else plain(str(name))
