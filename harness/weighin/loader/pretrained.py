"""Load a Hugging Face folder as ``from_pretrained`` does, through weighin's loader."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from weighin.errors import CheckpointError
from weighin.formats import sniff
from weighin.formats.pipeline import is_pipeline
from weighin.formats.pretrained_folder import cached_snapshot, is_pretrained, read_folder
from weighin.formats.pretrained_spec import auto_dtype, spec_of
from weighin.loader.load import load_streaming
from weighin.models.pretrained_modules import module_of
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

    The folder may also be a part of a pipeline of diffusers, such as ``FOLDER/unet``, or a folder of
    timm: the model is the one that ``from_pretrained`` of diffusers or ``create_model`` of timm
    returns. The model is equal in every parameter and buffer, in dtypes, tied weights and evaluation
    mode. The load needs memory for one copy of the weights, and no network.

    Args:
        folder: a folder that ``save_pretrained`` wrote, or the id of a model in the local cache.
        dtype: "auto" takes the dtype of ``config.json``; a model of diffusers or timm has float32.
        threads: the number of threads that read, as for ``load_streaming``.
        trust_remote_code: whether to run the model's code, if it comes with the folder.

    Raises:
        CheckpointError: the folder is unreadable, or lacks weights of its model.
        ConfigError: the model's library is missing, has no such class, or the folder brings code that
            is not trusted.
    """
    path = Path(folder).expanduser()
    if not path.exists():
        path = cached_snapshot(str(folder)) or path
    if is_pipeline(path):
        raise sniff.no_model(path)
    if not is_pretrained(path):
        raise CheckpointError(
            f"{path}: not a Hugging Face folder: it has no config.json",
            "give a folder that model.save_pretrained(FOLDER) wrote",
        )
    found = read_folder(path, trust_remote_code=trust_remote_code)
    wanted = auto_dtype(found) if dtype == "auto" else dtype
    kind = getattr(torch, wanted) if isinstance(wanted, str) else wanted
    library = module_of(found.library.builder)
    build = partial(library.from_config, **spec_of(found).kwargs)
    model: Any = load_streaming(
        lambda: construct(build, kind), found.checkpoint, device=device, threads=threads
    )
    library.finish(model, path)
    return model
