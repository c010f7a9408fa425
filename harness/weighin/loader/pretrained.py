"""Load a Hugging Face folder as ``from_pretrained`` does, through weighin's loader."""

import contextlib
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weighin.errors import CheckpointError
from weighin.formats import gguf
from weighin.formats.pretrained_folder import (
    cached_snapshot,
    find_weights,
    is_pretrained,
    read_folder,
)
from weighin.formats.pretrained_spec import auto_dtype, spec_of
from weighin.loader.load import load_streaming
from weighin.models.pretrained import from_config
from weighin.models.skeleton import construct


def load_pretrained(
    folder: Path | str,
    *,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    threads: int | None = None,
    trust_remote_code: bool = False,
) -> Any:
    """Return the model that ``AutoModel....from_pretrained(folder, dtype=dtype)`` returns.

    The model is equal in every parameter and buffer, in dtypes, tied weights and evaluation mode.
    The load needs memory for one copy of the weights, and no network.

    Args:
        folder: a folder that ``save_pretrained`` wrote, or the id of a model in the local cache.
        dtype: "auto" takes the dtype of ``config.json``.
        threads: the number of threads that read, as for ``load_streaming``.
        trust_remote_code: whether to run the model's code, if it comes with the folder.

    Raises:
        CheckpointError: the folder is unreadable, or lacks weights of its model.
        ConfigError: transformers is missing, has no such class, or the folder brings code that is not
            trusted.
    """
    path = Path(folder).expanduser()
    if not path.exists():
        path = cached_snapshot(str(folder)) or path
    if find_weights(path) is None and gguf.matches(path):
        raise CheckpointError(
            f"{path}: a GGUF file, which load_pretrained does not dequantise",
            f"let transformers load it: from_pretrained(FOLDER, gguf_file={gguf.file_of(path).name!r})",
        )
    if not is_pretrained(path):
        raise CheckpointError(
            f"{path}: not a Hugging Face folder: it has no config.json",
            "give a folder that model.save_pretrained(FOLDER) wrote",
        )
    found = read_folder(path, trust_remote_code=trust_remote_code)
    wanted = auto_dtype(found) if dtype == "auto" else dtype
    kind = getattr(torch, wanted) if isinstance(wanted, str) else wanted
    build = partial(from_config, **spec_of(found).kwargs)
    model: Any = load_streaming(
        lambda: construct(build, kind), found.checkpoint, device=device, threads=threads
    )
    for parameter in model.parameters():  # from_pretrained's parameters require gradients
        parameter.requires_grad_(parameter.is_floating_point())
    if model.can_generate():
        from transformers import GenerationConfig

        with contextlib.suppress(OSError):  # not every folder has a generation_config.json
            model.generation_config = GenerationConfig.from_pretrained(path)
    return model
