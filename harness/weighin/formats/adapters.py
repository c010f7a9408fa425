"""Tell whether a folder has an adapter beside a model.

If peft is installed, ``from_pretrained`` adds an adapter beside the weights to the model; without
peft, ``from_pretrained`` ignores the adapter silently. weighin never adds an adapter beside the
weights. If peft is installed, weighin refuses the folder, because the weights would differ from
those of ``from_pretrained``. Without peft, weighin loads the folder, and a note names the adapter.
"""

from importlib.util import find_spec
from pathlib import Path
from shlex import quote
from typing import Final

from weighin.cell import ModelSpec
from weighin.errors import CheckpointError
from weighin.formats.pretrained_library import TRANSFORMERS

ADAPTER: Final = "adapter_config.json"
ARGUMENT: Final = "adapter"
"""The argument of a model's builder that names the folder of an adapter to merge."""


def adapter_of(spec: ModelSpec) -> Path | None:
    """Return the folder of the adapter to merge into a model; None for a model without an adapter."""
    named = spec.kwargs.get(ARGUMENT) if spec.builder == TRANSFORMERS.builder else None
    return Path(named) if named else None


def note(folder: Path) -> str:
    """Return a sentence on the adapter beside the model in a folder; empty without an adapter."""
    if not (folder / ADAPTER).is_file():
        return ""
    return (
        f"{folder / ADAPTER} lies beside the model: from_pretrained adds this adapter if peft is installed,"
        " and weighin reads the model alone"
    )


def refuse(folder: Path) -> None:
    """Raise CheckpointError if ``from_pretrained`` adds an adapter to the model in this folder."""
    file = folder / ADAPTER
    if file.is_file() and find_spec("peft"):
        raise CheckpointError(
            f"{file} lies beside the model: peft is installed here, so that from_pretrained would"
            " add this adapter to the model. weighin does not add it, so the loaded weights would"
            " differ from those of from_pretrained",
            "merge the adapter, and save the result: merge_and_unload() of peft, then"
            f" save_pretrained(FOLDER); for the model alone: mv {quote(str(file))} {quote(f'{file}.off')}",
        )
