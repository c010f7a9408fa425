"""Compose the error for a checkpoint that does not fit a model, with short lists of names."""

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final

from weighin.errors import CheckpointError
from weighin.formats.dtypes import NOT_CONVERTED
from weighin.formats.unknown_file import shown

if TYPE_CHECKING:
    from weighin.formats.base import TensorSlice

Shape = tuple[int, ...]

NOT_MEASURED: Final = (
    "its loads cannot be measured; weighin inspect, convert and load_streaming read it as it is"
)
_MOST_NAMES: Final = 3
_MOST_LETTERS: Final = 100


def misfit(
    checkpoint: Path,
    model: str,
    problems: Mapping[str, Collection[str]],
    reason: str = "",
    *,
    repair: str = "",
) -> CheckpointError:
    """Return the exception for a checkpoint that does not fit a model.

    ``problems`` maps each fault, such as "missing", to the keys with this fault, which the caller
    shortens with ``plain``. ``reason`` replaces the list of keys if no key has a fault. If
    ``repair`` is empty, the error advises to choose another model.
    """
    faults = [
        f"{len(names)} {what} ({first_names(names)})" for what, names in problems.items() if names
    ]
    return CheckpointError(
        f"{checkpoint}: does not fit {model}, keys: {'; '.join(faults) or reason}",
        repair or "choose the model that this checkpoint was saved from, or correct its arguments",
    )


def selecting(stored: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> str:
    """Return the advice to select the model's tensors by --key or --strip-prefix; else empty.

    ``stored`` maps the checkpoint's names to shapes; ``wanted`` maps the model's names to shapes.
    """
    first = next(iter(wanted), "")
    for name in stored:
        prefix = name.removesuffix(first)
        if not first or not prefix.endswith(".") or prefix + first != name:
            continue
        inside = {one: stored[one] for one in stored if one.startswith(prefix)}
        if {one.removeprefix(prefix): shape for one, shape in inside.items()} != wanted:
            continue
        if len(inside) == len(stored):
            way, option = f"--strip-prefix {prefix}", f"strip_prefix={shown(prefix)}"
            return (
                f"all names begin with {shown(prefix)}: {way}; in load_streaming: {option}"
                f"; in a suite: strip_prefix: {prefix}"
            )
        key = prefix.removesuffix(".")
        return select_key(f"--key {key}", key)
    return ""


def select_key(ways: str, key: str) -> str:
    """Return the advice to select the weights at ``key``; ``ways`` lists the options for it."""
    return (
        f"select the weights: {ways}; in load_streaming: key={shown(key)}; in a suite: key: {key}"
    )


def check_converts(checkpoint: Path, slices: "Iterable[TensorSlice]", repair: str) -> None:
    """Raise CheckpointError with ``repair`` if torch cannot convert a tensor to another dtype."""
    for one in slices:
        if one.dtype_name in NOT_CONVERTED:
            raise CheckpointError(
                f"{checkpoint}: {shown(one.name)} has the dtype torch.{one.dtype_name}; torch can"
                " neither copy nor convert a tensor of this dtype",
                repair,
            )


def first_names(names: Iterable[str]) -> str:
    """Return the first three names in one string, followed by "..." if there are more."""
    first = [*islice(names, _MOST_NAMES + 1)]
    return ", ".join([*first[:_MOST_NAMES], *["..."] * (len(first) > _MOST_NAMES)])


def plain(name: str) -> str:
    """Return a tensor's name for a list in a message: without quotes, and cut if it is very long."""
    if len(name) <= _MOST_LETTERS:
        return name
    return f"{name[:_MOST_LETTERS]}... ({len(name):,} characters)"
