"""Say what a path is if it is no checkpoint that weighin reads, and what to do: errors with a repair.

``foreign.toml`` is the table of other kinds of files and folders. This module also reads a file's first
bytes, by which readers recognise their files, and the JSON of others.
"""

import errno
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any, Final, TypeVar

from weighin.errors import CheckpointError
from weighin.files import read_bytes
from weighin.stream.pretrained_library import PIPELINE, WEIGHTS
from weighin.text import few, first_names, one_line, shown
from weighin.units import MIB

# Only of a file that ends too early: other faults do not prove that a copy is cut off.
AGAIN: Final = "copy or download the file again"
RESAVE: Final = (
    "load the file with the program that wrote it, and save it again; if that fails, too, the file is"
    " damaged: get another copy"
)
SHARDS: Final = "save the checkpoint in several files, as model.save_pretrained(FOLDER) does"
NOT_MEASURED: Final = "weighin cannot measure its load, but reads it: weighin inspect, weighin convert, load_streaming"
HUB_ENTRY: Final = "models--"  # begins a model's folder in the Hub's cache: "models--owner--name"

_LATE_S: Final = 0.002  # a disk that takes so long for the first reads answers late
_THREADS: Final = 128  # which read headers at the same time from a disk that answers late
_HEAD_BYTES: Final = 512
_HEADER_BYTES: Final = 128 * 1024  # as long as most headers of safetensors files
_LEGACY_MAGIC: Final = 0x1950A86A20F9469CFC6C.to_bytes(10, "little")
_PACKED: Final = (".gz", ".bz2", ".xz", ".zst", ".lz4")
_PATHS_END: Final = ("/", ".gguf", ".json", ".py", *WEIGHTS)
# Files in a run's folder that name its newest step: two of DeepSpeed, and Megatron-LM's number.
_TAGS: Final = ("latest", "latest_universal", "latest_checkpointed_iteration.txt")

_known: Final[ContextVar[dict[Hashable, Any] | None]] = ContextVar("known", default=None)

Item = TypeVar("Item")
Value = TypeVar("Value")


@contextmanager
def remembering() -> Iterator[None]:
    """Keep the results of ``once`` until the context ends, because a network disk answers slowly."""
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
    """Yield the function's value for each item; if the first calls are slow, call it in threads."""
    rest, spent_s = iter(items), 0.0
    for item in islice(rest, 3):  # the first alone may have been cached
        start_s = time.monotonic()
        value = function(item)
        spent_s += time.monotonic() - start_s
        yield value
        if spent_s >= _LATE_S:
            break
    if spent_s < _LATE_S:
        yield from map(function, rest)
        return
    # ``remembering`` holds in the threads, too.
    with ThreadPoolExecutor(_THREADS, initializer=_known.set, initargs=(_known.get(),)) as pool:
        yield from pool.map(function, rest)


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
    limit = 100_000_000  # the format's own
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= limit


def is_zip(head: bytes) -> bool:
    return head.startswith(b"PK") and not is_safetensors(head)


def is_legacy(head: bytes) -> bool:
    """Tell whether a file begins like a file of torch before 1.6: with a pickled magic number."""
    return _LEGACY_MAGIC in head[:32]


def check_present(path: Path) -> bytes:
    """Return a file's first bytes; raise CheckpointError if they show that it is no checkpoint."""
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
    if found := _other_file(path, head, "name", "head", "text"):
        raise found
    return head


def _other_file(path: Path, head: bytes, *columns: str) -> CheckpointError | None:
    """Return the error for a file of a known other kind."""
    # The length at the beginning of a safetensors file can equal any magic number.
    is_magic = head.startswith((b"PK", b"GGUF")) and b"\0" in head  # no text
    is_read = is_magic or is_safetensors(head) or is_legacy(head)
    if is_read and path.suffix != ".distcp":  # whose folder is to be given
        return None
    texts = {
        "name": path.name,
        "head": head.decode("latin-1"),
        "text": head.decode(errors="replace"),
    }
    for column in columns:
        if found := recognised(column, texts[column], path):
            return found
    return None


def recognised(column: str, text: str, path: Path) -> CheckpointError | None:
    """Return the error for ``path`` by the first row of the table whose pattern occurs in ``text``."""
    import tomllib  # a sound checkpoint needs no table

    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    flags = re.DOTALL | re.ASCII if column == "head" else re.MULTILINE
    for pattern, what, repair in table["rows"][column]:
        if not (found := [*re.finditer(pattern, text, flags)]):
            continue
        unpacked = path.with_suffix("") if path.suffix in _PACKED else f"{path}.unpacked"
        words = table["phrases"] | {
            "path": path,
            "file": quote(str(path)),
            "name": path.name,
            "folder": path.parent,
            "unpacked": quote(str(unpacked)),
            "decrypted": quote(f"{path}.decrypted"),
            "first": found[0][0],
            "found": one_line(few([one[0] for one in found])),
            "begin": one_line(text, 60),
            "lacks": f"{'' if 'config.json' in text.splitlines() else 'no config.json and '}no index",
        }
        message, advice = (one.format(*found[0].groups(), **words) for one in (what, repair))
        return CheckpointError(f"{path}: {message}", advice)
    return None


