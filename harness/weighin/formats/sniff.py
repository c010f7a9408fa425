"""Tell what a path is that cannot be loaded: by a file's first bytes, or by the names in a folder.

The module also shortens names for messages.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from weighin.errors import CheckpointError
from weighin.foreign import MIB, json_in, object_in
from weighin.formats import pipeline
from weighin.formats.heads import read_head
from weighin.formats.pretrained_library import WEIGHTS
from weighin.formats.recognise import Recognised, by_content
from weighin.formats.training_step import named_step
from weighin.text import few, one_line

AGAIN: Final = "copy or download the file again"
"""The repair for a file that ends early. No other fault of a file proves that its copy is at fault."""

RESAVE: Final = (
    "save it again with the program that wrote it; if that program cannot read it either, the file is"
    " damaged"
)
"""The repair for a file that breaks the rules of its format as weighin knows them."""

SHARDS: Final = "save the checkpoint in several files, as model.save_pretrained(FOLDER) does"
"""The repair for a file that exceeds a limit of weighin."""

HUB_ENTRY: Final = "models--"
"""The beginning of the name of a model's folder in the Hub's cache: "models--owner--name"."""

_MOST_SHOWN: Final = 100
_MOST_BITS: Final = 256  # of an integer that is shown
_PATH_STARTS: Final = ("./", "../", "/", "~")
_PATH_ENDS: Final = (
    "/", ".gguf", ".gz", ".h5", ".json", ".msgpack", ".npz", ".onnx", ".pkl", ".pt2", ".py", ".tar", ".zip",
    *WEIGHTS,
)  # fmt: skip
_VARIANT: Final = re.compile(r"\w*model\.(\w+)(-\d+-of-\d+)?(\.safetensors|\.bin)")
_SHARD: Final = re.compile(r"(\w*model)-\d+-of-\d+(\.safetensors|\.bin)")
_OTHER_FRAMEWORKS: Final = (
    ".onnx", ".h5", ".keras", ".msgpack", ".ocdbt", ".tflite", ".ot", ".index", ".pb",
)  # fmt: skip


def looks_like_path(text: str) -> bool:
    """Tell whether a text can only be a path, because it begins or ends like one.

    "checkpoints/mine" is a path if there is a folder "checkpoints"; otherwise it is an id of the Hub.
    """
    if text.startswith(_PATH_STARTS) or text.endswith(_PATH_ENDS) or text in (".", ".."):
        return True
    return text.count("/") > 1 or ("/" in text and Path(text).parent.is_dir())


def missing(path: Path | str) -> CheckpointError:
    """Return the error for a path that does not exist."""
    return broken_link(Path(path)) or CheckpointError(
        f"{path}: no such file or folder", "check the path"
    )


def broken_link(path: Path) -> CheckpointError | None:
    """Return the error for a symbolic link to a file that does not exist; None for another path."""
    try:
        if path.exists():
            return None
        target = path.readlink()
    except (OSError, ValueError):  # no link, or not a valid file name
        return None
    what = f"{path}: a broken symbolic link to {one_line(str(target))}, which does not exist"
    if target.parent.name == "blobs" and (name := hub_id(path.parent)):
        return CheckpointError(
            f"{what}: this file of {name} was removed from the cache", f"hf download {name}"
        )
    return CheckpointError(what, "restore the file, or correct the link")


def hub_id(snapshot: Path) -> str:
    """Return the id of the model whose snapshot in the Hub's cache a folder is; else ""."""
    snapshots, entry = snapshot.parent, snapshot.parent.parent.name
    if snapshots.name == "snapshots" and entry.startswith(HUB_ENTRY):
        return entry.removeprefix(HUB_ENTRY).replace("--", "/")
    return ""


