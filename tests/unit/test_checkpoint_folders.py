"""Shards, and one file for each key or module: others read them, and no index leads elsewhere."""

import json
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from factories import refused
from hypothesis import given
from hypothesis import strategies as st
from model_differences import state_differences
from safetensors.torch import load_file, save_file
from snapshots import Compare, answered

from weighin.stream import formats
from weighin.stream import write as writing
from weighin.stream.sharded_files import SHARD_INDEXES, file_name, module_of
from weighin.stream.slices import TensorPlan
from weighin.stream.write import run_parallel, write

BOTH = pytest.mark.parametrize("fmt", SHARD_INDEXES)
STATE = {name: torch.randn(5, 4) for name in ("embedding", "layers.0.a", "layers.1.b", "norm")}
PLANS = [
    *(TensorPlan(name, (5, 4), torch.float32) for name in STATE),
    TensorPlan("head", (5, 4), torch.float32, "embedding"),
]


def made(fmt: str, folder: Path, plans: list[TensorPlan] = PLANS) -> Path:
    write(fmt, folder, plans, lambda name: [STATE[name]], max_shard_bytes=160)
    return folder


def index_of(folder: Path) -> Path:
    (found,) = folder.glob("*.json")
    return found


def load(file: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(file) if file.suffix == ".safetensors" else torch.load(file))


@BOTH
def test_other_libraries_read_our_shards(tmp_path: Path, fmt: str) -> None:
    folder = made(fmt, tmp_path / "m")
    index = json.loads(index_of(folder).read_text())
    assert index["metadata"]["total_size"] == 4 * 80
    stem = "model" if fmt == "sharded" else "pytorch_model"
    suffix = "safetensors" if fmt == "sharded" else "bin"
    shards = [f"{stem}-0000{number}-of-00002.{suffix}" for number in (1, 2)]
    assert [*dict.fromkeys(index["weight_map"].values())] == shards
    assert [file.name for file in formats.files(folder)] == [index_of(folder).name, *shards]
    state = load(folder / shards[0]) | load(folder / shards[1])
    assert set(state) == set(index["weight_map"])
    if fmt == "sharded_pt":
        assert state.pop("head").data_ptr() == state["embedding"].data_ptr()
    assert state_differences(state, STATE) == []


@BOTH
@pytest.mark.parametrize("tied_at", [1, 3, 4])
def test_ties_of_shards_survive(tmp_path: Path, fmt: str, tied_at: int) -> None:
    plans = PLANS[:-1]
    plans.insert(tied_at, PLANS[-1])
    places = {place.name: place for place in formats.read(made(fmt, tmp_path / "m", plans))}
    assert [*places] == ([*STATE, "head"] if fmt == "sharded" else [plan.name for plan in plans])
    assert places["head"].place == places["embedding"].place


def test_shards_are_filled_in_order_and_a_large_tensor_has_its_own(tmp_path: Path) -> None:
    sizes = {"a": 10, "b": 30, "c": 10, "d": 100, "e": 1}
    plans = [TensorPlan(name, (size,), torch.uint8) for name, size in sizes.items()]
    write("sharded", tmp_path / "m", plans, None, max_shard_bytes=40)
    weight_map = json.loads(index_of(tmp_path / "m").read_text())["weight_map"]
    assert [int(name[6:11]) for name in weight_map.values()] == [1, 1, 2, 3, 4]


@BOTH
@pytest.mark.parametrize("changes", [{"norm": 0}, {"norm": None}, {"no": 1, "none": 0}])
def test_the_shards_count_where_the_index_contradicts_them(
    tmp_path: Path, changes: dict[str, int | None], fmt: str
) -> None:
    folder = made(fmt, tmp_path / "m", PLANS[:-1])
    shards = [file.name for file in formats.files(folder)[1:]]
    weight_map = json.loads((index := index_of(folder)).read_text())["weight_map"]
    weight_map |= {key: None if one is None else shards[one] for key, one in changes.items()}
    listed = {key: one for key, one in weight_map.items() if one}
    index.write_text(json.dumps({"weight_map": listed}))
    assert {one.name for one in formats.read(folder)} == set(STATE)
    assert formats.files(index)[0] == index


@BOTH
def test_a_tensor_in_two_shards_counts_once_if_it_is_equal(tmp_path: Path, fmt: str) -> None:
    folder = made(fmt, tmp_path / "m", PLANS[:-1])
    _, first, second = formats.files(folder)
    state = load(second)

    def add(tensor: torch.Tensor) -> None:
        both = state | {"embedding": tensor}
        save_file(both, second) if fmt == "sharded" else torch.save(both, second)

    add(STATE["embedding"].clone())
    found = formats.read(folder)
    assert [one.name for one in found].count("embedding") == 1
    one = STATE["embedding"]
    for other in (one + 1, one.half(), one[:2].clone()):
        add(other)
        message, repair = refused(formats.read, folder).split("\n")
        assert message == (
            f"{second}: 'embedding' is also in shard {first.name!r}, with other values"
        )
        assert f"from_pretrained takes the values in {second.name}" in repair


WRONG = Path(__file__).with_name("snapshots") / "damaged_indexes.txt"
"""Add a line ``$ LAYOUT INDEX``, and ``pytest --rewrite`` writes what is said of this index."""
WORDS = {
    "{deep}": "[" * 9999 + "]" * 9999,
    "{wide}": "[" + "[]," * 200_000 + "1]",
    "{long}": "x" * 300,
}


