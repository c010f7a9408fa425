"""Give the tensors of a Hugging Face folder the keys of its model: ``weighin convert --keys model``."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from weighin import formats
from weighin.errors import CheckpointError, ConfigError
from weighin.formats import gguf, sniff
from weighin.formats.base import Slices
from weighin.formats.misfit import first_names
from weighin.formats.pipeline import is_pipeline
from weighin.formats.pretrained_choice import AS_SAVED, FolderChoice
from weighin.formats.pretrained_folder import folder_of, is_pretrained, read_folder, variant_of
from weighin.formats.pretrained_spec import plain_spec_of
from weighin.formats.selection import WHOLE, Selection

if TYPE_CHECKING:
    import torch

    from weighin.models.pretrained_keys import MappedKeys


def read_with_model_keys(
    source: Path, selection: Selection = WHOLE, choice: FolderChoice = AS_SAVED
) -> Slices:
    """Return the tensors of a folder, or of a GGUF file, under the names of the model's state dict, in its order.

    Stacked and joined tensors consist of several blocks of the files. A tied name that the files lack
    gets the tensor of the name that it is tied to. ``selection`` is the part of the folder's
    checkpoint that holds the weights.

    Raises:
        ConfigError: the source is not in a Hugging Face folder, transformers is missing, or the
            folder's code is not trusted.
        CheckpointError: the files do not hold the values of a tensor of the model, or hold codes.
    """
    if is_pipeline(source):
        raise sniff.no_model(source)
    if formats.detect(source) is gguf:
        return _of_gguf(gguf.file_of(source))
    if not is_pretrained(folder := folder_of(source)):
        raise ConfigError(
            f"--keys model needs the model's class, and {folder} has no config.json",
            "name a folder that save_pretrained wrote, or leave --keys out",
        )
    from weighin.models.pretrained_keys import map_keys
    from weighin.models.skeleton import build_skeleton, resolve_builder

    found = read_folder(folder, replace(choice, variant=variant_of(source)))
    builder = resolve_builder(found.library.builder)
    model = build_skeleton(builder, plain_spec_of(found, selection).kwargs)
    mapped = map_keys(model, formats.read(source, selection)[1])
    return _in_order(source, model, mapped)


def _of_gguf(file: Path) -> Slices:
    from weighin.models.gguf_keys import map_gguf_keys
    from weighin.models.gguf_spec import spec_of
    from weighin.models.pretrained import from_config
    from weighin.models.skeleton import build_skeleton

    model = build_skeleton(from_config, spec_of(file).kwargs)
    return _in_order(file, model, map_gguf_keys(model, formats.read(file)[1]))


def _in_order(source: Path, model: "torch.nn.Module", mapped: "MappedKeys") -> Slices:
    """Return the tensors in the order of the model's state dict, with its tied names."""
    mapped.refuse_other_shapes(model, source)
    wanted = model.state_dict(keep_vars=True)
    stored = {one.name: one for one in mapped.slices}
    by_tensor = {id(wanted[name]): one for name, one in stored.items()}
    sources = {
        name: stored.get(name) or by_tensor.get(id(tensor)) for name, tensor in wanted.items()
    }
    if missing := sorted(name for name, one in sources.items() if one is None):
        raise CheckpointError(
            f"{source}: holds no values to copy for {first_names(missing)}: transformers computes"
            " them while it loads, or would draw them at random",
            "save the loaded model: torch.save(load_pretrained(FOLDER).state_dict(), 'model.pt')",
        )
    return Slices(replace(one, name=name) for name, one in sources.items() if one is not None)
