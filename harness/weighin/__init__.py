"""weighin measures the memory and time that loading a PyTorch checkpoint takes.

::

    from weighin import Load, Save, load_pretrained, load_streaming, phase, results

A strategy is one way to load or save a model, written as a Python function of a ``Load`` or ``Save``; ``weighin.strategy``
has further functions for it. ``load_streaming`` loads a checkpoint into a model, and ``load_pretrained`` the model of a
Hugging Face folder; both need little more memory than the model. ``phase`` names a part of a program, so that ``weighin
run`` measures the part's peak memory. ``results`` returns a run as a pandas DataFrame.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from weighin.program_phases import phase
    from weighin.show.write import results
    from weighin.strategy import Load, Save, load_pretrained, load_streaming

__version__ = "1.0.0"
__all__ = ["Load", "Save", "__version__", "load_pretrained", "load_streaming", "phase", "results"]


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, because importing torch takes time and memory."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    modules = {"phase": "weighin.program_phases", "results": "weighin.show.write"}
    module = import_module(modules.get(name, "weighin.strategy"))
    value = globals()[name] = getattr(module, name)
    return value
