"""Load a Hugging Face folder as ``from_pretrained`` does, with weighin's loader."""

import logging
from functools import partial
from pathlib import Path
from typing import Any

import torch

from weighin import formats
from weighin.construction.skeleton import construct
from weighin.errors import CheckpointError, ConfigError
from weighin.formats import foreign, gguf, sentence_parts
from weighin.formats.foreign import no_model
from weighin.formats.hub_cache import cached_snapshot, path_of
from weighin.formats.pipeline import is_pipeline
from weighin.formats.pretrained_folder import (
    CONFIG,
    adapter_note,
    find_weights,
    is_pretrained,
    read_folder,
)
from weighin.formats.pretrained_library import TRANSFORMERS, FolderChoice
from weighin.formats.selection import Selection
from weighin.loader.load import load_streaming
from weighin.models.description import auto_dtype, described_gguf, plain_spec_of
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
    """Return the model that ``from_pretrained(folder, dtype=dtype)`` of the model's library returns.

    The result equals the library's model in all parameters, buffers, dtypes and tied weights, and is in
    evaluation mode. The load needs memory for one copy of the weights, and no network.

    For a GGUF file, or a folder whose only weights are one GGUF file, the result is the model that
    ``from_pretrained(FOLDER, gguf_file=FILE, dtype=dtype)`` returns, dequantised. A part of a
    diffusers pipeline, such as ``FOLDER/unet``, is loaded as by ``from_pretrained`` of diffusers. A
    folder of timm is loaded as by timm's ``create_model``. A sentence-transformers folder with
    several parts is loaded as by ``SentenceTransformer(folder)``.

    Weights in fp8, MXFP4 and compressed-tensors are dequantised, as with ``dequantize=True``. Weights of
    bitsandbytes, GPTQ and AWQ are also dequantised, without the packages of these methods.

    Args:
        folder: a folder that ``save_pretrained`` wrote, a GGUF file, or the id of a model in the local cache.
        dtype: "auto" and None mean the dtype in ``config.json``, or float32 for a model of diffusers, of
            timm, or of a GGUF file.
        threads: the number of reading threads, as for ``load_streaming``.
        trust_remote_code: whether to run the model's code, if it comes with the folder.
        variant: the variant of the weights: "fp16" for ``model.fp16.safetensors``.
        model_class: the class of transformers to load, such as "BertModel" or "AutoModelForCausalLM".
            Empty for the class that ``config.json`` names, or else that of ``AutoModel``.
        revision: the branch, tag or commit of a model in the local cache; empty for "main".
        key: the key of the state dict in a training checkpoint, as for ``load_streaming``.
        strip_prefix: a prefix of the file's names that the model's names lack, such as "module.".
        adapter: a folder with a LoRA adapter that peft saved. The load adds the adapter to the weights.
            The result has the same bits as that of ``PeftModel.from_pretrained(model, adapter)
            .merge_and_unload()``. The load also needs float32 memory for the largest product of two
            of the adapter's matrices, and for these two matrices.

    Raises:
        CheckpointError: the folder is unreadable, lacks weights of the model, or is quantised by a
            method not named above; ``adapter`` is empty, and the folder contains an adapter that
            from_pretrained would add; or ``adapter`` is not plain LoRA for this model.
        ConfigError: the model's library is missing or has no such class; the folder contains code, and
            ``trust_remote_code`` is false; or the kind of ``folder`` does not allow an argument.
    """
    path = path_of(Path(folder), revision)
    if not path.exists():
        path = cached_snapshot(str(folder), revision) or path
    if is_pipeline(path):
        raise no_model(path)
    is_auto = dtype in (None, "auto")
    if find_weights(path, variant) is None and gguf.matches(path):
        if key or strip_prefix:
            raise ConfigError(
                f"{path}: a GGUF file holds only the weights of one model, so that key and"
                " strip_prefix have nothing to select",
                "leave key and strip_prefix out: they choose the model in a training checkpoint",
            )
        from weighin.models import pretrained  # imports transformers

        library, home, checkpoint = pretrained, None, gguf.file_of(path)
        kwargs = described_gguf(checkpoint)
        settings = {**kwargs["config"], "_name_or_path": str(checkpoint.parent)}
        kwargs["architecture"] = model_class or kwargs["architecture"]
        wanted: Any = settings["dtype"] if is_auto else dtype
    elif sentence_parts.matches(path):
        if variant or model_class or key or strip_prefix or adapter or trust_remote_code:
            names = sentence_parts.own_folders(path)
            raise ConfigError(
                f"{path}: a sentence-transformers folder of several parts, with weights in"
                f" {', '.join(names)}: for such a folder, load_pretrained accepts only the"
                " arguments dtype, device, threads and revision",
                f"give the folder of one part: {path / names[0]}",
            )
        from weighin.loader.sentence import load_whole  # few loads need this import

        return load_whole(path, load_pretrained, dtype=dtype, device=device, threads=threads)
    else:
        if not is_pretrained(path):
            if broken := foreign.broken_link(path / CONFIG):
                raise broken
            formats.detect(path)  # raises a more exact error for a path that is no checkpoint
            raise CheckpointError(
                f"{path}: not a Hugging Face folder: it has no config.json",
                "give a folder that model.save_pretrained(FOLDER) wrote",
            )
        found = read_folder(path, FolderChoice(variant, model_class, revision, trust_remote_code))
        selection = Selection(key, strip_prefix)
        kwargs = plain_spec_of(found, selection, merges=bool(adapter)).kwargs
        if not adapter and (note := adapter_note(path)):
            _log.warning(note)
        wanted = auto_dtype(found, selection) if is_auto else dtype
        library, home = module_of(found.library.builder), type(folder)(path)
        settings, checkpoint = kwargs["config"], found.checkpoint
        if found.library is TRANSFORMERS:
            settings = {**settings, "_name_or_path": str(folder)}
    kind = getattr(torch, wanted) if isinstance(wanted, str) else wanted
    build = partial(library.from_config, **kwargs | {"config": settings})
    model: Any = load_streaming(
        lambda: construct(build, kind),
        checkpoint,
        device=device,
        threads=threads,
        key=key,
        strip_prefix=strip_prefix,
    )
    library.finish(model, home)
    if adapter:
        from weighin.loader.merge import merge_adapter  # few loads need this import

        merge_adapter(model, Path(adapter))
    return model
