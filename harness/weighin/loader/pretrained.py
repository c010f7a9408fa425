"""Load a Hugging Face folder as ``from_pretrained`` does, through weighin's loader."""

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weighin.errors import CheckpointError
from weighin.formats import sniff
from weighin.formats.hub_cache import cached_snapshot, path_of
from weighin.formats.pretrained_choice import FolderChoice
from weighin.formats.pretrained_folder import CONFIG, is_pretrained, read_folder
from weighin.formats.pretrained_spec import auto_dtype, spec_of
from weighin.loader.load import load_streaming
from weighin.models.after_load import finish_load
from weighin.models.pretrained import from_config
from weighin.models.skeleton import construct


def load_pretrained(
    folder: Path | str,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    threads: int | None = None,
    trust_remote_code: bool = False,
    variant: str = "",
    model_class: str = "",
    revision: str = "",
) -> Any:
    """Return the model that ``AutoModel....from_pretrained(folder, dtype=dtype)`` returns.

    The model is equal in every parameter and buffer, in dtypes, tied weights and evaluation mode.
    The load needs memory for one copy of the weights, and no network.

    Args:
        folder: a folder that ``save_pretrained`` wrote, or the id of a model in the local cache.
        dtype: "auto" takes the dtype of ``config.json``.
        threads: the number of threads that read, as for ``load_streaming``.
        trust_remote_code: whether to run the model's code, if it comes with the folder.
        variant: the variant of the weights: "fp16" for ``model.fp16.safetensors``.
        model_class: the class of transformers to load, such as "BertModel" or "AutoModelForCausalLM".
            Empty for the class that ``config.json`` names, or else that of ``AutoModel``.
        revision: the branch, tag or commit of a model in the local cache; empty for "main".

    Raises:
        CheckpointError: the folder is unreadable, or lacks weights of its model.
        ConfigError: transformers is missing, has no such class, or the folder brings code that is not
            trusted.
    """
    path = path_of(Path(folder), revision)
    if not path.exists():
        path = cached_snapshot(str(folder), revision) or path
    if not is_pretrained(path):
        raise sniff.broken_link(path / CONFIG) or CheckpointError(
            f"{path}: not a Hugging Face folder: it has no config.json",
            "give a folder that model.save_pretrained(FOLDER) wrote",
        )
    found = read_folder(path, FolderChoice(variant, model_class, revision, trust_remote_code))
    wanted = auto_dtype(found) if dtype == "auto" else dtype
    kind = getattr(torch, wanted) if isinstance(wanted, str) else wanted
    build = partial(from_config, **spec_of(found).kwargs)
    model: Any = load_streaming(
        lambda: construct(build, kind), found.checkpoint, device=device, threads=threads
    )
    finish_load(model)
    for parameter in model.parameters():  # from_pretrained's parameters require gradients
        parameter.requires_grad_(parameter.is_floating_point())
    if model.can_generate():
        from transformers import GenerationConfig

        with contextlib.suppress(OSError):  # not every folder has a generation_config.json
            model.generation_config = GenerationConfig.from_pretrained(path)
    return model
