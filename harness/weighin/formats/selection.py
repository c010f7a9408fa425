"""Select the weights in a checkpoint that also holds other data, or has longer names.

This module uses only the standard library.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from weighin.errors import CheckpointError
from weighin.formats.base import Slices, TensorSlice
from weighin.formats.misfit import first_names, plain
from weighin.formats.sniff import shown
from weighin.formats.state_dicts import no_key


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


def below(path: Path, slices: Sequence[TensorSlice], key: str) -> Slices:
    """Return the tensors whose names begin with ``key`` and a dot, with this prefix removed."""
    start = f"{key}."
    inside = [one for one in slices if one.name.startswith(start)]
    if not inside:
        raise no_key(path, key, [one.name.partition(".")[0] for one in slices])
    values = {name: one for name, one in _values(slices).items() if name.startswith(start)}
    return _renamed(slices, inside, values, lambda name: name.removeprefix(start))


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
    renamed = _renamed(slices, slices, _values(slices), lambda name: name.removeprefix(prefix))
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


def _renamed(
    slices: Sequence[TensorSlice],
    chosen: Sequence[TensorSlice],
    values: Mapping[str, object],
    rename: Callable[[str], str],
) -> Slices:
    """Return some of the tensors and other values of a checkpoint, under new names."""
    renamed = Slices(replace(one, name=rename(one.name)) for one in chosen)
    renamed.values = {rename(name): value for name, value in values.items()}
    renamed.refused = getattr(slices, "refused", "")
    return renamed


def _values(slices: Sequence[TensorSlice]) -> Mapping[str, object]:
    return slices.values if isinstance(slices, Slices) else {}
