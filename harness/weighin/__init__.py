"""weighin: what loading a PyTorch checkpoint costs in memory and time, and which way of loading to use.

::

    from weighin import Load, Save, load_streaming

``Load`` and ``Save`` are what a strategy's function gets; ``load_streaming`` loads a checkpoint into
a model with little more memory than the model. What a strategy's file may need beside them is in
``weighin.strategy``.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weighin.loader.load import load_streaming
    from weighin.strategy import Load, Save

__version__ = "0.2.0"

_PUBLIC = {
    "Load": "weighin.strategy",
    "Save": "weighin.strategy",
    "load_streaming": "weighin.loader.load",
}
__all__ = ["Load", "Save", "__version__", "load_streaming"]


def __getattr__(name: str) -> Any:
    """Import a public name once it is asked for: torch takes a second, and a worker counts its KiB."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_PUBLIC[name]), name)
