"""A tensor's usual instructions in a pickle are read at once, as one by one."""

import io
import random
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from weighin.errors import CheckpointError
from weighin.formats import pickle_machine, state_pickle

NEVER = re.compile(rb"(?!)")


def pickled() -> bytes:
    """Return the pickle of a state dict with usual and unusual tensors."""
    whole = torch.arange(70_000.0)
    state: dict[str, Any] = {
        "first": torch.ones(64, 64),
        "same storage": whole[:60_000].view(200, 300),
        "view": whole[7:300:2],
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 3),
        "five": torch.zeros(2, 1, 3, 1, 2, dtype=torch.int64),
        "cube": torch.zeros(300, 2, 70, dtype=torch.bfloat16),
        "expanded": torch.ones(1).expand(5, 9),
        "parameter": torch.nn.Parameter(torch.ones(3, 5)),
        **{f"layers.{number}.weight": torch.ones(4, 75) for number in range(12)},
    }
    state["tied"] = state["first"]
    file = io.BytesIO()
    torch.save(state, file)
    with zipfile.ZipFile(file) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("data.pkl"))
        return archive.read(name)


def read(content: bytes) -> object:
    try:
        found = state_pickle.load(Path("x.pt"), io.BytesIO(content))
    except CheckpointError as error:
        return str(error)
    return repr((found.value, found.storages, found.refused))


def one_by_one(content: bytes) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_pickle, "_TENSOR", NEVER)
        return read(content)


def test_most_tensors_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    content = pickled()
    assert len(state_pickle._TENSOR.findall(content)) > 12
    assert read(content) == one_by_one(content)


def test_a_later_instruction_finds_each_object_that_a_tensor_s_instructions_stored() -> None:
    content = pickled()
    stop = content.rindex(b"u")
    places = sorted(pickle_memo(content))
    gets = b"".join(b"j" + place.to_bytes(4, "little") for place in places)
    listed = content[:2] + b"(" + content[2:stop] + b"u" + gets + b"l."
    as_tuple = listed.replace(gets + b"l.", gets + b"t.")
    assert read(as_tuple) == one_by_one(as_tuple)


def pickle_memo(content: bytes) -> set[int]:
    import pickletools

    return {
        int(argument)
        for code, argument, _ in pickletools.genops(content)
        if code.name in {"BINPUT", "LONG_BINPUT"} and argument is not None
    }


def test_a_changed_byte_gives_the_same_value_or_the_same_error() -> None:
    content, draw = pickled(), random.Random(3)
    right, differing = one_by_one(content), 0
    for _ in range(150):
        at, byte = draw.randrange(len(content)), draw.choice(b"KMJhqrtXRQ(\x85\x86\x00\xff0159")
        changed = content[:at] + bytes([byte]) + content[at + 1 :]
        expected = one_by_one(changed)
        assert read(changed) == expected, (at, byte)
        differing += expected != right
    assert differing > 40


def test_a_pickle_of_a_crafted_loop_of_tensors_ends_at_the_same_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    content = pickled()
    for most in (100, 400, 600, 700):
        monkeypatch.setattr(pickle_machine, "_MOST_PUSHED", most)
        assert read(content) == one_by_one(content)
    monkeypatch.undo()
    for most in (30, 90, 150):
        monkeypatch.setattr(pickle_machine, "_MOST_OBJECTS", most)
        assert read(content) == one_by_one(content)
