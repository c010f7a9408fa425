"""Import the package that defines a model's class before the load, in a phase of its own.

transformers imports its modules when a class is first used. Without this phase, the import would be
part of the phase "prepare", in which a worker also reads the manifest.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager

from weighin.cell import ModelSpec
from weighin.record import IMPORT_TRANSFORMERS

_BUILDER = (
    "weighin.models.pretrained:from_config"  # pretrained_folder defines it, but imports pathlib
)


def import_model_package(
    model: ModelSpec, phase: Callable[[str], AbstractContextManager[None]]
) -> None:
    """Import the class of a model of transformers in a ``phase``; do nothing for any other model.

    Raises:
        ConfigError: transformers is not installed, or has no such class.
    """
    if model.builder != _BUILDER:
        return
    with phase(IMPORT_TRANSFORMERS):
        from weighin.models.pretrained import pretrained_class  # after torch

        arguments = model.kwargs
        pretrained_class(arguments["architecture"], arguments.get("code"), arguments["config"])