def other_zip(path: Path, names: Sequence[str]) -> CheckpointError | None:
    """Return the error for a zip archive with these records; None if ``torch.save`` may have written it."""
    inner = {name.partition("/")[2] for name in names}
    if "data.pkl" in inner and not inner & {"constants.pkl", "bytecode.pkl"}:
        return None
    if found := recognised("records", "\n".join(names), path):
        return found
    files = [name for name in names if not name.endswith("/")]
    content = f" of other files: {one_line(few(files))}" if files else ""
    repair = f"unpack it, and give the checkpoint in it: unzip {quote(str(path))}"
    return CheckpointError(f"{path}: a zip archive{content}", repair)


def resaving(path: Path) -> str:
    """Return the repair to load a file with torch.load, and to save the weights again."""
    code = "p = sys.argv[1]; torch.save(torch.load(p, weights_only=True), p + '.new')"
    return f'save it again: python -c "import sys, torch; {code}" {quote(str(path))}'


def unknown(path: Path, head: bytes) -> CheckpointError:
    return CheckpointError(
        f"{path}: weighin does not know this kind of file; its first bytes are {head[:8].hex(' ')}",
        "load it with the program that wrote it, and save the weights with torch.save or safetensors",
    )


def damaged(path: Path, what: str, repair: str = RESAVE) -> CheckpointError:
    return CheckpointError(f"{path}: damaged: {what}", repair)


def truncated(path: Path, what: str, end: int, file_bytes: int) -> CheckpointError:
    """Return the error for a file that ends before the byte ``end``, where ``what`` ends."""
    what = f"truncated: {what} ends at byte {end:,}, but the file ends at byte {file_bytes:,}"
    return CheckpointError(f"{path}: {what}", AGAIN)


def unreadable(path: Path | str, error: Exception) -> CheckpointError:
    if isinstance(error, RuntimeError):  # of expanduser
        why = "this user is not known here, or has no home folder"
        return CheckpointError(f"{path}: cannot be read: {why}", "correct the name after ~")
    if isinstance(error, ValueError) or getattr(error, "errno", 0) == errno.ENAMETOOLONG:
        why = getattr(error, "strerror", "the path contains a null byte")
        return CheckpointError(f"{path}: cannot be read: {why}", "check the path")
    return CheckpointError(
        f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}",
        "check that the file exists, that you may read it, and that its disk works",
    )


def missing(path: Path | str) -> CheckpointError:
    broken = broken_link(Path(path))
    return broken or CheckpointError(f"{path}: no such file or folder", "check the path")


def broken_link(path: Path) -> CheckpointError | None:
    """Return the error for a symbolic link to a file that does not exist; None for another path."""
    try:
        if path.exists():
            return None
        target = path.readlink()
    except (OSError, ValueError):  # the path is no link, or no valid file name
        return None
    what = f"{path}: a broken symbolic link to {one_line(str(target))}, which does not exist"
    repair = "restore the file to which the link leads, or correct the link"
    if target.parent.name == "blobs" and (name := hub_id(path.parent)):
        what = f"{what}: a file of {name} was removed from the cache of the Hub"
        repair = f"hf download {name}"
    return CheckpointError(what, repair)


def file_of(index: Path, name: object, key: str, repair: str) -> Path:
    """Return the file that an index names for a tensor; refuse a name that leads out of the folder."""
    if not isinstance(name, str) or not name or Path(name).name != name or "\0" in name:
        what = f"the file that holds {shown(key)} lies outside the folder: {shown(name)}"
        raise CheckpointError(f"{index}: {what}", repair)
    file = index.parent / name
    if not os.path.isfile(file):  # noqa: PTH113 (False for an impossible name)
        what = f"the file {shown(name)}, which holds {shown(key)}, is missing"
        raise broken_link(file) or CheckpointError(f"{index}: {what}", repair)
    return file


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


def read_object(path: Path, repair: str) -> dict[str, Any]:
    """Return the JSON object in a file that weighin did not write; take little memory."""
    try:
        text = read_bytes(path, 16 * MIB)  # 170,000 keys, which take 12 times the memory
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise unreadable(path, error) from error
        fault = f"has {path.stat().st_size:,} bytes of JSON, more than weighin reads"
        raise CheckpointError(f"{path}: {fault}", repair) from None
    if text.count(b"[") + text.count(b"{") > 200_000:  # an empty list takes 80 bytes of memory
        raise damaged(path, "more than 200,000 lists and objects in one JSON file", repair)
    try:
        value = json.loads(text.decode(), object_pairs_hook=no_duplicates)
    except RecursionError:
        raise damaged(path, "its values are nested too deeply", repair) from None
    except ValueError as error:
        raise not_json(path, text, f"damaged: {error}", repair) from error
    if not isinstance(value, dict):
        raise damaged(path, "not a JSON object", repair)
    return value


