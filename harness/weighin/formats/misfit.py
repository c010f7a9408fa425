"""Write the error for a checkpoint that does not fit a model, and lists of names in messages."""

from collections.abc import Collection, Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Final

from weighin.errors import CheckpointError

_MOST_NAMES: Final = 3
_MOST_LETTERS: Final = 100


def misfit(
    checkpoint: Path, model: str, problems: Mapping[str, Collection[str]], reason: str = ""
) -> CheckpointError:
    """Return the error that a checkpoint does not fit a model.

    ``problems`` maps each fault, such as "missing", to the keys that have it, shortened by ``plain``.
    ``reason`` is the message if there are no such keys.
    """
    faults = [
        f"{len(names)} {what} ({first_names(names)})" for what, names in problems.items() if names
    ]
    return CheckpointError(
        f"{checkpoint}: does not fit {model}, keys: {'; '.join(faults) or reason}",
        "choose the model that this checkpoint was saved from, or correct its arguments",
    )


def first_names(names: Iterable[str]) -> str:
    """Return the first three names in one string, followed by "..." if there are more."""
    first = [*islice(names, _MOST_NAMES + 1)]
    return ", ".join([*first[:_MOST_NAMES], *["..."] * (len(first) > _MOST_NAMES)])


def plain(name: str) -> str:
    """Return a tensor's name for a list of names: unquoted, and cut if it is very long."""
    if len(name) <= _MOST_LETTERS:
        return name
    return f"{name[:_MOST_LETTERS]}... ({len(name):,} characters)"
