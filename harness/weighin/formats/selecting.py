"""Select the weights in a checkpoint by a key, or by a prefix of their names.

This module uses only the standard library.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from weighin.errors import CheckpointError
from weighin.formats.base import Slices, TensorSlice
from weighin.formats.misfit import first_names, plain
from weighin.formats.state_dicts import no_key
from weighin.formats.unknown_file import shown


def below(path: Path, slices: Slices, key: str) -> Slices:
    """Return the tensors whose names begin with ``key`` and a dot, with this prefix removed."""
    start = f"{key}."
    inside = [one for one in slices if one.name.startswith(start)]
    if not inside:
        raise no_key(path, key, [one.name.partition(".")[0] for one in slices])
    values = {name: one for name, one in slices.values.items() if name.startswith(start)}
    return _renamed(slices, inside, values, lambda name: name.removeprefix(start))


def stripped(path: Path, slices: Slices, prefix: str) -> Slices:
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
    renamed = _renamed(slices, slices, slices.values, lambda name: name.removeprefix(prefix))
    names = {one.name for one in renamed}
    if len(names) != len(renamed):
        raise CheckpointError(
            f"{path}: two tensors have the same name without {shown(prefix)}",
            "leave --strip-prefix out, or convert the checkpoint with your own code",
        )
    if (
        slices.metadata is not None
    ):  # as in torch.nn.modules.utils.consume_prefix_in_state_dict_if_present
        renamed.metadata = {
            f"{name}.".removeprefix(prefix).removesuffix("."): local
            for name, local in slices.metadata.items()
            if name
        }
    return renamed


def _renamed(
    slices: Slices,
    chosen: Sequence[TensorSlice],
    values: Mapping[str, object],
    rename: Callable[[str], str],
) -> Slices:
    """Return some of the tensors and other values of a checkpoint, under new names."""
    renamed = Slices(replace(one, name=rename(one.name)) for one in chosen)
    renamed.values = {rename(name): value for name, value in values.items()}
    renamed.refused = slices.refused
    return renamed
