"""Load a Hugging Face folder as its library does, with one copy of the weights in memory.

transformers, diffusers, timm, sentence-transformers and peft decide what the model is; see
``reading`` for how transformers gets the bytes. diffusers and sentence-transformers map a file, and
their mapped weights are copied at the end. timm copies mapped weights into a model that was built without
weights.
"""

import logging
import mmap
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from weighin import install
from weighin.errors import CheckpointError, ConfigError
from weighin.models.description import chosen_class, described_gguf
from weighin.models.pretrained import arguments_to_dequantise, merged, pretrained_class, says
from weighin.stream import foreign, formats, quantised, sentence_parts
from weighin.stream import gguf_files as gguf
from weighin.stream.bytes import mapped
from weighin.stream.construct import construct, without_weights
from weighin.stream.foreign import lacks, misfit, no_model
from weighin.stream.pipeline import is_pipeline
from weighin.stream.pretrained_folder import (
    CONFIG,
    PretrainedFolder,
    adapter_note,
    auto_class,
    cached_snapshot,
    digest,
    dtype_of,
    find_weights,
    from_pretrained_arguments,
    is_pretrained,
    path_of,
    read_folder,
    refuse_adapter,
)
from weighin.stream.pretrained_library import DIFFUSERS, TIMM, FolderChoice, Selection
from weighin.stream.reading import Load, reading
from weighin.stream.slices import Slice
from weighin.text import first_names, one_line, plain

_log = logging.getLogger("weighin")

_REPAIR: Final = (
    "install another version of transformers (the folder was written with the transformers_version in"
    " config.json), or correct config.json"
)


class _Wanted(NamedTuple):
    """The dtype of the model, or None for its own, its device, and the number of reading threads."""

    dtype: torch.dtype | str | None
    device: torch.device
    threads: int | None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype for a library that builds models in float32."""
        kind = self.dtype or torch.float32
        named: torch.dtype = getattr(torch, kind) if isinstance(kind, str) else kind
        return named


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
        adapter: a folder with an adapter that peft saved. The result is that of
            ``PeftModel.from_pretrained(model, adapter).merge_and_unload()``.

    Raises:
        CheckpointError: the folder is unreadable, lacks weights of the model, or is quantised by a
            method not named above; the library or peft fails; or ``adapter`` is empty, and the folder
            contains an adapter that from_pretrained would add.
        ConfigError: a package is missing or has no such class; the folder contains code, and
            ``trust_remote_code`` is false; or the kind of ``folder`` does not allow an argument.
    """
    path = path_of(Path(folder), revision)
    if not path.exists():
        path = cached_snapshot(str(folder), revision) or path
    if is_pipeline(path):
        raise no_model(path)
    wanted = _Wanted(None if dtype == "auto" else dtype, torch.device(device), threads)
    selection = Selection(key, strip_prefix)
    if find_weights(path, variant) is None and gguf.matches(path):
        if selection or variant or trust_remote_code:
            raise ConfigError(
                f"{path}: a GGUF file holds only the weights of one model, so that key and strip_prefix"
                " have nothing to select, and variant and trust_remote_code no meaning",
                "leave them out: they choose the model in a folder or in a training checkpoint",
            )
        return _with_adapter(_of_gguf(gguf.file_of(path), model_class, wanted), adapter)
    is_bare = bool(model_class or adapter)  # the transformer alone
    if sentence_parts.matches(path) or (sentence_parts.has_more_parts(path) and not is_bare):
        if selection or variant or is_bare or trust_remote_code:
            names = sentence_parts.own_folders(path)
            raise ConfigError(
                f"{path}: a sentence-transformers folder of several parts, with weights in"
                f" {', '.join(names)}: for such a folder, load_pretrained accepts only the"
                " arguments dtype, device, threads and revision",
                f"give the folder of one part: {path / names[0]}",
            )
        return _of_sentences(path, wanted)
    if not is_pretrained(path):
        if broken := foreign.broken_link(path / CONFIG):
            raise broken
        formats.detect(path)  # raises a more exact error for a path that is no checkpoint
        raise CheckpointError(
            f"{path}: not a Hugging Face folder: it has no config.json",
            "give a folder that model.save_pretrained(FOLDER) wrote",
        )
    found = read_folder(path, FolderChoice(variant, model_class, revision, trust_remote_code))
    if found.library is TIMM:
        return _of_timm(found, type(folder)(path), selection, wanted)
    if found.library is DIFFUSERS:
        return _of_diffusers(found, selection, wanted)
    model = _of_transformers(found, selection, wanted, merges=bool(adapter))
    if not Path(folder).exists():  # the id of a model of the Hub
        model.config._name_or_path = model.name_or_path = str(folder)
    return _with_adapter(model, adapter)


