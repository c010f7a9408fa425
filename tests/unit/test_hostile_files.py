"""Any damage to a file of any layout ends in a right read or in a CheckpointError, never else.

Mutations are structured: bits, cuts, repeated and exchanged stretches, numbers set to extremes,
texts of one length exchanged. The coverage-guided search for more is tests/fuzz.
"""

import os
import pickle
import re
import resource
import shutil
import struct
import subprocess
import sys
import time
import tracemalloc
from functools import partial
from pathlib import Path

import pytest
import torch
from harms import DATA, HARMS, STATE, Given, Harm, complaint, legacy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from state_files import write_state

from weighin.checkpoint.convert import Conversion
from weighin.errors import CheckpointError
from weighin.stream import formats, gguf_files
from weighin.stream.load_streaming import load_streaming
from weighin.stream.slices import Slice
from weighin.units import MIB

WEIGHT = torch.ones(3, 2)
SOUND = {
    "a.weight": WEIGHT,
    "b.0.half": torch.ones(5, dtype=torch.bfloat16),
    "b.0.none": torch.ones(0, 4, dtype=torch.bool),
    "c.weight": WEIGHT,
}
EXTREMES = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
TEXTS = (
    (b"data.pkl", b"data.pk1"), (b"a.weight", b"../../xx"), (b"a.weight", b"/etc/pas"),
    (b"FloatStorage", b"ShortStorage"), (b"F32", b"F64"), (b"[0,24]", b"[1,25]"),
    (b"a.weight", b"b.0.half"), (b"model-", b"../../"), (b"24", b"-4"), (b"torch", b"posix"),
    (b"a.weight.pt", b"../a.wei.pt"), (b"__0_0.distcp", b"../x/d.distc"), (b"storage", b"stor\\0ge"),
)  # fmt: skip

LAYOUTS = (*formats.NAMES, "pt_legacy")
assert {*LAYOUTS} == {*DATA}, "the table HARMS has every layout"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("layouts")
    for name in LAYOUTS:
        write_state(folder / name, name, SOUND)
    return {name: folder / name for name in LAYOUTS}


@st.composite
def damage(draw: st.DrawFn, data: bytes) -> bytes:
    """Return the bytes with one to three mutations."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        kind = draw(st.sampled_from(["bit", "cut", "tail", "copy", "number", "text", "swap"]))
        size = draw(st.integers(1, 64))
        if kind == "bit" and data:
            flipped = bytes([data[at] ^ (1 << draw(st.integers(0, 7)))])
            data = data[:at] + flipped + data[at + 1 :]
        elif kind == "cut":
            data = data[:at] + data[at + size :]
        elif kind == "tail":
            data = data[:at]
        elif kind == "copy":
            data = data[:at] + data[at : at + size] * draw(st.integers(2, 20)) + data[at + size :]
        elif kind == "number":
            form = draw(st.sampled_from(["<I", "<Q"]))
            value = draw(st.sampled_from(EXTREMES)) & (2 ** (8 * struct.calcsize(form)) - 1)
            data = data[:at] + struct.pack(form, value) + data[at + struct.calcsize(form) :]
        elif kind == "text":
            data = data.replace(*draw(st.sampled_from(TEXTS)), draw(st.integers(1, 3)))
        else:
            data = data[at:] + data[:at]
    return data


def check(place: Slice, root: Path) -> None:
    assert root in {place.file, place.file.parent}
    reach = sum((n - 1) * step for n, step in zip(place.shape, place.stride, strict=True))
    if place.nbytes:
        end = place.offset + (reach + 1) * place.dtype.itemsize
        assert 0 < place.storage_offset <= place.offset
        assert end <= place.storage_offset + place.storage_bytes <= place.file.stat().st_size


@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_damaged_file_is_read_right_or_refused(
    checkpoints: dict[str, Path], name: str, data: st.DataObject
) -> None:
    path = checkpoints[name]
    file = data.draw(st.sampled_from(formats.files(path)))
    sound = file.read_bytes()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        file.write_bytes(data.draw(damage(sound)))
        for place in formats.read(path):
            check(place, path)
    except CheckpointError as error:
        assert error.message.startswith(str(path))
        assert error.repair
    finally:
        file.write_bytes(sound)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 200 * 1024
    assert [place.name for place in formats.read(path)] == [*SOUND]


BOMBS = {
    "lists.pth": lambda n: b"\x80\x02" + b"]" * n,
    "lists in dcp/.metadata": lambda n: b"\x80\x02" + b"]" * n,
    "bytes in dcp/.metadata": lambda n: b"\x80\x04\x96" + struct.pack("<Q", 10**10) + b"x" * n,
    "a.safetensors": lambda n: struct.pack("<Q", n) + b'{"a":{"x":[' + b"[]," * (n // 3 - 10),
    "b.safetensors": lambda n: struct.pack("<Q", n) + b"{" + b'"":{},' * (n // 6),
    "m/model.safetensors.index.json": lambda n: b'{"a":[' + b"[]," * (n // 3),
    "p/index.json": lambda n: b'{"format": "per_param", "a":[' + b"[]," * (n // 3),
}


def pickled(instructions: bytes) -> bytes:
    return b"\x80\x02" + instructions + b"."


def put(path: Path, pickle: bytes) -> Path:
    """Write a file, or the one file in a folder, that is a checkpoint with this pickle; return the checkpoint."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(legacy(pickle) if path.suffix == ".pth" else pickle)
    return path if path.suffix in (".pth", ".safetensors") else path.parent


