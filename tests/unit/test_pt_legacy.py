"""The format of torch before 1.6: both ways with torch itself, and nothing in it is executed."""

import io
import os
import pickle
import struct
from collections import OrderedDict
from pathlib import Path

import pytest
import torch

from weighin.errors import CheckpointError, ConfigError
from weighin.formats import pickle_machine, pt_legacy, state_pickle
from weighin.formats.base import TensorPlan

AGAIN = "copy or download the file again"
torch.manual_seed(0)
EMBEDDING = torch.randn(100, 7)
STATE = {
    "embedding": EMBEDDING,
    "mask": torch.tensor([True, False, True]),
    "half": torch.randn(33).to(torch.bfloat16),
    "empty": torch.empty(0, 4),
    "steps": torch.tensor(3),
    "head": EMBEDDING,
}


def save(value: object, path: Path) -> None:
    torch.save(value, path, _use_new_zipfile_serialization=False)


def write(path: Path) -> None:
    plans = [
        TensorPlan(name, tuple(t.shape), t.dtype, "embedding" if name == "head" else None)
        for name, t in STATE.items()
    ]
    pt_legacy.write(path, plans, lambda name: [STATE[name]])


def test_torch_reads_what_we_write_and_tied_weights_share(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    write(path)
    found = torch.load(path, weights_only=True)
    assert list(found) == list(STATE)
    for name, tensor in STATE.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name], tensor)
    assert found["head"].data_ptr() == found["embedding"].data_ptr()


@pytest.mark.parametrize("ours", [True, False])
def test_slices_lead_to_the_values(tmp_path: Path, ours: bool) -> None:
    path = tmp_path / "model.pth"
    state = STATE if ours else STATE | {"view": EMBEDDING.t()[2:5]}
    write(path) if ours else save(state, path)
    data = path.read_bytes()
    places = {place.name: place for place in pt_legacy.read(path)}
    assert list(places) == list(state)
    assert places["head"].storage_offset == places["embedding"].storage_offset
    for name, tensor in state.items():
        place = places[name]
        assert (place.shape, place.stride) == (tuple(tensor.shape), tensor.stride())
        if place.contiguous:
            raw = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
            assert data[place.offset : place.offset + place.nbytes] == raw
    if not ours:
        assert places["view"].offset == places["embedding"].offset + 2 * 4


def test_state_dicts_with_metadata_and_parameters_are_read(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 4)
    for state in (model.state_dict(), dict(model.named_parameters())):
        save(state, tmp_path / "model.pth")
        assert [place.name for place in pt_legacy.read(tmp_path / "model.pth")] == [
            "weight",
            "bias",
        ]


def test_it_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    write(tmp_path / "a")
    torch.save(STATE, tmp_path / "b.pth")
    assert pt_legacy.matches(tmp_path / "a")
    assert pt_legacy.files(tmp_path / "a") == [tmp_path / "a"]
    assert not pt_legacy.matches(tmp_path / "b.pth")
    assert not pt_legacy.matches(tmp_path)


def test_a_dtype_of_later_times_is_refused_before_a_byte(tmp_path: Path) -> None:
    plan = TensorPlan("w", (1,), torch.float8_e5m2)
    with pytest.raises(
        ConfigError, match=r"'w': torch before 1\.6 had no dtype torch\.float8_e5m2"
    ):
        pt_legacy.write(tmp_path / "m.pth", [plan], lambda _: [])
    assert list(tmp_path.iterdir()) == []


class Command:
    """Would end the tests if anything called what it asks for."""

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, (f"kill {os.getpid()}",))


class Allocation:
    """torch's own unpickler would allocate this."""

    def __reduce__(self) -> tuple[object, ...]:
        return (bytearray, (10**12,))


@pytest.mark.parametrize(
    ("value", "message", "repair"),
    [
        (
            {"w": Command()},
            "holds more than tensors, and was NOT executed: 'w' refers to posix.system",
            "if you trust the file, load it and save plain weights: torch.save(model.state_dict(), ...)",
        ),
        (
            {"w": Allocation()},
            "not a flat state dict: 'w' holds a bytearray",
            "save the weights alone: torch.save(model.state_dict(), ...)",
        ),
        (
            {"w": torch.zeros(2).to_sparse()},
            "'w' is a sparse tensor; weighin reads plain tensors",
            "load it with torch, make it dense (tensor.to_dense()), and save it: torch.save({NAME: TENSOR, ...}, ...)",
        ),
        (
            {"model": {"w": torch.zeros(2)}},
            "not a flat state dict: 'model' holds a dict",
            "select the weights: --key model (8 B); in load_streaming: key='model'; in a suite: key: model",
        ),
        (
            [torch.zeros(2)],
            "holds a list, not a state dict",
            "save the weights alone: torch.save(model.state_dict(), ...)",
        ),
    ],
)
def test_what_is_no_state_dict_is_called_by_its_name(
    tmp_path: Path, value: object, message: str, repair: str
) -> None:
    path = tmp_path / "model.pth"
    save(value, path)
    with pytest.raises(CheckpointError) as caught:
        pt_legacy.read(path)
    assert caught.value.message == f"{path}: {message}"
    assert caught.value.repair == repair