def check_present(path: Path) -> bytes:
    """Return the first bytes of a file that may be a checkpoint.

    Raises:
        CheckpointError: the path does not exist, is not a regular file or cannot be read, or the file
            is empty, a git-lfs pointer, a web page or another kind of file.
    """
    if not path.exists():
        raise missing(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: not a file", "give the checkpoint file itself")
    try:
        head = read_head(path)
    except OSError as error:
        raise unreadable(path, error) from error
    _check_fetched(path, head)
    if path.suffix == ".py":
        raise CheckpointError(
            f"{path}: a Python file, not a checkpoint",
            f"name the function in it that builds the model: --model {path}:FUNCTION",
        )
    if recognised := by_content(path, head):
        what, repair = recognised
        raise CheckpointError(f"{path}: {what}", repair)
    return head


def _check_fetched(path: Path, head: bytes) -> None:
    """Raise CheckpointError for a file in whose place something else was fetched, or nothing."""
    if not head:
        raise CheckpointError(f"{path}: empty file", AGAIN)
    if head.startswith(b"version https://git-lfs.github.com/spec/"):
        raise CheckpointError(
            f"{path}: a git-lfs pointer, not the checkpoint that it points to",
            f"fetch the file itself: git lfs pull --include {path.name}",
        )
    if head.lstrip().lower().startswith((b"<!doctype html", b"<html")):
        raise CheckpointError(
            f"{path}: an HTML page, not a checkpoint",
            "the download link led to a web page: use the link to the file itself",
        )


def not_json(path: Path, text: bytes, fault: str, repair: str) -> CheckpointError:
    """Return the error for a file whose text is not JSON; ``fault`` and ``repair`` are of the parser.

    Raises:
        CheckpointError: something else was fetched in place of the file, or the text ends early.
    """
    _check_fetched(path, text)
    if text.lstrip().startswith(b"{") and not text.rstrip().endswith(b"}"):
        return CheckpointError(f"{path}: truncated: the JSON object has no end", AGAIN)
    return CheckpointError(f"{path}: {fault}", repair)


def unreadable(path: Path | str, error: OSError) -> CheckpointError:
    """Return the error for a file that the operating system does not read."""
    return CheckpointError(
        f"{path}: cannot be read: {error.strerror}",
        "check that the file exists, that you may read it, and that its disk works",
    )


def unknown(path: Path, head: bytes) -> CheckpointError:
    """Return the error for a file of an unknown kind, by its first bytes."""
    return CheckpointError(
        f"{path}: of a kind that weighin does not know; its first bytes are {head[:8].hex(' ')}",
        "save the weights with torch.save or safetensors, with the program that wrote the file",
    )


def first_bytes(path: Path) -> bytes:
    """Return the first bytes of a file; the result is empty if the file cannot be read."""
    if not path.is_file():  # opening a pipe would block
        return b""
    try:
        return read_head(path)
    except OSError:
        return b""


def no_model(folder: Path) -> CheckpointError:
    """Return the error for a folder that is neither a model nor a checkpoint.

    The message says what lies in the folder, and the repair says what to give instead.
    """
    names = sorted(entry.name for entry in folder.iterdir())
    for name in names:
        if (name == "config.json" or name.endswith((*WEIGHTS, ".index.json"))) and (
            broken := broken_link(folder / name)
        ):
            return broken
    if pipeline.is_pipeline(folder) and (found := pipeline.read(folder)).models:
        return found.refused()
    for recognise in _RECOGNISERS:
        if recognised := recognise(folder, names):
            what, repair = recognised
            return CheckpointError(f"{folder}: {what}", repair)
    return CheckpointError(
        f"{folder}: not a checkpoint: no config.json, no index and no weights in it",
        "give the checkpoint file itself, or a folder that save_pretrained or `weighin convert` made",
    )


def _nothing(_: Path, names: Sequence[str]) -> Recognised:
    if names:
        return None
    return "an empty folder", "give a checkpoint file, or the folder of a model"


def _adapter(folder: Path, names: Sequence[str]) -> Recognised:
    if "adapter_config.json" not in names:
        return None
    base = object_in(folder / "adapter_config.json", MIB).get("base_model_name_or_path")
    shown_base = one_line(str(base), _MOST_SHOWN) if base else "a model that it does not name"
    repair = "merge it into its base, and give the merged model's folder: merge_and_unload() of peft, then save_pretrained(FOLDER)"
    if weights := _weights(names):
        repair += f"; for the adapter alone: {folder / weights[0]}"
    return f"an adapter of {shown_base}, not a whole model", repair


def _training_run(folder: Path, _: Sequence[str]) -> Recognised:
    if not (step := named_step(folder)):
        return None
    tag, inner = step
    if not inner.is_dir():
        return (
            f"{tag.name} names the step {inner.name}, which is not here",
            "copy that folder too, or give the folder of another step",
        )
    return (
        f"its weights are in a step of a training run: {inner.name}",
        f"write them beside config.json: weighin convert {inner} {folder / 'model.safetensors'}",
    )


def _empty_pipeline(_: Path, names: Sequence[str]) -> Recognised:
    if pipeline.INDEX not in names:
        return None
    return "a diffusers pipeline without weights", "give the folder that has the weights, too"


def sentence_parts(folder: Path) -> list[str]:
    """Return the parts of a sentence-transformers folder that lie in folders with weights of their own.

    ``modules.json`` lists all parts; the transformer often lies in the folder itself.
    """
    content = json_in(folder / "modules.json", MIB)
    listed = (
        [one.get("path") for one in content if isinstance(one, dict)]
        if isinstance(content, list)
        else []
    )
    inner = set(_models_below(folder, _names(folder)))
    return [name for name in listed if isinstance(name, str) and name in inner]


def _sentence_transformers(folder: Path, names: Sequence[str]) -> Recognised:
    if "modules.json" not in names or "config.json" in names:
        return None
    if files := _weights(names):
        return (
            "a sentence-transformers folder without a transformer",
            f"give the file: {folder / files[0]}",
        )
    return "a sentence-transformers folder without weights", "copy the whole folder"


def _variants(_: Path, names: Sequence[str]) -> Recognised:
    matches = [match for name in names if (match := _VARIANT.fullmatch(name))]
    if not matches:
        return None
    return (
        f"only {matches[0][1]} variants of the weights: {one_line(few([match[0] for match in matches]))}",
        f"name the variant: --variant {matches[0][1]} (in Python: variant={matches[0][1]!r})",
    )


def _shards(folder: Path, names: Sequence[str]) -> Recognised:
    match = next((match for name in names if (match := _SHARD.fullmatch(name))), None)
    index = f"{match[1]}{match[2]}.index.json" if match else ".metadata"
    if match is None and not any(name.endswith(".distcp") for name in names):
        return None
    return f"shards without their index {index}", f"add the index: {folder / index}"


def _files(folder: Path, names: Sequence[str]) -> Recognised:
    files = _weights(names)
    if not files:
        return None
    lacks = "no index" if "config.json" in names else "no config.json and no index"
    return f"{lacks} beside {one_line(few(files))}", f"give the file itself: {folder / files[0]}"


def _other_frameworks(_: Path, names: Sequence[str]) -> Recognised:
    files = [name for name in names if name.endswith(_OTHER_FRAMEWORKS)]
    if not files:
        return None
    return (
        f"weights of another framework than PyTorch: {one_line(few(files))}",
        "load the model into PyTorch, and save it: model.save_pretrained(FOLDER)",
    )


def _run(folder: Path, names: Sequence[str]) -> Recognised:
    if "plan.json" not in names:
        return None
    return (
        "the folder of a run of weighin, not a model",
        f"show its results: weighin report {folder}",
    )


def _only_config(_: Path, names: Sequence[str]) -> Recognised:
    if "config.json" not in names:
        return None
    return (
        "has config.json but no weights: neither model.safetensors, nor pytorch_model.bin, nor an"
        " index of one of them",
        "add the weights, or save the model there: model.save_pretrained(FOLDER)",
    )


def _folders(folder: Path, names: Sequence[str]) -> Recognised:
    models = _models_below(folder, names)
    if not models:
        return None
    return (
        f"no config.json, but folders with models: {one_line(few(models))}",
        f"give one of them: {folder / models[0]}",
    )


_RECOGNISERS: Final[Sequence[Callable[[Path, Sequence[str]], Recognised]]] = (
    _nothing,
    _adapter,
    _training_run,
    _empty_pipeline,
    _sentence_transformers,
    _run,
    _variants,
    _shards,
    _files,
    _other_frameworks,
    _only_config,
    _folders,
)
"""Each returns what a folder is and the next step, or None. The first that recognises it, decides."""


def _weights(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.endswith(WEIGHTS)]


def _models_below(folder: Path, names: Sequence[str]) -> list[str]:
    """Return the names of the folders in a folder that have weights in them."""
    folders = [folder / name for name in names if (folder / name).is_dir()]
    return [inner.name for inner in folders if _weights(_names(inner))]


def _names(folder: Path) -> list[str]:
    """Return the names in a folder; empty if this user must not read the folder."""
    with suppress(OSError):
        return [entry.name for entry in folder.iterdir()]
    return []


def shown(name: object) -> str:
    """Return a tensor's name for a message: quoted, and cut if it is very long."""
    if isinstance(name, str | bytes) and len(name) > _MOST_SHOWN:
        return f"{name[:_MOST_SHOWN]!r}... ({len(name):,} characters)"
    if isinstance(name, int) and name.bit_length() > _MOST_BITS:  # Python may refuse to print it
        return f"an integer of {name.bit_length():,} bits"
    return repr(name)


def short(value: object) -> str:
    """Return a value for a message, cut if its text is long."""
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
