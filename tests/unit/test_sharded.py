"""Hugging Face's shards: both ways, in order, with ties; and no index leads out of its folder."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from weighin import formats
from weighin.errors import CheckpointError
from weighin.formats import foreign
from weighin.formats.base import TensorPlan
from weighin.formats.sharded import SHARDED, SHARDED_PT, Sharded, split

AGAIN = "write the folder again: model.save_pretrained(FOLDER), or weighin convert"
BOTH = pytest.mark.parametrize("layout", [SHARDED, SHARDED_PT], ids=lambda layout: layout.NAME)
STATE = {name: torch.randn(5, 4) for name in ("embedding", "a", "b", "norm")}
PLANS = [
    *(TensorPlan(name, (5, 4), torch.float32) for name in STATE),
    TensorPlan("head", (5, 4), torch.float32, "embedding"),
]


def write(layout: Sharded, folder: Path, plans: list[TensorPlan] = PLANS) -> Path:
    layout.write(folder, plans, lambda name: [STATE[name]], max_shard_bytes=160)
    return folder


def load(folder: Path, names: list[str]) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = {}
    for name in names:
        safe = name.endswith(".safetensors")
        state |= load_file(folder / name) if safe else torch.load(folder / name, weights_only=True)
    return state


@BOTH
def test_other_libraries_read_what_we_write(tmp_path: Path, layout: Sharded) -> None:
    folder = write(layout, tmp_path / "m")
    index = json.loads((folder / layout.index_name).read_text())
    assert index["metadata"]["total_size"] == 4 * 80
    shards = list(dict.fromkeys(index["weight_map"].values()))
    assert len(shards) == 2
    state = load(folder, shards)
    assert set(state) == set(index["weight_map"])
    assert all(torch.equal(state[name], STATE[name]) for name in STATE)
    if layout is SHARDED_PT:
        assert state["head"].data_ptr() == state["embedding"].data_ptr()


@BOTH
@pytest.mark.parametrize("tied_at", [1, 3, 4])
def test_order_and_ties_survive(tmp_path: Path, layout: Sharded, tied_at: int) -> None:
    plans = PLANS[:-1]
    plans.insert(tied_at, PLANS[-1])
    folder = write(layout, tmp_path / "m", plans)
    places = {place.name: place for place in layout.read(folder)}
    assert list(places) == [plan.name for plan in plans]
    assert (places["head"].file, places["head"].storage_offset) == (
        places["embedding"].file, places["embedding"].storage_offset,
    )  # fmt: skip
    for name, tensor in STATE.items():
        data = places[name].file.read_bytes()[places[name].offset :][:80]
        assert data == tensor.numpy().tobytes()


def test_names_are_those_of_the_convention(tmp_path: Path) -> None:
    names = [path.name for path in SHARDED.files(write(SHARDED, tmp_path / "a"))]
    assert names == [
        "model.safetensors.index.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    names = [path.name for path in SHARDED_PT.files(write(SHARDED_PT, tmp_path / "b"))]
    assert names == [
        "pytorch_model.bin.index.json",
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
    ]


@BOTH
def test_it_is_detected(tmp_path: Path, layout: Sharded) -> None:
    folder = write(layout, tmp_path / "m")
    assert formats.detect(folder).NAME == layout.NAME
    assert formats.read(folder)[0] == layout.NAME


def test_shards_are_filled_in_order_and_a_large_tensor_has_its_own() -> None:
    sizes = {"a": 10, "b": 30, "c": 10, "d": 100, "e": 1}
    plans = [TensorPlan(name, (size,), torch.uint8) for name, size in sizes.items()]
    names = [[plan.name for plan in shard] for shard in split(plans, 40)]
    assert names == [["a", "b"], ["c"], ["d"], ["e"]]


def change(folder: Path, layout: Sharded = SHARDED, **changes: object) -> None:
    path = folder / layout.index_name
    index = json.loads(path.read_text())
    weight_map = index["weight_map"]
    for key, value in changes.items():
        weight_map.pop(key) if value is None else weight_map.__setitem__(key, value)
    path.write_text(json.dumps(index))


FIRST, SECOND = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))


@pytest.mark.parametrize(
    ("changes", "file", "message"),
    [
        ({"a": "../m/" + FIRST}, "", f"the shard that holds 'a' lies outside the folder: '../m/{FIRST}'"),
        ({"a": "/etc/passwd"}, "", "the shard that holds 'a' lies outside the folder: '/etc/passwd'"),
        ({"a": ""}, "", "the shard that holds 'a' lies outside the folder: ''"),
        ({"a": "x\0y"}, "", "the shard that holds 'a' lies outside the folder: 'x\\x00y'"),
        ({"a": 3}, "", "the shard that holds 'a' lies outside the folder: 3"),
        ({"a": ".."}, "", "the shard '..', which holds 'a', is missing"),
        ({"a": "none"}, "", "the shard 'none', which holds 'a', is missing"),
        ({"a": "x" * 10_000}, "", f"the shard '{'x' * 100}'... (10,000 characters), which holds 'a', is missing"),
        ({"x" * 10_000: "none"}, "", f"the shard 'none', which holds '{'x' * 100}'... (10,000 characters), is missing"),
    ],
)  # fmt: skip
def test_an_index_that_lies_is_named(
    tmp_path: Path, changes: dict[str, str | None], file: str, message: str
) -> None:
    folder = write(SHARDED, tmp_path / "m")
    change(folder, **changes)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError) as caught:
        SHARDED.read(folder)
    assert caught.value.message == f"{folder / (file or SHARDED.index_name)}: {message}"
    missing = f"add the missing file to {folder}"
    assert caught.value.repair == (missing if message.endswith("is missing") else AGAIN)


@pytest.mark.parametrize(
    ("changes", "note"),
    [
        ({"../../x": FIRST}, "1 key in no shard (../../x)"),
        ({"": FIRST, "y": SECOND}, "2 keys in no shard (, y)"),
        ({"a": SECOND}, "1 key in another shard (a)"),
        ({"a": None}, "1 key not listed (a)"),
    ],
)
@BOTH
def test_an_index_that_contradicts_its_shards_is_noted_and_the_shards_count(
    tmp_path: Path, changes: dict[str, str | None], note: str, layout: Sharded
) -> None:
    folder = write(layout, tmp_path / "m", PLANS[:-1])
    names = {FIRST: layout.files(folder)[1].name, SECOND: layout.files(folder)[2].name}
    assert layout.read(folder).notes == ()
    change(folder, layout, **{key: names[name] if name else None for key, name in changes.items()})
    slices = layout.read(folder)
    index = folder / layout.index_name
    assert slices.notes == (f"{index}: contradicts its shards, which count: {note}",)
    assert {one.name for one in slices} == set(STATE)
    assert layout.files(index)[0] == index


@BOTH
def test_a_tensor_in_two_shards_counts_once_if_its_values_are_equal(
    tmp_path: Path, layout: Sharded
) -> None:
    folder = write(layout, tmp_path / "m", PLANS[:-1])
    index, first, second = layout.files(folder)
    state = load(folder, [second.name])

    def add(tensor: torch.Tensor) -> None:
        both = state | {"a": tensor}
        save_file(both, second) if layout is SHARDED else torch.save(both, second)

    add(STATE["a"].clone())
    slices = layout.read(folder)
    assert [one.name for one in slices].count("a") == 1
    assert slices.notes == (
        f"{index}: contradicts its shards, which count: 1 key in two shards (a)",
    )
    for other in (STATE["a"] + 1, STATE["a"].half(), STATE["a"][:2].clone()):
        add(other)
        with pytest.raises(CheckpointError) as caught:
            layout.read(folder)
        assert str(caught.value) == (
            f"{second}: 'a' is also in shard {first.name!r}, with other values\n"
            f"decide which values are right, and write the shards again without the other tensor; from_pretrained takes the values in {second.name}"
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "truncated: the JSON object has no end"),
        ("{]}", "damaged: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("version https://git-lfs.github.com/spec/v1\n", "a git-lfs pointer (a small text file that stands for the real file), not the checkpoint"),
        ("<html>Sign in</html>", "an HTML page, not a checkpoint"),
        ("[]", "damaged: not a JSON object"),
        ("{}", "damaged: no 'weight_map'"),
        ('{"weight_map": {}}', "damaged: no 'weight_map'"),
        ('{"weight_map": {"a": "x", "a": "y"}}', "damaged: 'a' occurs twice"),
        ('{"a":' + "[" * 9999 + "]" * 9999 + "}", "damaged: its values are nested too deeply in one another"),
        ('{"a":[' + "[]," * 200_000 + "1]}", "damaged: too many values are nested in one another"),
        (
            '{"metadata": {"weighin.order": ["a"]}, "weight_map": {"a": "none"}}',
            "the shard 'none', which holds 'a', is missing",
        ),
        (
            '{"metadata": {"weighin.order": 1}, "weight_map": {"a": "none"}}',
            "weighin.order is not a list of the checkpoint's tensor names",
        ),
    ],
)  # fmt: skip
def test_a_damaged_index_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / SHARDED.index_name
    path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        SHARDED.read(tmp_path)
    assert caught.value.message == f"{path}: {message}"


def test_an_index_of_endless_length_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(foreign, "MOST_JSON_BYTES", 10)
    (tmp_path / SHARDED.index_name).write_text('{"weight_map": {}}')
    with pytest.raises(CheckpointError, match="the file's 18 bytes are more than weighin reads"):
        SHARDED.read(tmp_path)


def test_a_missing_shard_is_named_before_any_is_read(tmp_path: Path) -> None:
    folder = write(SHARDED, tmp_path / "m")
    (folder / SECOND).unlink()
    for call in (SHARDED.read, SHARDED.files):
        with pytest.raises(CheckpointError) as caught:
            call(folder)
        index = folder / SHARDED.index_name
        assert caught.value.message == f"{index}: the shard '{SECOND}', which holds 'b', is missing"


def test_a_link_into_a_cache_is_followed(tmp_path: Path) -> None:
    folder = write(SHARDED, tmp_path / "m")
    (folder / FIRST).rename(tmp_path / "blob")
    (folder / FIRST).symlink_to("../blob")
    assert len(SHARDED.read(folder)) == 5


def test_a_damaged_shard_is_named_itself(tmp_path: Path) -> None:
    folder = write(SHARDED, tmp_path / "m")
    data = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(data[:-1])
    with pytest.raises(CheckpointError) as caught:
        SHARDED.read(folder)
    assert caught.value.message.startswith(f"{folder / FIRST}: truncated: tensor 'a' ends at byte")
