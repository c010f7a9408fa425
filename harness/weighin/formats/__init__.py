"""Read and write checkpoints of every supported format; ``base.Layout`` is their common interface.

Importing this package imports neither torch nor any format: the functions of ``catalog`` are imported
once they are used. So a worker that needs one table of this package does not import, before the clock
starts, what a strategy then imports on its clock.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weighin.formats.catalog import NAMES, checkpoint_in, detect, files, named, read

__all__ = ["NAMES", "checkpoint_in", "detect", "files", "named", "read"]


def __getattr__(name: str) -> Any:
    """Import the catalog of formats for the first function of it that is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from weighin.formats import catalog

    return getattr(catalog, name)