def _with_adapter(model: Any, adapter: Path | str) -> Any:
    if not adapter:
        return model
    with reading(Load((), None)):  # for glibc's limit
        return merged(model, adapter)


def _of_transformers(
    found: PretrainedFolder, selection: Selection, wanted: _Wanted, *, merges: bool
) -> Any:
    path, checkpoint = found.path, found.checkpoint
    dtype_of(found.config)  # raises for a dtype that transformers cannot read
    if not merges:
        refuse_adapter(path)
        if note := adapter_note(path):
            _log.warning(note)
    slices = formats.read(checkpoint, selection)
    codes = quantised.of_folder(path, found.config, slices)
    if codes and not codes.dequantises:
        raise codes.error(path)
    name, in_code = chosen_class(found)
    if in_code:
        auto_class(found.config, name)  # raises ConfigError if there is no code of this class
    code = {"folder": str(path.absolute()), "sha256": digest(path)} if in_code else None
    kind = pretrained_class(name, code, found.config)
    load = Load(slices, wanted.threads, ignores_adapter=True)
    try:
        arguments = from_pretrained_arguments(checkpoint) | arguments_to_dequantise(checkpoint)
        model = _called(kind, arguments, load, checkpoint, wanted)
    except (ConfigError, ImportError) as error:
        if codes is None:
            raise
        raise ConfigError(
            f"{path}: the model is {codes.summary}; from_pretrained fails: {one_line(str(error))}",
            "install the packages that transformers names, or correct quantization_config in config.json",
        ) from error
    unexpected = {name for info in load.infos for name in info.unexpected_keys}
    _check_codes(model, checkpoint, slices, unexpected, codes)
    method = quantised.method_of(path, found.config)
    if method and codes is None and any(info.missing_keys for info in load.infos):
        raise CheckpointError(
            f"{checkpoint}: quantised with {method}, as config.json says, which transformers does not"
            " have: it finds codes, and no weights",
            "load the model with the library that quantised it",
        )
    _check_complete(model, checkpoint, load)
    return model


def _called(
    kind: Any, arguments: Mapping[str, Any], load: Load, checkpoint: Path, wanted: _Wanted
) -> Any:
    """Call ``from_pretrained``, and turn any of its errors into ours, with transformers' own words."""
    device = wanted.device
    places = {} if device.type == "cpu" else {"device_map": {"": device}}
    called = f"{checkpoint}: {kind.__name__}.from_pretrained"
    try:
        with says(called, _REPAIR), reading(load):
            return kind.from_pretrained(**arguments, dtype=wanted.dtype or "auto", **places)
    except ImportError as error:
        raise ConfigError(
            f"{kind.__name__}.from_pretrained fails: {one_line(str(error))}",
            "install the package that transformers names",
        ) from error
    except CheckpointError as error:
        info = load.infos[-1] if load.infos else None
        if info and info.mismatched_keys:
            names = sorted(plain(str(name)) for name, *_ in info.mismatched_keys)
            raise misfit(checkpoint, kind.__name__, {"of another shape": names}) from error
        if info and info.conversion_errors:
            name, text = next(iter(info.conversion_errors.items()))
            said = one_line(text.partition("\nError")[0].splitlines()[-1])
            raise CheckpointError(
                f"{called} fails: it cannot convert {plain(name)}: {said}", _REPAIR
            ) from error
        raise


def _check_complete(model: Any, checkpoint: Path, load: Load) -> None:
    """Raise CheckpointError if the library has given weights random values."""
    buffers = dict(model.named_buffers())
    missing = sorted(name for info in load.infos for name in info.missing_keys - buffers.keys())
    if missing:
        raise lacks(checkpoint, missing, type(model).__name__)


def _check_codes(
    model: Any,
    checkpoint: Path,
    slices: Sequence[Slice],
    unexpected: set[str],
    found: quantised.Quantised | None,
) -> None:
    """Raise CheckpointError if transformers has taken quantised codes for weights.

    ``unexpected`` are the keys that transformers left out. Integers or 8-bit floats count as codes if
    the model has another float dtype, and a key of the same module, the scale, was left out.
    """
    if not unexpected:
        return
    if found and (
        left := [
            name
            for name, (_, scales) in quantised.find_codes(slices).items()
            if scales in unexpected
        ]
    ):
        raise CheckpointError(
            f"{checkpoint}: {found.summary}; quantization_config in config.json does not describe"
            f" {first_names(left)}",
            "copy 'quantization_config' from the config.json that the quantising library wrote"
            " beside the weights",
        )
    scales = {name.rpartition(".")[0]: name for name in unexpected}
    tensors = model.state_dict()
    for one in slices:
        scale = scales.get(one.name.rpartition(".")[0])
        target = tensors.get(one.name, tensors.get(f"{model.base_model_prefix}.{one.name}"))
        is_code = one.dtype.itemsize == 1 or not one.dtype.is_floating_point
        if scale is None or target is None or not is_code or one.dtype is torch.bool:
            continue
        if not one.dtype.is_complex and target.is_floating_point():
            raise CheckpointError(
                f"{checkpoint}: {plain(one.name)} is {one.dtype_name} in the file, but the model has no"
                f" {plain(scale)}: the values are quantised codes, which mean nothing without this"
                " scale",
                "load the model with the library that quantised the weights",
            )