LIMITED = """
import resource, sys
from pathlib import Path
from weighin.stream import formats as layouts
from weighin.errors import CheckpointError
path = Path(sys.argv[1])
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    layouts.read(path)
except CheckpointError as error:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error.message)
"""


@pytest.mark.parametrize("name", BOMBS)
def test_a_file_that_wants_all_memory_does_not_get_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name.rpartition(" in ")[2]
    target = put(path, BOMBS[name](64 * MIB))
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(target)],
        capture_output=True, text=True, timeout=60, check=True, env=os.environ,
    )  # fmt: skip
    grown_kib, _, message = done.stdout.partition(" ")
    assert message.startswith(str(tmp_path))
    assert int(grown_kib) < 200 * 1024


def text(size: int, content: bytes) -> bytes:
    return b"X" + struct.pack("<I", size) + content


def number(value: int) -> bytes:
    return struct.pack("<I", value)


LONG = b"\x8b" + number(5000) + b"\x01" * 5000  # an integer that Python does not print
PICKLES: dict[str, tuple[bytes, str]] = {
    # a pair of pairs of pairs ...: 2**200 of them
    "a key that takes for ever to hash": (b"}q\1)q\0" + 200 * b"h\0h\0\x86q\0" + b"h\1h\0K\1s", "a dict has a key of type tuple"),
    "keys of 12,000 digits": (b"}" + 2 * (LONG + b"K\1s"), "an integer of 39,993 bits"),
    "nothing": (b"N", ""),
    "a memo of 2**31 places": (b"Nr\xff\xff\xff\x7f", ""),
    "attributes for a class": (b"ctorch\nSize\n}\x8c\x01ak\x01s\x86b", ""),
    "100,000 marks": (b"(" * 100_000, ""),
    "numbers of one hash": (
        b"}(" + b"".join(b"\x8a\x0b" + (n * (2**61 - 1)).to_bytes(11, "little", signed=True) + b"N" for n in range(1, 30_000)) + b"u",
        "",
    ),
    "one long name many times": (text(1000, 250 * "\U0001f600".encode()) + b"q\0\x8c\1aq\1" + 200_000 * b"h\0h\1\x93", ""),
    "many objects of one long name": (b"ctorch._utils\n_rebuild_" + 900 * b"x" + b"\nq\0)q\1" + 300_000 * b"h\0h\1R", ""),
    "one text of 10 MiB as a name many times": (text(10 * MIB, b"a" * (10 * MIB)) + b"q\0" + 100_000 * b"h\0h\0\x93", ""),
    "many long names": (
        b"".join(text(500, f"{n:04}".encode() * 125) + b"r" + number(n) + b"0" for n in range(400))
        + b"".join(b"j" + number(m) + b"j" + number(n) + b"\x93" + b"0" for m in range(400) for n in range(400)) + b"N",
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", PICKLES)
def test_a_pickle_is_refused_in_little_time_and_memory(tmp_path: Path, name: str) -> None:
    instructions, words = PICKLES[name]
    path = put(tmp_path / "a.pth", pickled(instructions))
    tracemalloc.start()
    start_s = time.process_time()
    message = complaint(formats.read, path).message
    spent_s, (_, peak_bytes) = time.process_time() - start_s, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert words in message
    assert spent_s < 10
    assert peak_bytes < path.stat().st_size + 64 * MIB
    said = complaint(
        formats.read, put(tmp_path / "dcp" / ".metadata", pickled(instructions))
    ).message
    assert re.search(r"\.metadata: (damaged|the pickle (from byte 0 cannot|holds more))", said)


def test_a_version_that_is_too_deep_to_print_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.pth"
    magic, deep = legacy(b"").partition(b"\x80\x02M")[0], b"]" * 100_000 + b"a" * 99_999
    path.write_bytes(magic + pickled(deep) + pickle.dumps({}, 2))
    with pytest.raises(CheckpointError, match="another version than 1001"):
        formats.read(path)


def test_a_place_of_a_key_that_is_no_text_is_refused(checkpoints: dict[str, Path]) -> None:
    path = checkpoints["dcp"] / ".metadata"
    sound = path.read_bytes()
    at = sound.index(b"fqn\x94") + 4
    path.write_bytes(sound[:at] + b"}0" + sound[at:])  # an empty dict, taken away again
    assert len(formats.read(checkpoints["dcp"])) == len(SOUND)
    end = sound.index(b"\x8c\x06offset", at)
    path.write_bytes(sound[:at] + b"}" + sound[end:])
    with pytest.raises(CheckpointError):
        formats.read(checkpoints["dcp"])
    path.write_bytes(sound)


def gguf(tensors: int, keys: int, rest: bytes) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + rest


def listed(kind: int, length: int) -> bytes:
    """Return a key of GGUF whose value is a list."""
    return struct.pack("<QsIIQ", 1, b"k", 9, kind, length)


HUGE = struct.pack("<QsIQQQIQ", 1, b"w", 3, 0, 2**40, 2**40, 0, 0) + bytes(64)
GGUF = {
    "a million texts": (gguf(0, 1, listed(8, 1_000_001) + bytes(8 * 1_000_001)), "tensors and metadata values in one file"),
    "a million lists": (gguf(0, 1, listed(9, 1_000_001) + bytes(8 * 1_000_001)), "has the unknown type 9"),
    "16,000 keys": (gguf(0, 16_000, 16_000 * (listed(0, 64) + bytes(64))), "tensors and metadata values in one file"),
    "an impossible shape": (gguf(1, 0, HUGE), "cannot have the shape"),
}  # fmt: skip


@pytest.mark.parametrize("name", GGUF)
def test_a_gguf_file_of_too_much_is_refused(tmp_path: Path, name: str) -> None:
    content, words = GGUF[name]
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(CheckpointError, match=words):
        gguf_files.read(tmp_path / "m.gguf")


# Each kind of harm of harms.py, in each layout where it can occur, through each door of the library


def give(layout: str, folder: Path) -> Given:
    suffix = ".pth" if layout == "pt_legacy" else formats.suffix_of(layout)
    path, outside = folder / "given" / f"m{suffix}", folder / "outside" / "x"
    path.parent.mkdir()
    outside.parent.mkdir()
    write_state(path, layout, STATE)
    one = Given(layout, path, outside, folder / "EXECUTED")
    shutil.copy(one.data, outside)
    return one


@pytest.mark.usefixtures("torch_threads_restored")
@pytest.mark.parametrize(
    ("layout", "harm", "where", "words"),
    [
        pytest.param(layout, harm, where, words, id=f"{name}-{layout}")
        for name, layouts, harm, where, words in HARMS
        for layout in layouts
    ],
)
def test_harm_is_named_and_does_none(
    layout: str, harm: Harm, where: str, words: str, opened: list[str], tmp_path: Path
) -> None:
    """Nothing is executed, nothing outside of the checkpoint is opened, and nothing is written."""
    given = give(layout, tmp_path)
    assert [one.name for one in formats.read(given.path)] == [*STATE]
    assert str(given.data) in opened
    harm(given)
    words = words.replace("{data}", given.data.name).replace("{outside}", str(given.outside))
    before = sorted(tmp_path.rglob("*"))
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3)})
    weight = model.get_parameter("a.weight").detach().clone()
    conversion = Conversion(given.path, tmp_path / "new", "per_param", verify=True)
    load = partial(load_streaming, model, given.path)
    del opened[:]
    for door in (partial(formats.read, given.path), load, conversion.write):
        error = complaint(door)
        message = error.message
        assert message.startswith(str(getattr(given, where)))
        assert words in message
        assert len(message) < 1000
        assert error.repair
        is_proven = "truncated" in message or "empty file" in message
        assert is_proven or "download" not in error.repair
    assert torch.equal(model.get_parameter("a.weight"), weight)
    assert sorted(tmp_path.rglob("*")) == before
    assert not given.proof.exists()
    inside = [Path(os.path.normpath(one)) for one in opened if str(tmp_path) in one]
    assert all(tmp_path / "given" in one.parents for one in inside)
