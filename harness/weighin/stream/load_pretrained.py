"""Load a Hugging Face folder as its library does, with one copy of the weights in memory.

The libraries decide what the model is; see ``reading`` for how transformers gets the bytes. diffusers
and sentence-transformers map a file, and their mapped weights are copied at the end.
"""

import logging
import mmap
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch.nn.parameter import is_lazy

from weighin.errors import CheckpointError, ConfigError, HarnessError, extra
from weighin.models import pretrained, pretrained_diffusers, pretrained_timm
from weighin.models.description import chosen_class, described_gguf
from weighin.stream import foreign, formats, hugging_face_folder, quantised
from weighin.stream import gguf_files as gguf
from weighin.stream import pretrained_library as libraries
from weighin.stream.bytes import mapped
from weighin.stream.construct import construct, without_weights
from weighin.stream.hugging_face_folder import PretrainedFolder
from weighin.stream.slices import Slice
from weighin.stream.transformers_reader import Load, reading
from weighin.text import plain

_log = logging.getLogger("weighin")

_OF_PARTS: Final = "a sentence-transformers folder of several parts"
_USED: Final = {
    "a GGUF file": ("model_class", "revision", "adapter"),
    _OF_PARTS: ("revision",),
    "a folder of diffusers": ("variant", "revision"),
    "a folder of timm": ("variant", "revision", "key", "strip_prefix"),
}
"""The arguments that apply to a kind of folder, beside ``dtype``, ``device`` and ``threads``."""


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

    The load is the library's own, with one copy of the weights in memory, and uses no network. It is
    refused where the library would give weights random values.

    For a GGUF file, or a folder whose only weights are one GGUF file, the result is the model that
    ``from_pretrained(FOLDER, gguf_file=FILE, dtype=dtype)`` returns, dequantised. A part of a
    diffusers pipeline, such as ``FOLDER/unet``, is loaded as by ``from_pretrained`` of diffusers. A
    folder of timm is loaded as by timm's ``create_model``. A sentence-transformers folder with
    several parts is loaded as by ``SentenceTransformer(folder)``.

    Weights in fp8, mxfp8, MXFP4 and compressed-tensors are dequantised, as with ``dequantize=True``.

    glibc's limit for mapped allocations is 32 MiB after the load, where glibc's own adjustment ends.

    Args:
        folder: a folder that ``save_pretrained`` wrote, a GGUF file, or the id of a model in the local cache.
        dtype: a torch.dtype or its name. "auto" (or None) is the dtype in ``config.json``, but float32
            for models of diffusers, of timm and of GGUF files.
        threads: the number of reading threads, as for ``load_streaming``.
        trust_remote_code: whether to run the model's code, if it comes with the folder.
        variant: the variant of the weights: "fp16" for ``model.fp16.safetensors``.
        model_class: the class of transformers to load, such as "BertModel" or "AutoModelForCausalLM".
            Empty for the class that ``config.json`` names, or else that of ``AutoModel``.
        revision: the branch, tag or commit of a model in the local cache; empty for "main".
        key: the key of the state dict in a training checkpoint, as for ``load_streaming``.
        strip_prefix: a prefix of the file's names that the model's names lack, such as "module.".
        adapter: a folder with an adapter that peft saved. The result is that of
            ``PeftModel.from_pretrained(model, adapter).merge_and_unload()``.

    Raises:
        CheckpointError: the folder is unreadable, lacks weights of the model, or is quantised by a
            method not named above; the library or peft fails; or ``adapter`` is empty, and the folder
            contains an adapter that from_pretrained would add.
        ConfigError: a package is missing or has no such class; the folder contains code, and
            ``trust_remote_code`` is false; or the kind of ``folder`` does not allow an argument.
    """
    path = hugging_face_folder.path_of(folder, revision)
    if not path.exists():  # says what the Hub's cache has instead
        path = hugging_face_folder.cached_snapshot(str(folder), revision) or path
    if (path / libraries.PIPELINE).is_file():
        raise foreign.no_model(path)
    given = {
        "variant": variant, "model_class": model_class, "revision": revision, "key": key,
        "strip_prefix": strip_prefix, "adapter": adapter, "trust_remote_code": trust_remote_code,
    }  # fmt: skip

    def check_used(what: str) -> None:
        if ignored := [name for name, one in given.items() if one and name not in _USED[what]]:
            part = ", or give the folder of one part" * (what == _OF_PARTS)
            raise ConfigError(
                f"{path}: {what}, for which load_pretrained has no {' and no '.join(ignored)}",
                f"leave out {' and '.join(ignored)}{part}",
            )

    kind = None if dtype == "auto" else dtype
    place = torch.device(device)
    options: dict[str, Any] = {"dtype": kind or "auto"}
    if place.type != "cpu":
        options["device_map"] = {"": place}
    selection = libraries.Selection(key, strip_prefix)
    if hugging_face_folder.find_weights(path, variant) is None and gguf.matches(path):
        check_used("a GGUF file")
        file = gguf.file_of(path)
        named = model_class or described_gguf(file)["architecture"]
        load = Load(gguf.read(file), threads, ignores_adapter=True)
        return _loaded({"architecture": named, libraries.ARGUMENT: adapter}, file, load, options)
    has_config = hugging_face_folder.is_pretrained(path)
    is_one_part = has_config and bool(model_class or adapter)  # the transformer alone
    if not is_one_part and (parts := hugging_face_folder.parts_with_weights(path)):
        check_used(_OF_PARTS)
        return _of_sentences(path, parts, kind, place, threads)
    if not has_config:
        if broken := foreign.broken_link(path / hugging_face_folder.CONFIG):
            raise broken
        formats.detect(path)  # raises a more exact error for a path that is no checkpoint
        raise CheckpointError(
            f"{path}: not a Hugging Face folder: it has no config.json",
            "give a folder that model.save_pretrained(FOLDER) wrote",
        )
    choice = libraries.FolderChoice(variant, model_class, revision, trust_remote_code)
    found = hugging_face_folder.read_folder(path, choice)
    if found.library in (libraries.DIFFUSERS, libraries.TIMM):
        check_used(f"a folder of {found.library.name}")
        wanted = getattr(torch, kind) if isinstance(kind, str) else kind or torch.float32
        if found.library is libraries.DIFFUSERS:
            made = {"architecture": found.library.class_in(found.config), "config": found.config}
            with reading(Load((), threads)):
                pipeline, missing = pretrained_diffusers.reference(made, found.checkpoint, wanted)
            _refuse_drawn(pipeline, found.checkpoint, missing)
            return own(pipeline).to(place).eval()
        model = _of_timm(found, selection, wanted).to(place)
        model.pretrained_cfg["file"] = str(type(folder)(path))
        return model
    model = _of_transformers(
        found, formats.read(found.checkpoint, selection), adapter, threads, options
    )
    if not Path(folder).exists():  # the id of a model of the Hub
        model.config._name_or_path = model.name_or_path = str(folder)
    return model


def _loaded(kwargs: dict[str, Any], checkpoint: Path, load: Load, options: dict[str, Any]) -> Any:
    """Return the model that transformers loads; refuse it if weights are drawn at random."""
    with reading(load):
        model, missing = pretrained.reference(kwargs, checkpoint, **options)
    _refuse_drawn(model, checkpoint, missing)
    return model


def _refuse_drawn(model: torch.nn.Module, checkpoint: Path, missing: Iterable[str]) -> None:
    """Raise CheckpointError if ``missing`` has more than buffers, which the model computes."""
    buffers = dict(model.named_buffers())
    if drawn := [name for name in missing if name not in buffers]:
        raise foreign.lacks(checkpoint, drawn, type(model).__name__)


def _of_transformers(
    found: PretrainedFolder,
    slices: Sequence[Slice],
    adapter: Path | str,
    threads: int | None,
    options: dict[str, Any],
) -> Any:
    load = Load(slices, threads, ignores_adapter=True)
    hugging_face_folder.dtype_of(found.config)  # raises for a dtype that transformers cannot read
    if not adapter:
        hugging_face_folder.refuse_adapter(found.path)
        if note := hugging_face_folder.adapter_note(found.path):
            _log.warning(note)
    codes = quantised.of_folder(found.path, found.config, slices)
    if codes and not codes.dequantises:
        raise codes.error(found.path)
    name, code = chosen_class(found)
    kwargs: dict[str, Any] = {"architecture": name, "config": found.config, "code": code}
    kwargs |= {libraries.ARGUMENT: adapter}
    try:
        model = _loaded(kwargs, found.checkpoint, load, options)
    except HarnessError as error:
        if codes:
            error.message += f"; the model is {codes.summary}"
        raise
    _check_codes(model, found.checkpoint, slices, load)
    return model


def _check_codes(model: Any, checkpoint: Path, slices: Sequence[Slice], load: Load) -> None:
    """Raise CheckpointError if transformers took codes (integers or 8-bit floats) for weights, and left out a scale."""
    scales = {name.rpartition(".")[0]: name for name in sorted(load.unexpected)}
    tensors = model.state_dict() if scales else {}
    for one in slices if scales else ():
        scale = scales.get(one.name.rpartition(".")[0])
        target = tensors.get(one.name, tensors.get(f"{model.base_model_prefix}.{one.name}"))
        is_code = one.dtype.itemsize == 1 or not (
            one.dtype.is_floating_point or one.dtype.is_complex
        )
        if scale is None or target is None or not is_code or one.dtype is torch.bool:
            continue
        if target.is_floating_point():
            raise CheckpointError(
                f"{checkpoint}: {plain(one.name)} is {one.dtype_name} in the file, but the model has no"
                f" {plain(scale)}: these are quantised values, which mean nothing without this"
                " scale",
                "load the model with the library that quantised the weights, or copy its"
                " 'quantization_config' into config.json",
            )


def _of_timm(found: PretrainedFolder, selection: libraries.Selection, dtype: torch.dtype) -> Any:
    loads = []

    def build() -> torch.nn.Module:
        architecture = str(found.library.class_in(found.config))
        model, load = pretrained_timm.model_and_load(architecture, found.config)
        loads.append(load)
        return model

    slices = formats.read(found.checkpoint, selection)
    model: Any = without_weights(partial(construct, build, dtype), real_buffers="all")
    maps: dict[Path, mmap.mmap] = {}
    loads[-1]({one.name: mapped(one, maps) for one in slices}, found.checkpoint)
    del model.keeps_dtypes
    return model


def _of_sentences(
    folder: Path,
    parts: Sequence[str],
    dtype: torch.dtype | str | None,
    device: torch.device,
    threads: int | None,
) -> Any:
    """Return ``SentenceTransformer(folder, device=device)``; without a dtype, in its own."""
    what = f"{folder}: {_OF_PARTS}, with weights in {', '.join(parts)}"
    with extra("sentence-transformers", f"{what},"):
        from sentence_transformers import SentenceTransformer
    options: dict[str, Any] = {"model_kwargs": {"dtype": dtype}} if dtype else {}
    load = Load((), threads)
    repair = f"give the folder of one part: {folder / parts[0]}"
    with pretrained.says(f"{what}: SentenceTransformer", repair), reading(load):
        model = SentenceTransformer(
            str(folder), device=str(device), local_files_only=True, **options
        )
    _refuse_drawn(model, folder, sorted(load.missing))
    return own(model)


def own(model: Any) -> Any:
    """Copy the weights of ``model`` that lie in mappings of files to memory, one after the other."""
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)  # range, permissions, offset, device, inode, path
        if fields[4] != "0" and fields[1] != "rw-s":  # shared memory stays shared
            ranges.append(tuple(int(end, 16) for end in fields[0].split("-")))
    copies: dict[tuple[int, torch.Size, tuple[int, ...]], torch.Tensor] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        has_memory = tensor.is_cpu and tensor.layout is torch.strided and not is_lazy(tensor)
        if has_memory and any(first <= tensor.data_ptr() < last for first, last in ranges):
            place = tensor.data_ptr(), tensor.shape, tensor.stride()
            if place not in copies:
                copies[place] = tensor.data.clone()
            tensor.data = copies[place]
    return model
