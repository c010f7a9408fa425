"""One file per key: no key leaves the folder, and no damage goes unseen."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weighin.errors import CheckpointError
from weighin.formats.per_key import PER_PARAM, file_name


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("encoder.block.3.attn.weight", "encoder.block.3.attn.weight.pt"),
        ("../../etc/passwd", "%2E.%2F..%2Fetc%2Fpasswd.pt"),
        (".hidden", "%2Ehidden.pt"),
        ("a\0b", "a%00b.pt"),
        ("100%", "100%25.pt"),
        ("größe", "gr%C3%B6%C3%9Fe.pt"),
        ("", "%.pt"),
    ],
)
def test_a_key_becomes_a_name_in_the_folder(key: str, name: str) -> None:
    assert file_name(key) == name


def test_a_long_key_ends_in_a_hash() -> None:
    one, other = file_name("x" * 300), file_name("x" * 299 + "y")
    assert one != other
    assert len(one) < 210


@given(st.lists(st.text(max_size=300), unique=True, max_size=20))
def test_no_two_keys_get_one_name_and_none_leaves(keys: list[str]) -> None:
    names = [file_name(key) for key in keys]
    assert len(set(names)) == len(names)
    for name in names:
        assert Path(name).name == name
        assert not name.startswith(".")
        assert len(name.encode()) < 255


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.pt", "a.pt"):
        (tmp_path / name).write_bytes(b"x")
    PER_PARAM.write_index(tmp_path, ["b", "a", "tied"], {"tied": "b"})
    return tmp_path


def test_the_index_keeps_order_and_ties(folder: Path) -> None:
    assert PER_PARAM.read_index(folder) == (
        {"b.pt": ["b", "tied"], "a.pt": ["a"]}, {"tied": "b"}, ["b", "a", "tied"],
    )  # fmt: skip
    assert json.loads((folder / "index.json").read_text())["shared"] == {"tied": "b"}


def tensors(**files: object) -> dict[str, object]:
    return {"format": "per_param", "version": 1, "tensors": files, "shared": {}}


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (tensors(), "lists no tensors"),
        (tensors(c="c.pt"), "the file 'c.pt', which holds 'c', is missing"),
        (
            tensors(c="x" * 300),
            f"the file {'x' * 100!r}... (300 characters), which holds 'c', is missing",
        ),
        (tensors(c="a\0.pt"), "the file that holds 'c' lies outside the folder: 'a\\x00.pt'"),
        (tensors(a="../a.pt"), "the file that holds 'a' lies outside the folder: '../a.pt'"),
        (
            tensors(a="/etc/passwd"),
            "the file that holds 'a' lies outside the folder: '/etc/passwd'",
        ),
        (tensors(a=".."), "the file '..', which holds 'a', is missing"),
        (tensors(a=3), "the file that holds 'a' lies outside the folder: 3"),
        (tensors(a="a.pt", b="a.pt"), "'a' and 'b' are not tied but share 'a.pt'"),
        (
            tensors(a="a.pt", b="b.pt") | {"shared": {"b": "a"}},
            "'b' is tied to 'a' but is in another file",
        ),
        (tensors() | {"version": 2}, "index of version 2, but this weighin reads 1"),
        ({"format": "shards"}, "not an index of the format per_param"),
        ({"format": "per_param", "version": 1}, "damaged: no 'tensors' or no 'shared'"),
        ([], "damaged: not a JSON object"),
    ],
)
def test_a_damaged_index_is_named(folder: Path, index: object, message: str) -> None:
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        PER_PARAM.read_index(folder)
    assert caught.value.message == f"{folder / 'index.json'}: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "damaged: 'a' occurs twice"),
        ("{", "truncated: the JSON object has no end"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_an_unreadable_index_is_named(folder: Path, text: str | None, message: str) -> None:
    path = folder / "index.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        PER_PARAM.read_index(folder)
    assert caught.value.message.startswith(f"{path}: {message}")