def test_what_is_wrong_with_an_index(tmp_path: Path, same: Compare) -> None:
    def answer(question: str) -> str:
        fmt, text = question.split(" ", 1)
        folder = made(fmt, tmp_path / str(len(list(tmp_path.iterdir()))))
        for word, meaning in WORDS.items():
            text = text.replace(word, meaning)
        (path := index_of(folder)).write_text(text)
        said = refused(formats.read, folder).replace(str(path), "INDEX")
        return said.replace(str(folder), "FOLDER")

    same(WRONG.name, answered(WRONG, answer))


def test_the_key_that_occurs_twice_is_found_among_many(tmp_path: Path) -> None:
    keys = ",".join(f'"{number}":1' for number in range(100_000))
    text = f'{{"weight_map": {{{keys},"99999":1}}}}'
    (tmp_path / "model.safetensors.index.json").write_text(text)
    start_s = time.process_time()
    assert "damaged: '99999' occurs twice" in refused(formats.read, tmp_path)
    assert time.process_time() - start_s < 20


@BOTH
def test_a_link_into_a_cache_is_followed_and_named_when_its_file_is_damaged(
    tmp_path: Path, fmt: str
) -> None:
    first = formats.files(folder := made(fmt, tmp_path / "m"))[1]
    first.rename(tmp_path / "blob")
    first.symlink_to("../blob")
    assert len(formats.read(folder)) == len(PLANS)
    first.write_bytes(first.read_bytes()[:-1])
    assert refused(formats.read, folder).startswith(f"{first}: ")


# One file for each key or module


NAMES = {
    "encoder.block.3.attn.weight": "encoder.block.3.attn.weight.pt", ".hidden": "%2Ehidden.pt", "": "%.pt",
    "../../etc/passwd": "%2E.%2F..%2Fetc%2Fpasswd.pt", "a\0b": "a%00b.pt", "100%": "100%25.pt",
    "größe": "gr%C3%B6%C3%9Fe.pt",
}  # fmt: skip
MODULES = {
    "trf_blocks.3.att.W_query.weight": "trf_blocks.3", "model.layers.0.mlp.0.weight": "model.layers.0",
    "tok_emb.weight": "tok_emb", "0.weight": "0", "a.0": "a", "scale": "scale", "": "", "../../x": "",
}  # fmt: skip


def test_a_key_becomes_a_name_in_the_folder_and_belongs_to_a_module() -> None:
    """To its first numbered module, or to its first word."""
    assert {key: file_name(key) for key in NAMES} == NAMES
    assert {key: module_of(key) for key in MODULES} == MODULES


@given(st.lists(st.text(max_size=300), unique=True, max_size=20))
def test_no_two_keys_get_one_name_and_none_leaves(keys: list[str]) -> None:
    keys += ["x" * 300, "x" * 299 + "y"]
    names = [file_name(key) for key in keys]
    assert len(set(names)) == len(names)
    for name in names:
        assert Path(name).name == name
        assert not name.startswith(".")
        assert len(name.encode()) < 255


def test_each_file_of_a_module_is_a_state_dict_as_the_index_says(tmp_path: Path) -> None:
    folder = made("per_module", tmp_path / "m")
    assert [one.name for one in formats.read(folder)] == [*STATE, "head"]
    state = torch.load(folder / "embedding.pt", weights_only=True)
    assert list(state) == ["embedding", "head"]
    assert state["embedding"].data_ptr() == state["head"].data_ptr()
    assert torch.equal(state["head"], STATE["embedding"])
    torch.save({"other": torch.zeros(3)}, folder / "norm.pt")
    assert "norm.pt: its keys differ from those that index" in refused(formats.read, folder)


# What is written piece by piece


def test_our_pt_is_torch_saves_file_byte_for_byte_but_for_its_id(tmp_path: Path) -> None:
    ours, theirs = (tmp_path / whose / "model.pt" for whose in ("ours", "theirs"))
    for path in (ours, theirs):
        path.parent.mkdir()
    write("pt", ours, PLANS, lambda name: STATE[name].split(2))
    torch.save(STATE | {"head": STATE["embedding"]}, theirs)
    with zipfile.ZipFile(ours) as a, zipfile.ZipFile(theirs) as b:
        assert a.testzip() is None
        assert ours.stat().st_size == theirs.stat().st_size
        for one, other in zip(a.infolist(), b.infolist(), strict=True):
            assert (one.filename, one.header_offset) == (other.filename, other.header_offset)
            assert one.filename.endswith("serialization_id") or a.read(one) == b.read(other)
    assert torch.load(ours, mmap=True).keys() == {*STATE, "head"}


@pytest.mark.parametrize("fmt", ["pt", "safetensors"])
@pytest.mark.parametrize("numel", [9, 11])
def test_pieces_of_another_length_are_refused(tmp_path: Path, numel: int, fmt: str) -> None:
    plans = [TensorPlan("w", (10,), torch.float32)]
    with pytest.raises(ValueError, match="for a tensor whose size"):
        write(fmt, tmp_path / "model", plans, lambda _: [torch.zeros(numel)])


def test_the_first_error_stops_the_jobs_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also amidst a job that began before."""
    done, noticed = list[int](), Event()

    class Pool(ThreadPoolExecutor):
        def shutdown(self, *arguments: Any, **options: Any) -> None:
            noticed.set()
            super().shutdown(*arguments, **options)

    def begin() -> None:
        noticed.wait(60)

    def work() -> None:
        time.sleep(0.01)
        done.append(1)

    def fail() -> None:
        raise OSError("disk full")

    monkeypatch.setattr(writing, "ThreadPoolExecutor", Pool)
    with pytest.raises(OSError, match="disk full"):
        run_parallel([begin, fail] + [work] * 1000)
    assert len(done) < 1000
