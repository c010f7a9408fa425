"""Say what a path is if it is no checkpoint that weighin reads, and what to do: errors with a repair.

A row of the tables has a pattern, what a file or folder with this pattern is, and the repair: the step
from there to a checkpoint. Patterns are of a file's first bytes, or of a list of names, one a line. The
module also reads a file's first bytes, by which readers recognise their files, and the JSON of others.
"""

import errno
import json
import re
import time
from codecs import getincrementaldecoder
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any, Final, TypeVar

from weighin.errors import CheckpointError
from weighin.files import MIB, object_in, read_bytes
from weighin.stream import pipeline
from weighin.stream.pretrained_library import ADAPTER, WEIGHTS
from weighin.text import few, first_names, one_line, shown

AGAIN: Final = "copy or download the file again"
"""The advice for a file that ends too early. Other faults do not prove that a copy is cut off."""
RESAVE: Final = (
    "save it again with the program that wrote it; if that program cannot read it either, the file is"
    " damaged"
)
"""The advice for a file that breaks a rule of its format."""
SHARDS: Final = "save the checkpoint in several files, as model.save_pretrained(FOLDER) does"
"""The repair for a file with more tensors, or a longer zip directory, than weighin reads."""
NOT_MEASURED: Final = (
    "its loads cannot be measured; weighin inspect, convert and load_streaming read it as it is"
)
HUB_ENTRY: Final = "models--"
"""The beginning of the name of a model's folder in the Hub's cache: "models--owner--name"."""
MOST_HEADER_BYTES: Final = 100_000_000
"""The limit of the safetensors format for its header."""
MOST_JSON_BYTES: Final = 16 * MIB
"""The size of the largest JSON file that is read: an index of some 170,000 keys. One byte of JSON text
takes up to 12 bytes of memory as Python objects."""

_LATE_S: Final = 0.002  # a disk that takes so long for the first reads answers late
_FIRST_READS: Final = 3  # the first alone may have been cached
_THREADS: Final = 128  # which read headers at the same time from a disk that answers late
_MOST_BRACKETS: Final = 200_000  # in one JSON file: an empty list takes 80 bytes of memory
_HEAD_BYTES: Final = 512
_HEADER_BYTES: Final = 128 * 1024  # as long as most headers of safetensors files
_LEGACY_MAGIC: Final = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")
_PATHS_END: Final = (
    "/", ".gguf", ".gz", ".h5", ".json", ".msgpack", ".npz", ".onnx", ".pkl", ".pt2", ".py", ".tar", ".zip",
    *WEIGHTS,
)  # fmt: skip


def _saving(value: str, modules: str = "") -> str:
    """Return a repair's command that saves the value of a Python expression; ``p`` is the path."""
    code = f"import sys, {modules}torch; p = sys.argv[1]; torch.save({value}, p + '.new')"
    return f'python -c "{code}" '.replace("{", "{{").replace("}", "}}") + "{file}"


def _packed(program: str) -> tuple[str, str]:
    return f"compressed with {program}", f"unpack it: {program} -dc {{file}} > {{unpacked}}"


_INTO_TORCH: Final = (
    "load it into a PyTorch model with the library that it comes from, and save that model:"
    " torch.save(model.state_dict(), ...)"
)
_COMPILED: Final = "give the weights that it was made from"
_NAMED: Final = "name it: torch.save({{NAME: torch.from_numpy(numpy.load(FILE))}}, ...)"
_UNPACK: Final = "unpack it, and give the checkpoint in it: "
_WAIT: Final = "wait until the program that writes it has ended; if none does, a copy was not finished: make it again"
_PACKED: Final = (".gz", ".bz2", ".xz", ".zst", ".lz4")
_TRUSTED: Final = "if you trust it, write its weights: "
_PICKLE: Final = (
    "a pickle that torch.save did not write, and was NOT executed",
    "if you trust the file, load it with the program that wrote it, and save its tensors:"
    " torch.save({{NAME: TENSOR, ...}}, ...)",
)
_TENSORFLOW: Final = ("a part of a TensorFlow checkpoint or SavedModel", _INTO_TORCH)