def test_a_truncated_file_is_named_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    save({"w": torch.zeros(100)}, path)
    data = path.read_bytes()
    end = len(data)
    path.write_bytes(data[:-4])
    with pytest.raises(CheckpointError) as caught:
        pt_legacy.read(path)
    assert caught.value.message.startswith(f"{path}: truncated: storage '")
    assert caught.value.message.endswith(
        f"' ends at byte {end:,}, but the file ends at byte {end - 4:,}"
    )
    path.write_bytes(data[:60])
    with pytest.raises(CheckpointError) as caught:
        pt_legacy.read(path)
    assert caught.value.message.startswith(f"{path}: damaged: the pickle from byte ")
    assert caught.value.message.endswith(
        "cannot be read at byte 60: truncated: the file ends inside the pickle"
    )


def test_a_storage_of_another_length_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model.pth"
    save({"w": torch.zeros(100)}, path)
    data = path.read_bytes()
    path.write_bytes(data[:-408] + struct.pack("<q", -1) + data[-400:])
    with pytest.raises(CheckpointError) as caught:
        pt_legacy.read(path)
    assert caught.value.message.endswith(
        "has 18,446,744,073,709,551,615 elements, but its tensors need 100"
    )


def pickled(*instructions: bytes) -> bytes:
    return b"\x80\x02" + b"".join(instructions) + b"."


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pickled(b"\x8e" + struct.pack("<Q", 2**62)), "longer than 33,554,432 bytes"),
        (pickled(b"o"), "weighin does not know the instruction OBJ"),
        (pickled(b"\xff"), "0xff is no instruction of a pickle"),
        (pickled(b"X" + struct.pack("<I", 2**31)), "longer than 33,554,432 bytes"),
        (pickled(b"h\x05"), "an instruction has no operand"),
        (pickled(b"t"), "a mark is missing"),
        (pickled(b"("), "a mark is in the place of a value"),
        (pickled(b"}(K\x01K\x02K\x01K\x03u"), "key 1 occurs twice"),
        (pickled(b"]K\x01K\x02s"), "an item is set on an object that is not a dict"),
        (pickled(b"K\x01K\x02a"), "an item is appended to an object that is not a list"),
        (pickled(b"K\x01Q"), "a persistent id does not describe a storage"),
        (pickled(b"K\x01)R"), "the pickle calls an object that is not a function"),
        (pickled(b"]Nb"), "a state is set on a list"),
        (pickled(b"ctorch\n" + b"x" * 2000 + b"\n"), "the name of a function or class is too long or truncated"),
        (pickled(b"ctorch._utils\n_rebuild_tensor_v2\n)R"), "torch._utils._rebuild_tensor_v2 has other arguments than torch.save writes"),
    ],
)  # fmt: skip
def test_a_crafted_pickle_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        state_pickle.load(tmp_path / "x", io.BytesIO(data))
    assert caught.value.message.endswith(f": {message}")


def test_a_pickle_that_grows_without_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pickle_machine, "_MOST_OBJECTS", 1000)
    lists = pickled(b"]" * 2000)
    # One list of pairs, read again and again by calls that each copy it.
    pairs = b"".join(b"M" + struct.pack("<H", number) + b"N\x86" for number in range(300))
    ordered = b"ccollections\nOrderedDict\nq\1"
    copies = pickled(b"](" + pairs + b"eq\0", ordered, b"h\1h\0\x85R" * 3)
    for data in (lists, copies):
        with pytest.raises(CheckpointError, match="more than 1,000 objects"):
            state_pickle.load(tmp_path / "x", io.BytesIO(data))


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_deep_and_wide_values_do_not_matter(tmp_path: Path, kind: type[dict[str, object]]) -> None:
    value = kind(a=[1, 2.5, None, True, ("x", b"y")], b={1: {2: {3: []}}})
    data = pickle.dumps(value, protocol=2)
    found = state_pickle.load(tmp_path / "x", io.BytesIO(data)).value
    assert list(found) == ["a", "b"]
    assert found["b"] == {1: {2: {3: []}}}