def _of_gguf(file: Path, model_class: str, wanted: _Wanted) -> Any:
    kind = pretrained_class(model_class or described_gguf(file)["architecture"])
    load = Load(gguf.read(file), wanted.threads, ignores_adapter=True)
    model = _called(kind, from_pretrained_arguments(file), load, file, wanted)
    _check_complete(model, file, load)
    return model


def _of_diffusers(found: PretrainedFolder, selection: Selection, wanted: _Wanted) -> Any:
    from weighin.models import pretrained_diffusers  # few loads need this import

    if selection:
        raise ConfigError(
            f"{found.path}: key and strip_prefix select weights only for a model of transformers or timm",
            "leave them out",
        )
    name, file = str(found.library.class_in(found.config)), found.checkpoint
    kwargs = {"architecture": name, "config": found.config}
    with reading(Load((), wanted.threads)):
        model, missing = pretrained_diffusers.reference(kwargs, file, wanted.torch_dtype)
    if missing:
        raise lacks(file, missing, type(model).__name__)
    return own(model, formats.files(file)).to(wanted.device).eval()


def _of_timm(
    found: PretrainedFolder, home: Path | str, selection: Selection, wanted: _Wanted
) -> Any:
    from weighin.models.pretrained_timm import model_and_load  # few loads need this import

    loads = []

    def build() -> torch.nn.Module:
        model, load = model_and_load(str(found.library.class_in(found.config)), found.config)
        loads.append(load)
        return model

    slices = formats.read(found.checkpoint, selection)
    model: Any = without_weights(partial(construct, build, wanted.torch_dtype), real_buffers="all")
    maps: dict[Path, mmap.mmap] = {}
    loads[-1]({one.name: mapped(one, maps) for one in slices}, found.checkpoint)
    model.pretrained_cfg["file"] = str(home)
    del model.keeps_dtypes
    return model.to(wanted.device)


def _of_sentences(folder: Path, wanted: _Wanted) -> Any:
    """Return the model that ``SentenceTransformer(folder, device=device)`` returns.

    The dtype goes to the package's ``model_kwargs``; None chooses the package's own default.
    """
    files, parts = (
        sentence_parts.read(folder, formats.read).files,
        sentence_parts.own_folders(folder),
    )
    names = ", ".join(parts)
    what = f"{folder}: a sentence-transformers folder of several parts, with weights in {names},"
    try:
        import sentence_transformers as package
    except ImportError as error:
        raise ConfigError(
            f"{what} needs the package sentence-transformers, which cannot be imported: {error}",
            install.command("sentence-transformers"),
        ) from None
    options: dict[str, Any] = {"model_kwargs": {"dtype": wanted.dtype}} if wanted.dtype else {}
    load = Load((), wanted.threads)
    call = f"{what} is a model that sentence-transformers {package.__version__} cannot load: it"
    with says(call, f"give the folder of one part: {folder / parts[0]}"), reading(load):
        model = package.SentenceTransformer(
            str(folder), device=str(wanted.device), local_files_only=True, **options
        )
    _check_complete(model, folder, load)
    return own(model, files)


def own(model: Any, files: Sequence[Path]) -> Any:
    """Copy the weights of ``model`` that lie in mappings of ``files`` to memory, one after the other."""
    numbers = {str(file.stat().st_ino) for file in files}
    ranges = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)  # range, permissions, offset, device, inode, path
        if fields[4] in numbers:
            ranges.append(tuple(int(end, 16) for end in fields[0].split("-")))
    copies: dict[tuple[int, torch.Size, tuple[int, ...]], torch.Tensor] = {}
    for tensor in [*model.parameters(), *model.buffers()]:
        if any(first <= tensor.data_ptr() < last for first, last in ranges):
            place = tensor.data_ptr(), tensor.shape, tensor.stride()
            if place not in copies:
                copies[place] = tensor.data.clone()
            tensor.data = copies[place]
    return model
