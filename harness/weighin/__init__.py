"""weighin measures the memory and time that loading a PyTorch checkpoint takes.

::

    from weighin import Load, Save, load_pretrained, load_streaming, phase, results

A strategy is one way to load or save a model, written as a Python function. The function's argument
has the type ``Load`` or ``Save``. ``load_streaming`` loads a checkpoint into a model, and needs
little more memory than that model. ``load_pretrained`` loads and returns the model of a Hugging
Face folder, and needs as little memory as ``load_streaming``. ``phase`` names a part of a program,
so that ``weighin run`` measures the part's peak memory. ``results`` returns a run as a pandas
DataFrame. ``weighin.strategy`` has further functions for strategies.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weighin.program_phases import phase
    from weighin.show.write import results
    from weighin.strategy import Load, Save
    from weighin.stream.hugging_face import load_pretrained
    from weighin.stream.model import load_streaming

__version__ = "1.0.0"

_PUBLIC = {
    "Load": "weighin.strategy",
    "Save": "weighin.strategy",
    "load_pretrained": "weighin.stream.hugging_face",
    "load_streaming": "weighin.stream.model",
    "phase": "weighin.program_phases",
    "results": "weighin.show.write",
}
__all__ = ["Load", "Save", "__version__", "load_pretrained", "load_streaming", "phase", "results"]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, because importing torch takes time and memory."""
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = globals()[name] = getattr(import_module(_PUBLIC[name]), name)
    return value
