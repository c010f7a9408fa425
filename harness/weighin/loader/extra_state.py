"""Rebuild the values of a state dict that are no tensors, for ``Module.set_extra_state``.

Only plain values and a few kinds of objects are rebuilt, from the records of ``stream.pickles``. No
class that a checkpoint names is imported, so that a malicious file cannot execute code.
"""

import logging
import re
from argparse import Namespace
from collections import OrderedDict
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import torch

from weighin.errors import CheckpointError
from weighin.stream.pickles import MOST_BYTES, Dict, Named, Opaque, Size, StateDict, type_name
from weighin.stream.slices import ITEM_BYTES, Slices
from weighin.stream.state_dicts import is_extra_state
from weighin.text import first_names, plain, shown

_NUMPY: Final = re.compile(r"numpy\._?core\.multiarray\.(scalar|_reconstruct)")
_NUMPY_DTYPE: Final = re.compile(r"[biufc]\d+")
_log = logging.getLogger("weighin")


def extra_values(model: torch.nn.Module, slices: Slices, checkpoint: Path) -> dict[str, Any]:
    """Return the checkpoint's values that are no tensors, as ``load_state_dict`` needs them.

    ``extra_values`` leaves out the extra state of a module that defines no ``set_extra_state``. A
    value that is no extra state is None in the result; torch then reports its name in an error.

    Raises:
        CheckpointError: an extra state is damaged, too large, or holds an object of an unknown kind.
    """
    values = slices.values
    if not values:
        return {}
    modules = dict(model.named_modules(remove_duplicate=False))
    taken = {
        f"{path}.{torch.nn.modules.module._EXTRA_STATE_KEY_SUFFIX}".removeprefix(".")
        for path, module in modules.items()
        if type(module).set_extra_state is not torch.nn.Module.set_extra_state
    }
    if any(module._load_state_dict_pre_hooks for module in modules.values()):
        # A hook may take a prefix away, so that a module takes the rest of the name.
        taken |= {each for each in values if any(each.endswith(f".{name}") for name in taken)}
    unused = [name for name in values if is_extra_state(name) and name not in taken]
    if dropped := [plain(name) for name in unused if values[name] is not None]:
        _log.warning("no module of this model takes the extra state of %s", first_names(dropped))
    return {
        name: _Rebuilder(checkpoint, name).rebuild(value) if name in taken else None
        for name, value in values.items()
        if name not in unused
    }


class _Rebuilder:
    """Turns the records of one pickled value into objects."""

    def __init__(self, checkpoint: Path, name: str) -> None:
        self._checkpoint, self._name = checkpoint, name
        self._made: dict[int, Any] = {}
        self._left = MOST_BYTES

    def rebuild(self, record: Any) -> Any:
        """Return the value that ``record`` describes.

        Raises:
            CheckpointError: the value is damaged, too large, or holds an object of an unknown kind.
        """
        try:
            return self._object(record)
        except (TypeError, ValueError, KeyError, IndexError, RecursionError):
            raise self._refusal("a damaged value") from None

    def _object(self, record: Any) -> Any:
        if record is None or isinstance(record, bool | int | float | str | bytes):
            return record
        if id(record) not in self._made:
            self._made[id(record)] = self._new(record)
        return self._made[id(record)]

    def _new(self, record: Any) -> Any:  # noqa: PLR0911 (one for each kind)
        match record:
            case Dict():
                items = {self._key(key): self._object(value) for key, value in record.items()}
                return OrderedDict(items) if isinstance(record, StateDict) else items
            case list():
                return [self._object(one) for one in record]
            case Size():
                return torch.Size(record)
            case tuple():
                return tuple(self._object(one) for one in record)
            case Named(name) if (dtype := name.removeprefix("torch.")) in ITEM_BYTES:
                return getattr(torch, dtype)
            case Opaque("_codecs.encode", [(str() as text, *_)]):
                return self._counted(text.encode("latin-1"))
            case Opaque("__builtin__.bytes", [()]):
                return b""
            case Opaque("torch.device", [arguments]):
                return torch.device(*arguments)
            case Opaque("argparse.Namespace", [_, *states]):
                return Namespace(**self._counted(self._object(states[0]) if states else {}))
            case Opaque("_io.BytesIO", [_, state]):
                return BytesIO(self._counted(self._object(state[0])))
            case Opaque(kind, [(dtype, data)]) if _NUMPY.fullmatch(kind):
                return self._numbers(dtype, data)[0]
            case Opaque(kind, [_, (_, shape, dtype, is_fortran, data)]) if _NUMPY.fullmatch(kind):
                return self._numbers(dtype, data).reshape(shape, order="F" if is_fortran else "C")
        raise self._refusal(type_name(record))

    def _key(self, key: Any) -> Any:
        if isinstance(key, Opaque):
            raise self._refusal(f"a dict with a key of type {key.kind}")
        return key

    def _numbers(self, dtype: Opaque, data: Any) -> Any:
        import numpy  # not at the top: torch works without NumPy, and few checkpoints need it

        (name, *_), state = dtype.contents
        if not _NUMPY_DTYPE.fullmatch(name):
            raise self._refusal(f"a NumPy array of dtype {name}")
        order = ">" if state[1] == ">" else "<"
        return numpy.frombuffer(self._counted(self._object(data)), dtype=order + name).astype(name)

    def _counted(self, made: Any) -> Any:
        """Return ``made``; raise CheckpointError if the lengths of all values exceed ``MOST_BYTES``.

        A small file can refer to one record many times, and each reference makes a copy of the value.
        """
        self._left -= len(made)
        if self._left < 0:
            raise self._refusal(f"values of more than {MOST_BYTES:,} bytes")
        return made

    def _refusal(self, what: str) -> CheckpointError:
        return CheckpointError(
            f"{self._checkpoint}: {shown(self._name)} holds {what}, which was NOT executed",
            "load the checkpoint with torch.load and the code that defines the object",
        )