def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict; raise ValueError if a key occurs twice."""
    content = dict(pairs)
    if len(content) != len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{shown(twice)} occurs twice")
    return content


def not_json(path: Path, text: bytes, fault: str, repair: str) -> CheckpointError:
    if not text:
        return CheckpointError(f"{path}: empty file", AGAIN)
    if found := _other_file(path, text[:_HEAD_BYTES], "name", "head"):
        return found
    if text.lstrip().startswith(b"{") and not text.rstrip().endswith(b"}"):
        return CheckpointError(f"{path}: truncated: the JSON object has no end", AGAIN)
    return CheckpointError(f"{path}: {fault}", repair)


def no_model(folder: Path) -> CheckpointError:
    """Return the error for a folder that is no checkpoint: what it is, and the path to give instead."""
    names = sorted(entry.name for entry in folder.iterdir())
    for name in names:
        is_read = name == "config.json" or name.endswith((*WEIGHTS, ".index.json"))
        if is_read and (broken := broken_link(folder / name)):
            return broken
    is_bare = not any(name == "config.json" or name.endswith(WEIGHTS) for name in names)
    if (folder / PIPELINE).is_file() and (parts := models_below(folder)):
        from weighin.units import format_bytes  # imports decimal, which few loads need

        largest_first = parts.most_common()
        sizes = [f"{name} ({format_bytes(size)})" for name, size in largest_first]
        s = "s" if len(parts) > 1 else ""
        what = f"a diffusers pipeline of {len(parts)} model{s}: {one_line(', '.join(sizes))}"
        repair = f"give the folder of one model; the largest is {folder / largest_first[0][0]}"
    elif "adapter_config.json" not in names and (step := named_step(folder)):
        tag, inner = step
        what = f"{tag.name} names the step {inner.name}, which this folder lacks"
        repair = f"copy the folder {inner.name} here, or give the folder of another step"
        if inner.is_dir():
            what = f"the weights are in the folder of a training step, {inner.name}"
            repair = f"write them beside config.json: weighin convert {inner} {folder / 'model.safetensors'}"
    elif "modules.json" in names and is_bare and (parts := models_below(folder)):
        what = f"a sentence-transformers folder of several parts: {one_line(few([*parts]))}"
        first = folder / next(iter(parts))
        repair = f"give the folder of one part: {first}; or load all parts with load_pretrained"
    elif found := recognised("folder", "\n".join(names), folder):
        return found
    elif models := models_below(folder):
        what = f"no config.json, but folders with models: {one_line(few([*models]))}"
        repair = f"give one of them: {folder / next(iter(models))}"
    else:
        what = "not a checkpoint: this folder has no config.json, no index and no weights"
        repair = "give a checkpoint file, or a folder from save_pretrained or `weighin convert`"
    return CheckpointError(f"{folder}: {what}", repair)


def models_below(folder: Path) -> Counter[str]:
    """Return the direct subfolders with weights, and their bytes: of .bin and .safetensors, the larger."""
    found: Counter[str] = Counter()
    for inner in sorted(folder.iterdir()):
        sizes: Counter[str] = Counter()
        with suppress(OSError):  # a file, or a folder that this user cannot read
            for file in inner.iterdir():
                if file.suffix in WEIGHTS:
                    sizes[file.suffix] += file.stat().st_size if file.is_file() else 0
        if sizes:
            found[inner.name] = max(sizes.values())
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


def misfit(
    path: Path, model: str, keys: Mapping[str, Collection[str]], reason: str = "", repair: str = ""
) -> CheckpointError:
    """Return the error for a checkpoint with wrong ``keys``, by fault ("missing"), or for a ``reason``."""
    faults = [
        f"{len(bad)} key{'s' * (len(bad) > 1)} {what} ({first_names(bad)})"
        for what, bad in keys.items()
        if bad
    ]
    return CheckpointError(
        f"{path}: does not fit {model}: {'; '.join(faults) or reason}",
        repair or "choose the checkpoint's own model, or correct the arguments of the model",
    )


def selecting(stored: Collection[str], wanted: Collection[str]) -> str:
    """Return advice on --key or strip_prefix if either gives the model's names; else ""."""
    first = next(iter(wanted), "")
    for prefix in (name.removesuffix(first) for name in stored if name.endswith(f".{first}")):
        inside = {name.removeprefix(prefix) for name in stored if name.startswith(prefix)}
        if not first or inside != {*wanted}:
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
        f"{checkpoint}: lacks weights of this {model}: {first_names(missing)}",
        "choose the class from which the checkpoint was saved; from_pretrained would initialise these"
        " weights with random numbers",
    )