_TABLE: Final = (
    ("name", r"\.py$", "a Python file, not a checkpoint",
     "name the function in this file that builds the model: --model {path}:FUNCTION"),
    ("name", r"\.distcp$", "a data file of torch.distributed.checkpoint", "give its folder: {folder}"),
    ("name", r"\.(index|meta|data-\d{5}-of-\d{5})$", *_TENSORFLOW),
    ("head", r"\Aversion https://git-lfs\.github\.com/spec/",
     "a git-lfs pointer (a small text file that stands for the real file), not the checkpoint",
     "fetch the checkpoint: git lfs pull --include {name}"),
    ("head", r"\A\s*<(?i:!doctype html|html)", "an HTML page, not a checkpoint",
     "download the checkpoint again with the file's own link: the used link leads to a web page"),
    ("head", r"\A\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras and TensorFlow write them", _INTO_TORCH),
    ("head", r"\A\x93NUMPY", "one NumPy array (.npy), without a tensor's name", _NAMED),
    ("head", r"\A(?:lmgg|fmgg|tjgg|algg)", "a file of llama.cpp from before GGUF", _COMPILED),
    ("head", r"\A.{4}TFL3", "a TensorFlow Lite model", _COMPILED),
    ("head", r"\A.{4}ET12", "an ExecuTorch program", _COMPILED),
    ("head", r"\Aftrt", "a TensorRT engine", _COMPILED),
    ("head", r"\A\x7fELF", "a compiled program or library", _COMPILED),
    ("head", r"\A\x12\x01\0{6}", "parameters of MXNet", _INTO_TORCH),
    ("head", r"\A\0+\Z", "begins with zeros, as a file whose bytes are not written yet", _WAIT),
    ("head", r"\A\x1f\x8b", *_packed("gzip")),
    ("head", r"\ABZh", *_packed("bzip2")),
    ("head", r"\A\xfd7zXZ\0", *_packed("xz")),
    ("head", r"\A\x28\xb5\x2f\xfd", *_packed("zstd")),
    ("head", r"\A\x04\x22\x4d\x18", *_packed("lz4")),
    ("head", r"\Aage-encryption\.org/", "encrypted with age",
     "decrypt it: age -d -o {decrypted} {file}"),
    ("head", r"\ASalted__", "encrypted with openssl",
     "decrypt it: openssl enc -d -CIPHER -in {file} -out {decrypted}"),
    ("head", r"\A-----BEGIN PGP MESSAGE-----", "encrypted with GnuPG",
     "decrypt it: gpg -o {decrypted} -d {file}"),
    ("head", r"\A7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK + "7z x {file}"),
    ("head", r"\ARar!\x1a\x07", "a rar archive", _UNPACK + "unrar x {file}"),
    ("head", r"\A(?=.{257}ustar)(?:\./)?(?:sys_info|pickle|tensors|storages)\0",
     "in the tar format of torch 0.1",
     "if you trust the file, save it again: " + _saving("torch.load(p, weights_only=False)")),
    ("head", r"\A.{257}ustar", "a tar archive", _UNPACK + "tar xf {file}"),
    ("head", r"\A\x08\x01\x12", *_TENSORFLOW),
    ("head", r"\A\x80[\2-\5]", *_PICKLE),
    ("head", r"\A(?:\([dl]p\d+\n|c[\w.]+\n\w+\n(?:p\d+\n|q)|[}\]]q\0)", *_PICKLE),  # protocols 0 and 1
    ("head", r"\A\x08[\x03-\x1f][\x12\x1a\x22\x2a\x32\x3a\x42]", "an ONNX model", _COMPILED),
    ("head", r"\A(?:[\x81-\x8f]|\xde..|\xdf....)(?:[\xa1-\xbf]|\xd9.)[\w./]",
     "a msgpack file, as flax writes them", _INTO_TORCH),
    ("records", r"^[^/\n]*/(?:constants|bytecode)\.pkl$", "a TorchScript program, not only weights",
     _TRUSTED + _saving("torch.jit.load(p, 'cpu').state_dict()")),
    ("records", r"^(?:[^/\n]*/)?(?:models/model\.json|serialized_exported_program\.json)$",
     "an exported program (torch.export), not only weights",
     _TRUSTED + _saving("dict(torch.export.load(p).state_dict)")),
    ("records", r"^[^/\n]*/archive_format$", "a compiled model (AOTInductor)", _COMPILED),
    ("records", r"^[^/\n]*/\.data/extern_modules$", "a package of code and weights (torch.package)",
     "if you trust its code, load the model with torch.package.PackageImporter, and save its"
     " weights: torch.save(model.state_dict(), ...)"),
    ("records", r"\A(?:[^\n]*\.npy(?:\n|\Z))+\Z", "arrays of NumPy (.npz)", "write them as tensors: "
     + _saving("{k: torch.from_numpy(v) for k, v in numpy.load(p).items()}", "numpy, ")),
    ("records", r"^[^/\n]*/\.data/serialization_id$",
     "a file of torch.save without data.pkl, as when torch.save is interrupted", "save it again"),
    ("records", r"^model\.weights\.h5$", "a Keras model", _INTO_TORCH),
    ("folder", r"\A\Z", "an empty folder", "give a checkpoint file, or the folder of a model"),
    ("folder", r"^mp_rank_\d+(?:_\d+){,2}$",
     "a step of Megatron-LM, whose ranks hold parts of the model: {found}",
     "merge the ranks with Megatron-LM: python tools/checkpoint/convert.py --model-type GPT --loader"
     " core --saver core --target-tensor-parallel-size 1 --target-pipeline-parallel-size 1"
     " --load-dir RUN --save-dir MERGED; a file of a run of one rank: {path}/{first}/model_optim_rng.pt"
     " --key model"),
    ("folder", rf"^{re.escape(pipeline.INDEX)}$", "a diffusers pipeline without weights",
     "give the folder that has the weights, too"),
    ("folder", r"^plan\.json$", "the folder of a run of weighin, not a model",
     "show its results: weighin report {path}"),
    ("folder", r"^\w*model\.(\w+)(?:-\d+-of-\d+)?\.(?:safetensors|bin)$",
     "only {0} variants of the weights: {found}",
     "name the variant: --set variant={0} (in Python: variant={0!r})"),
    ("folder", r"^(\w*model)-\d+-of-\d+(\.safetensors|\.bin)$",
     "shards without their index {0}{1}.index.json", "add the index: {path}/{0}{1}.index.json"),
    ("folder", r"^.*\.distcp$", "shards without their index .metadata",
     "add the index: {path}/.metadata"),
    ("folder", r"^.*\.(?:safetensors|bin|pt|pth|ckpt)$", "{lacks} beside {found}",
     "give the file itself: {path}/{first}"),
    ("folder", r"^.*\.(?:onnx|h5|keras|msgpack|ocdbt|tflite|ot|index|pb)$",
     "weights of another framework than PyTorch: {found}",
     "load the model into PyTorch, and save it: model.save_pretrained(FOLDER)"),
    ("folder", r"^config\.json$", "has config.json but no weights: neither model.safetensors, nor"
     " pytorch_model.bin, nor an index of one of them",
     "add the weights, or save the model there: model.save_pretrained(FOLDER)"),
)  # fmt: skip
"""What is in the column ``name`` (a file's name), ``head`` (its first bytes, as Latin-1), ``records``
(the names in a zip archive, one a line) or ``folder`` (the names in a folder); what this is; the repair."""

_TAGS: Final = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")
"""Files in a run's folder that name its newest step: two of DeepSpeed, and Megatron-LM's number."""

_known: Final[ContextVar[dict[Hashable, Any] | None]] = ContextVar("known", default=None)

Item = TypeVar("Item")
Value = TypeVar("Value")


# Each file is read once, and several files at the same time


@contextmanager
def remembering() -> Iterator[None]:
    """Keep what ``once`` returns until the context ends; the files must not change until then.

    Several parts of a command read one checkpoint, and a network's storage answers each read late.
    """
    token = _known.set({} if _known.get() is None else _known.get())
    try:
        yield
    finally:
        _known.reset(token)


def once(key: Hashable, read: Callable[[], Value]) -> Value:
    """Return the result of ``read``, or within ``remembering`` an earlier result for this key."""
    known = _known.get()
    if known is None:
        return read()
    if key not in known:
        known[key] = read()
    kept: Value = known[key]
    return kept


def map_late(function: Callable[[Item], Value], items: Iterable[Item]) -> Iterator[Value]:
    """Yield the function's value for each item, for which it reads a header or a file.

    If the disk answers the first reads late, as storage behind a network does, threads do the other
    reads at the same time. The iteration ends at the first error, in the order of the items.
    """
    rest, spent_s = iter(items), 0.0
    for item in islice(rest, _FIRST_READS):
        start_s = time.monotonic()
        value = function(item)
        spent_s += time.monotonic() - start_s
        yield value
        if spent_s >= _LATE_S:
            break
    if spent_s < _LATE_S:
        yield from map(function, rest)
        return
    with ThreadPoolExecutor(_THREADS) as pool:
        # Each thread gets a context, so that ``remembering`` holds in it, too.
        others = [(copy_context(), item) for item in rest]
        yield from pool.map(lambda one: one[0].run(function, one[1]), others)


# What a file is, by its first bytes


def read_start(path: Path) -> bytes:
    """Return the first 512 bytes of a file; of a file NAME.safetensors, the first 128 KiB."""

    def read() -> bytes:
        with path.open("rb", buffering=0) as file:
            size = _HEADER_BYTES if path.suffix == ".safetensors" else _HEAD_BYTES
            return file.read(size) or b""

    return once(path, read)


def first_bytes(path: Path) -> bytes:
    """Return the first 512 bytes of a file; b"" if the file cannot be read."""
    try:  # opening a pipe would block
        return read_start(path)[:_HEAD_BYTES] if path.is_file() else b""
    except OSError:
        return b""


def is_safetensors(head: bytes) -> bool:
    """Tell whether a file begins like a safetensors file: 8 bytes with a length, then "{"."""
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= MOST_HEADER_BYTES


def is_zip(head: bytes) -> bool:
    return head.startswith(b"PK") and not is_safetensors(head)


def is_legacy(head: bytes) -> bool:
    """Tell whether a file begins like a file of torch before 1.6: with a pickled magic number."""
    return _LEGACY_MAGIC in head[:32]


def check_present(path: Path) -> bytes:
    """Return the first bytes of a regular file, if it may be a checkpoint."""
    if not path.exists():
        raise missing(path)
    if not path.is_file():
        raise CheckpointError(f"{path}: not a file", "give the path of the checkpoint's file")
    try:
        head = read_start(path)[:_HEAD_BYTES]
    except OSError as error:
        raise unreadable(path, error) from error
    if not head:
        raise CheckpointError(f"{path}: empty file", AGAIN)
    if found := _by_content(path, head, may_be_text=False):
        raise found
    return head


def _by_content(path: Path, head: bytes, *, may_be_text: bool) -> CheckpointError | None:
    """Return the error for a file of a known other kind, or for a text."""
    if is_safetensors(head) or is_legacy(head):  # the length can equal any magic number
        return None
    found = _recognised("name", path.name, path) or _recognised(
        "head", head.decode("latin-1"), path
    )
    if found or may_be_text:
        return found
    try:
        text = getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut
    except UnicodeDecodeError:
        return None
    if any(letter < " " and letter not in "\t\n\r\f" for letter in text):
        return None
    return CheckpointError(
        f"{path}: a text file, not a checkpoint; it begins with {one_line(text, 60)!r}",
        "give the checkpoint itself; if the text is an answer of a web server, ask it for the file again",
    )


def _recognised(column: str, text: str, path: Path) -> CheckpointError | None:
    """Return the error for ``path`` by the first row of the table whose pattern occurs in ``text``."""
    flags = re.DOTALL | re.ASCII if column == "head" else re.MULTILINE
    for of, pattern, what, repair in _TABLE:
        if of != column or not (found := [*re.finditer(pattern, text, flags)]):
            continue
        unpacked = path.with_suffix("") if path.suffix in _PACKED else f"{path}.unpacked"
        words = {
            "path": path,
            "file": quote(str(path)),
            "name": path.name,
            "folder": path.parent,
            "unpacked": quote(str(unpacked)),
            "decrypted": quote(f"{path}.decrypted"),
            "first": found[0][0],
            "found": one_line(few([one[0] for one in found])),
            "lacks": "no index" if "config.json" in text.split("\n") else "no config.json and no index",
        }  # fmt: skip
        message, advice = (one.format(*found[0].groups(), **words) for one in (what, repair))
        return CheckpointError(f"{path}: {message}", advice)
    return None


def other_zip(path: Path, names: Sequence[str]) -> CheckpointError | None:
    """Return the error for a zip archive with records of these names; None if ``torch.save`` may have
    written it. A TorchScript program has a data.pkl, too.
    """
    inner = {name.partition("/")[2] for name in names}
    if "data.pkl" in inner and not inner & {"constants.pkl", "bytecode.pkl"}:
        return None
    if found := _recognised("records", "\n".join(names), path):
        return found
    files = [name for name in names if not name.endswith("/")]
    content = f" of other files: {one_line(few(files))}" if files else ""
    return CheckpointError(f"{path}: a zip archive{content}", f"{_UNPACK}unzip {quote(str(path))}")


# Errors for one fault each


def resaving(path: Path) -> str:
    """Return the repair to load a file with torch.load, and to save the weights again."""
    way = _saving("torch.load(p, weights_only=True)")
    return f"save it again: {way.format(file=quote(str(path)))}"


def unknown(path: Path, head: bytes) -> CheckpointError:
    return CheckpointError(
        f"{path}: of a kind that weighin does not know; its first bytes are {head[:8].hex(' ')}",
        "save the weights with torch.save or safetensors, with the program that wrote the file",
    )


def damaged(path: Path, what: str, repair: str = RESAVE) -> CheckpointError:
    return CheckpointError(f"{path}: damaged: {what}", repair)


def truncated(path: Path, what: str, end: int, file_bytes: int) -> CheckpointError:
    """Return the error for a file that ends before the byte ``end``, where ``what`` ends."""
    what = f"truncated: {what} ends at byte {end:,}, but the file ends at byte {file_bytes:,}"
    return CheckpointError(f"{path}: {what}", AGAIN)


def unreadable(path: Path | str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{path}: cannot be read: {error.strerror}",
        "check that the file exists, that you may read it, and that its disk works",
    )


def missing(path: Path | str) -> CheckpointError:
    gone = CheckpointError(f"{path}: no such file or folder", "check the path")
    return broken_link(Path(path)) or gone


def broken_link(path: Path) -> CheckpointError | None:
    """Return the error for a symbolic link to a file that does not exist; None for another path."""
    try:
        if path.exists():
            return None
        target = path.readlink()
    except (OSError, ValueError):  # the path is no link, or no valid file name
        return None
    what = f"{path}: a broken symbolic link to {one_line(str(target))}, which does not exist"
    if target.parent.name == "blobs" and (name := hub_id(path.parent)):
        return CheckpointError(
            f"{what}: a file of {name} was removed from the cache of the Hub", f"hf download {name}"
        )
    return CheckpointError(what, "restore the file to which the link leads, or correct the link")


# Paths, and models of the Hub


def hub_id(snapshot: Path) -> str:
    """Return the model's id, "owner/name", for a snapshot folder in the Hub's cache; else ""."""
    snapshots, entry = snapshot.parent, snapshot.parent.parent.name
    if snapshots.name == "snapshots" and entry.startswith(HUB_ENTRY):
        return entry.removeprefix(HUB_ENTRY).replace("--", "/")
    return ""


def looks_like_path(text: str) -> bool:
    """Tell whether a text can only be a path, and not the id of a model on the Hugging Face Hub."""
    if text in (".", "..") or text.startswith(("./", "../", "/", "~")) or text.endswith(_PATHS_END):
        return True
    return text.count("/") > 1 or ("/" in text and Path(text).parent.is_dir())


# JSON of others


def read_object(path: Path, repair: str) -> dict[str, Any]:
    """Return the JSON object in a file of somebody else's, in bounded memory."""
    try:
        text = read_bytes(path, MOST_JSON_BYTES)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise unreadable(path, error) from error
        fault = f"the file's {path.stat().st_size:,} bytes are more than weighin reads"
        raise CheckpointError(f"{path}: {fault}", repair) from None
    if text.count(b"[") + text.count(b"{") > _MOST_BRACKETS:
        raise damaged(path, "too many values are nested in one another", repair)
    try:
        value = json.loads(text.decode(), object_pairs_hook=no_duplicates)
    except RecursionError:
        raise damaged(path, "its values are nested too deeply in one another", repair) from None
    except ValueError as error:
        raise not_json(path, text, f"damaged: {error}", repair) from error
    if not isinstance(value, dict):
        raise damaged(path, "not a JSON object", repair)
    return value


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict; raise ValueError if a key occurs twice."""
    content = dict(pairs)
    if len(content) != len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise ValueError(f"{shown(twice)} occurs twice")
    return content


def not_json(path: Path, text: bytes, fault: str, repair: str) -> CheckpointError:
    if not text:
        return CheckpointError(f"{path}: empty file", AGAIN)
    if found := _by_content(path, text[:_HEAD_BYTES], may_be_text=True):
        return found
    if text.lstrip().startswith(b"{") and not text.rstrip().endswith(b"}"):
        return CheckpointError(f"{path}: truncated: the JSON object has no end", AGAIN)
    return CheckpointError(f"{path}: {fault}", repair)


# Folders


def no_model(folder: Path) -> CheckpointError:  # noqa: PLR0911 (one for each kind)
    """Return the error for a folder that is no checkpoint: what it is, and the path to give instead."""
    names = sorted(entry.name for entry in folder.iterdir())
    weights = [name for name in names if name.endswith(WEIGHTS)]
    for name in names:
        is_read = name == "config.json" or name.endswith((*WEIGHTS, ".index.json"))
        if is_read and (broken := broken_link(folder / name)):
            return broken
    if pipeline.is_pipeline(folder) and (whole := pipeline.read(folder)).models:
        return whole.refused()
    if ADAPTER in names:
        base = object_in(folder / ADAPTER, MIB).get("base_model_name_or_path")
        named = one_line(str(base), 100) if base else "a model that it does not name"
        alone = f"; for the adapter alone: {folder / weights[0]}" if weights else ""
        return CheckpointError(
            f"{folder}: an adapter of {named}, not a whole model",
            "merge it into its base, and give the merged model's folder: merge_and_unload() of peft,"
            f" then save_pretrained(FOLDER){alone}",
        )
    if step := named_step(folder):
        tag, inner = step
        what = f"{tag.name} names the step {inner.name}, which is not here"
        repair = "copy that folder too, or give the folder of another step"
        if inner.is_dir():
            what = f"its weights are in a step of a training run: {inner.name}"
            repair = f"write them beside config.json: weighin convert {inner} {folder / 'model.safetensors'}"
        return CheckpointError(f"{folder}: {what}", repair)
    if "modules.json" in names and not {"config.json", pipeline.INDEX} & {*names}:
        what = "a sentence-transformers folder without"
        if weights:
            repair = f"give the file: {folder / weights[0]}"
            return CheckpointError(f"{folder}: {what} a transformer", repair)
        return CheckpointError(f"{folder}: {what} weights", "copy the whole folder")
    if found := _recognised("folder", "\n".join(names), folder):
        return found
    if models := models_below(folder):
        return CheckpointError(
            f"{folder}: no config.json, but folders with models: {one_line(few(models))}",
            f"give one of them: {folder / models[0]}",
        )
    return CheckpointError(
        f"{folder}: not a checkpoint: no config.json, no index and no weights in it",
        "give the checkpoint file itself, or a folder that save_pretrained or `weighin convert` made",
    )


def models_below(folder: Path) -> list[str]:
    """Return the names of a folder's direct subfolders that contain files of weights."""
    found = []
    for inner in sorted(folder.iterdir()):
        with suppress(OSError):  # a file, or a folder that this user cannot read
            if any(entry.name.endswith(WEIGHTS) for entry in inner.iterdir()):
                found.append(inner.name)
    return found


def named_step(path: Path) -> tuple[Path, Path] | None:
    """Return the file that names the newest step of a run, and the step's folder, which may be missing."""
    for tag in (path / name for name in _TAGS):
        try:
            text = read_bytes(tag, 1000).decode().strip()
        except (OSError, ValueError):
            continue
        if text != ".." and text and Path(text).name == text and "\0" not in text:
            is_number = tag.name == _TAGS[2] and text.isascii() and text.isdigit()
            return tag, path / (f"iter_{int(text):07d}" if is_number else text)
    return None


# Checkpoints that do not fit a model


def misfit(
    checkpoint: Path,
    model: str,
    problems: Mapping[str, Collection[str]],
    reason: str = "",
    *,
    repair: str = "",
) -> CheckpointError:
    """Return the error for a checkpoint that does not fit a model.

    ``problems`` maps each fault, such as "missing", to the keys with this fault, which the caller
    shortens with ``plain``. ``reason`` replaces the list of keys if no key has a fault.
    """
    faults = [
        f"{len(names)} {what} ({first_names(names)})" for what, names in problems.items() if names
    ]
    return CheckpointError(
        f"{checkpoint}: does not fit {model}, keys: {'; '.join(faults) or reason}",
        repair or "choose the model that this checkpoint was saved from, or correct its arguments",
    )


def selecting(stored: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> str:
    """Return the advice to select the model's tensors by --key or strip_prefix, by shapes; else ""."""
    first = next(iter(wanted), "")
    for prefix in (name.removesuffix(first) for name in stored if name.endswith(f".{first}")):
        inside = {n.removeprefix(prefix): one for n, one in stored.items() if n.startswith(prefix)}
        if not first or inside != wanted:
            continue
        if len(inside) == len(stored):
            return (
                f"all names begin with {shown(prefix)}: --set strip_prefix={prefix}; in load_streaming:"
                f" strip_prefix={shown(prefix)}; in a suite: strip_prefix: {prefix}"
            )
        key = prefix.removesuffix(".")
        return select_key(f"--key {key}", key)
    return ""


def select_key(ways: str, key: str) -> str:
    """Return the advice to select the weights at ``key``; ``ways`` lists the options for it."""
    return f"select the weights: {ways}; in load_streaming: key={key!r}; in a suite: key: {key}"


def lacks(checkpoint: Path, missing: Iterable[str], model: str) -> CheckpointError:
    return CheckpointError(
        f"{checkpoint}: has no values for {first_names(missing)} of this {model}",
        "choose the class that the checkpoint was saved from; from_pretrained would initialise these"
        " weights with random numbers",
    )
