"""Load a Hugging Face folder as ``from_pretrained`` does, through weighin's loader."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weighin import formats
from weighin.errors import CheckpointError
from weighin.formats import adapters, gguf, sniff
from weighin.formats.hub_cache import cached_snapshot, path_of
from weighin.formats.pipeline import is_pipeline
from weighin.formats.pretrained_choice import FolderChoice
from weighin.formats.pretrained_folder import CONFIG, find_weights, is_pretrained, read_folder
from weighin.formats.pretrained_library import TRANSFORMERS
from weighin.formats.pretrained_spec import auto_dtype, plain_spec_of
from weighin.formats.selection import Selection
from weighin.loader.load import load_streaming
from weighin.models.pretrained_modules import module_of
from weighin.models.skeleton import construct

_log = logging.getLogger("weighin")


def load_pretrained(
    folder: Path | str,
    *,
    dtype: torch.dtype | str | None = "auto",
    device: torch.device | str = "cpu",
    threads: int | None = None,
    trust_remote_code: bool = False,
    variant: str = "",
    model_class: str = "",
    revision: str = "",
    key: str = "",
    strip_prefix: str = "",
) -> Any:
    """Return the model that ``AutoModel....from_pretrained(folder, dtype=dtype)`` returns.

    The folder may also be a part of a pipeline of diffusers, such as ``FOLDER/unet``, or a folder of
    timm: the model is the one that ``from_pretrained`` of diffusers or ``create_model`` of timm
    returns. The model is equal in every parameter and buffer, in dtypes, tied weights and evaluation
    mode. The load needs memory for one copy of the weights, and no network. Codes of fp8, MXFP4 and
    compressed-tensors are dequantised, as with ``dequantize=True``.

    Args:
        folder: a folder that ``save_pretrained`` wrote, or the id of a model in the local cache.
        dtype: "auto" and None take the dtype of ``config.json``; a model of diffusers or timm has float32.
        threads: the number of threads that read, as for ``load_streaming``.
        trust_remote_code: whether to run the model's code, if it comes with the folder.
        variant: the variant of the weights: "fp16" for ``model.fp16.safetensors``.
        model_class: the class of transformers to load, such as "BertModel" or "AutoModelForCausalLM".
            Empty for the class that ``config.json`` names, or else that of ``AutoModel``.
        revision: the branch, tag or commit of a model in the local cache; empty for "main".
        key: the key of the state dict, if the folder's weights are a training checkpoint, as for
            ``load_streaming``.
        strip_prefix: a prefix of the names in the file that the model's names lack: "module.".

    Raises:
        CheckpointError: the folder is unreadable, lacks weights of its model, is quantised by another
            method, or has an adapter beside it that from_pretrained adds.
        ConfigError: the model's library is missing, has no such class, or the folder brings code that
            is not trusted.
    """
    path = path_of(Path(folder), revision)
    if not path.exists():
        path = cached_snapshot(str(folder), revision) or path
    if is_pipeline(path):
        raise sniff.no_model(path)
    if find_weights(path, variant) is None and gguf.matches(path):
        raise CheckpointError(
            f"{path}: a GGUF file, which load_pretrained does not dequantise",
            f"let transformers load it: from_pretrained(FOLDER, gguf_file={gguf.file_of(path).name!r})",
        )
    if not is_pretrained(path):
        if broken := sniff.broken_link(path / CONFIG):
            raise broken
        formats.detect(path)  # names what is no checkpoint at all
        raise CheckpointError(
            f"{path}: not a Hugging Face folder: it has no config.json",
            "give a folder that model.save_pretrained(FOLDER) wrote",
        )
    found = read_folder(path, FolderChoice(variant, model_class, revision, trust_remote_code))
    selection = Selection(key, strip_prefix)
    spec = plain_spec_of(found, selection)
    if note := adapters.note(path):
        _log.warning(note)
    wanted = auto_dtype(found, selection) if dtype in (None, "auto") else dtype
    kind = getattr(torch, wanted) if isinstance(wanted, str) else wanted
    library, settings = module_of(found.library.builder), spec.kwargs["config"]
    if found.library is TRANSFORMERS:
        settings = {**settings, "_name_or_path": str(folder)}
    build = partial(library.from_config, **spec.kwargs | {"config": settings})
    model: Any = load_streaming(
        lambda: construct(build, kind),
        found.checkpoint,
        device=device,
        threads=threads,
        key=key,
        strip_prefix=strip_prefix,
    )
    library.finish(model, type(folder)(path))
    return model
