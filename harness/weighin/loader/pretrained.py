"""Load a Hugging Face folder as ``from_pretrained`` does, through weighin's loader."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weighin import formats
from weighin.construction.skeleton import construct
from weighin.errors import CheckpointError, ConfigError
from weighin.formats import adapters, gguf, sentence_parts, unknown_file
from weighin.formats.hub_cache import cached_snapshot, path_of
from weighin.formats.pipeline import is_pipeline
from weighin.formats.pretrained_choice import FolderChoice
from weighin.formats.pretrained_folder import CONFIG, find_weights, is_pretrained, read_folder
from weighin.formats.pretrained_library import TRANSFORMERS
from weighin.formats.pretrained_spec import auto_dtype, plain_spec_of
from weighin.formats.selection import Selection
from weighin.formats.unknown_folder import no_model
from weighin.loader.load import load_streaming
from weighin.models.pretrained_modules import module_of

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
    adapter: Path | str = "",
) -> Any:
    """Return the model that ``AutoModel....from_pretrained(folder, dtype=dtype)`` returns.

    The folder may also be a GGUF file, or a folder with one GGUF file and no other weights: the model
    is the one that ``from_pretrained(FOLDER, gguf_file=FILE, dtype=dtype)`` returns, dequantised.
    The folder may also be a part of a pipeline of diffusers, such as ``FOLDER/unet``, or a folder of
    timm: the model is the one that ``from_pretrained`` of diffusers or ``create_model`` of timm
    returns. A sentence-transformers folder whose parts lie in folders of their own is the model that
    ``SentenceTransformer(folder)`` returns. The model is equal in every parameter and buffer, in dtypes, tied weights and evaluation
    mode. The load needs memory for one copy of the weights, and no network. Codes of fp8, MXFP4 and
    compressed-tensors are dequantised, as with ``dequantize=True``. So are those of bitsandbytes, GPTQ
    and AWQ, without the packages of these methods.

    Args:
        folder: a folder that ``save_pretrained`` wrote, a GGUF file, or the id of a model in the local cache.
        dtype: "auto" and None take the dtype of ``config.json``; a model of diffusers or timm, or of a
            GGUF file, has float32.
        threads: the number of threads that read, as for ``load_streaming``.
        trust_remote_code: whether to run the model's code, if it comes with the folder.
        variant: the variant of the weights: "fp16" for ``model.fp16.safetensors``.
        model_class: the class of transformers to load, such as "BertModel" or "AutoModelForCausalLM".
            Empty for the class that ``config.json`` names, or else that of ``AutoModel``.
        revision: the branch, tag or commit of a model in the local cache; empty for "main".
        key: the key of the state dict, if the folder's weights are a training checkpoint, as for
            ``load_streaming``.
        strip_prefix: a prefix of the names in the file that the model's names lack: "module.".
        adapter: a folder with an adapter of LoRA, which peft saved. Its products are added to the
            weights, which then equal those of ``PeftModel.from_pretrained(model, adapter)
            .merge_and_unload()`` bit by bit. Beside the model, the load needs memory for the
            largest product of two matrices of the adapter.

    Raises:
        CheckpointError: the folder is unreadable, lacks weights of its model, is quantised by another
            method, has an adapter beside it that from_pretrained adds and ``adapter`` does not name, or
            the adapter is not plain LoRA for this model.
        ConfigError: the model's library is missing, has no such class, or the folder brings code that
            is not trusted.
    """
    path = path_of(Path(folder), revision)
    if not path.exists():
        path = cached_snapshot(str(folder), revision) or path
    if is_pipeline(path):
        raise no_model(path)
    if find_weights(path, variant) is None and gguf.matches(path):
        if key or strip_prefix:
            raise ConfigError(
                f"{path}: a GGUF file, which holds one model under llama.cpp's names",
                "leave key and strip_prefix out: they choose a part of a training checkpoint",
            )
        return _merged(_load_gguf(gguf.file_of(path), dtype, device, threads, model_class), adapter)
    if sentence_parts.matches(path):
        if variant or model_class or key or strip_prefix or adapter or trust_remote_code:
            names = sentence_parts.own_folders(path)
            raise ConfigError(
                f"{path}: a sentence-transformers folder of several parts, with weights in"
                f" {', '.join(names)}: only dtype, device, threads and revision apply to it",
                f"give one part: {path / names[0]}",
            )
        from weighin.loader.sentence import load_whole  # few loads need this import

        return load_whole(path, load_pretrained, dtype=dtype, device=device, threads=threads)
    if not is_pretrained(path):
        if broken := unknown_file.broken_link(path / CONFIG):
            raise broken
        formats.detect(path)  # names what is no checkpoint at all
        raise CheckpointError(
            f"{path}: not a Hugging Face folder: it has no config.json",
            "give a folder that model.save_pretrained(FOLDER) wrote",
        )
    found = read_folder(path, FolderChoice(variant, model_class, revision, trust_remote_code))
    selection = Selection(key, strip_prefix)
    spec = plain_spec_of(found, selection, merges=bool(adapter))
    if not adapter and (note := adapters.note(path)):
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
    return _merged(model, adapter)


def _merged(model: Any, adapter: Path | str) -> Any:
    if adapter:
        from weighin.loader.merge import merge_adapter  # few loads need this import

        merge_adapter(model, Path(adapter))
    return model


def _load_gguf(
    file: Path,
    dtype: torch.dtype | str | None,
    device: torch.device | str,
    threads: int | None,
    model_class: str,
) -> Any:
    """Return the model that ``from_pretrained`` makes of a GGUF file, dequantised."""
    from weighin.models import gguf_spec, pretrained  # imports transformers

    arguments = gguf_spec.described(file)
    settings = arguments["config"]
    wanted = settings["dtype"] if dtype in (None, "auto") else dtype
    kind = getattr(torch, wanted) if isinstance(wanted, str) else wanted
    build = partial(
        pretrained.from_config,
        architecture=model_class or arguments["architecture"],
        config={**settings, "_name_or_path": str(file.parent)},
    )
    model: Any = load_streaming(
        lambda: construct(build, kind), file, device=device, threads=threads
    )
    pretrained.finish(model, None)
    return model
