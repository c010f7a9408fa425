"""Before the load, import the package that defines a model's class, in a phase of its own.

transformers and diffusers import a module when a class in it is first used. Without the separate
phase, this import would be part of the phase "prepare".
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from weighin.cell import ModelSpec
from weighin.formats.pretrained_library import library_of


def import_model_package(
    model: ModelSpec, phase: Callable[[str], AbstractContextManager[None]]
) -> None:
    """Import a model's class of transformers, diffusers or timm in a ``phase`` of its own.

    Raises:
        ConfigError: the library is not installed, or has no such class.
    """
    library = library_of(model.builder)
    if library is None:
        return
    with phase(f"import {library.name}"):
        from weighin.models.pretrained_modules import module_of  # after torch

        module_of(library.builder).import_class(model.kwargs)
