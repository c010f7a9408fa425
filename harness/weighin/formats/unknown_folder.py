"""Compose the error for a folder without a model or checkpoint; file names tell what it is."""

import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from weighin.errors import CheckpointError
from weighin.files import MIB, object_in
from weighin.formats import pipeline
from weighin.formats.pretrained_library import ADAPTER, WEIGHTS
from weighin.formats.unknown_file import broken_link
from weighin.stream.zero import named_step
from weighin.text import few, one_line

_MOST_SHOWN: Final = 100
_CONFIG: Final = "config.json"
_VARIANT: Final = re.compile(r"\w*model\.(\w+)(-\d+-of-\d+)?(\.safetensors|\.bin)")
_SHARD: Final = re.compile(r"(\w*model)-\d+-of-\d+(\.safetensors|\.bin)")
_MEGATRON: Final = re.compile(r"mp_rank_\d+(_\d+){,2}")
_OTHER_FRAMEWORKS: Final = (
    ".onnx", ".h5", ".keras", ".msgpack", ".ocdbt", ".tflite", ".ot", ".index", ".pb",
)  # fmt: skip


def no_model(folder: Path) -> CheckpointError:
    """Return the error for a folder that is neither a model nor a checkpoint.

    The message names the kind of folder, and the repair (advice) names the path to give instead.
    """
    names = sorted(entry.name for entry in folder.iterdir())
    for name in names:
        if (name == _CONFIG or name.endswith((*WEIGHTS, ".index.json"))) and (
            broken := broken_link(folder / name)
        ):
            return broken
    if pipeline.is_pipeline(folder) and (found := pipeline.read(folder)).models:
        return found.refused()
    what, repair = next(_recognised(folder, names))
    return CheckpointError(f"{folder}: {what}", repair)


def models_below(folder: Path) -> list[str]:
    """Return the names of a folder's direct subfolders that contain files of weights."""
    return [name for name in sorted(_names(folder)) if _weights(_names(folder / name))]


def _recognised(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield descriptions of the folder, each with a repair (advice); the first description applies."""
    if not names:
        yield "an empty folder", "give a checkpoint file, or the folder of a model"
    if ADAPTER in names:
        yield _adapter(folder, names)
    if step := named_step(folder):
        yield _training_run(folder, *step)
    if ranks := [name for name in names if _MEGATRON.fullmatch(name)]:
        yield _megatron(folder, ranks)
    if pipeline.INDEX in names:
        yield "a diffusers pipeline without weights", "give the folder that has the weights, too"
    if "modules.json" in names and _CONFIG not in names:
        if files := _weights(names):
            what = "a sentence-transformers folder without a transformer"
            yield what, f"give the file: {folder / files[0]}"
        yield "a sentence-transformers folder without weights", "copy the whole folder"
    if "plan.json" in names:
        what = "the folder of a run of weighin, not a model"
        yield what, f"show its results: weighin report {folder}"
    yield from _of_weights(folder, names)
    if _CONFIG in names:
        yield (
            "has config.json but no weights: neither model.safetensors, nor pytorch_model.bin, nor an"
            " index of one of them",
            "add the weights, or save the model there: model.save_pretrained(FOLDER)",
        )
    if models := models_below(folder):
        yield (
            f"no config.json, but folders with models: {one_line(few(models))}",
            f"give one of them: {folder / models[0]}",
        )
    yield (
        "not a checkpoint: no config.json, no index and no weights in it",
        "give the checkpoint file itself, or a folder that save_pretrained or `weighin convert` made",
    )


def _of_weights(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield descriptions of a folder with files of weights, each with a repair."""
    if variants := [match for name in names if (match := _VARIANT.fullmatch(name))]:
        variant = variants[0][1]
        yield (
            f"only {variant} variants of the weights: {one_line(few([match[0] for match in variants]))}",
            f"name the variant: --variant {variant} (in Python: variant={variant!r})",
        )
    shard = next((match for name in names if (match := _SHARD.fullmatch(name))), None)
    if shard or any(name.endswith(".distcp") for name in names):
        index = f"{shard[1]}{shard[2]}.index.json" if shard else ".metadata"
        yield f"shards without their index {index}", f"add the index: {folder / index}"
    if files := _weights(names):
        lacks = "no index" if _CONFIG in names else "no config.json and no index"
        what = f"{lacks} beside {one_line(few(files))}"
        yield what, f"give the file itself: {folder / files[0]}"
    if others := [name for name in names if name.endswith(_OTHER_FRAMEWORKS)]:
        yield (
            f"weights of another framework than PyTorch: {one_line(few(others))}",
            "load the model into PyTorch, and save it: model.save_pretrained(FOLDER)",
        )


def _adapter(folder: Path, names: Sequence[str]) -> tuple[str, str]:
    base = object_in(folder / ADAPTER, MIB).get("base_model_name_or_path")
    shown_base = one_line(str(base), _MOST_SHOWN) if base else "a model that it does not name"
    repair = "merge it into its base, and give the merged model's folder: merge_and_unload() of peft, then save_pretrained(FOLDER)"
    if weights := _weights(names):
        repair += f"; for the adapter alone: {folder / weights[0]}"
    return f"an adapter of {shown_base}, not a whole model", repair


def _training_run(folder: Path, tag: Path, inner: Path) -> tuple[str, str]:
    if not inner.is_dir():
        return (
            f"{tag.name} names the step {inner.name}, which is not here",
            "copy that folder too, or give the folder of another step",
        )
    return (
        f"its weights are in a step of a training run: {inner.name}",
        f"write them beside config.json: weighin convert {inner} {folder / 'model.safetensors'}",
    )


def _megatron(folder: Path, ranks: Sequence[str]) -> tuple[str, str]:
    """Describe a step of Megatron-LM, whose files do not say along which dimension tensors are divided."""
    file = folder / ranks[0] / "model_optim_rng.pt"
    merged = (
        "merge the ranks with Megatron-LM: python tools/checkpoint/convert.py --model-type GPT"
        " --loader core --saver core --target-tensor-parallel-size 1 --target-pipeline-parallel-size 1"
        " --load-dir RUN --save-dir MERGED"
    )
    if len(ranks) == 1:
        what = "a step of Megatron-LM with the file of one rank, which may have a part of the model"
        return what, f"if the run had one rank, give its file: {file} --key model; if not, {merged}"
    what = f"a step of Megatron-LM, divided among {len(ranks)} ranks ({ranks[0]} to {ranks[-1]})"
    return what, merged


def _weights(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.endswith(WEIGHTS)]


def _names(folder: Path) -> list[str]:
    """Return the names in a folder; none for a file, or for a folder that this user cannot read."""
    with suppress(OSError):
        return [entry.name for entry in folder.iterdir()]
    return []
