"""Read and write checkpoints of every supported format; ``base.Layout`` is their common interface.

An import of weighin.formats imports neither torch nor the code of a format: ``catalog`` is imported
at the first use of one of its functions. A measured process imports ``pretrained_library`` before
its measured time begins. That import must not import the formats, because a strategy's load time
includes the import of the formats that the strategy uses.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weighin.formats.catalog import (
        NAMES,
        READ_ONLY,
        checkpoint_in,
        detect,
        files,
        has_only_tensors,
        known,
        loaded_as,
        named,
        read,
        refuse_empty,
    )

__all__ = [
    "NAMES",
    "READ_ONLY",
    "checkpoint_in",
    "detect",
    "files",
    "has_only_tensors",
    "known",
    "loaded_as",
    "named",
    "read",
    "refuse_empty",
]


def __getattr__(name: str) -> Any:
    """Import ``catalog`` at the first use of one of its functions."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from weighin.formats import catalog

    return getattr(catalog, name)
