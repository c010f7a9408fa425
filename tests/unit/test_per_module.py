"""One file per module: which keys belong together, and an index that cannot lie."""

import json
from pathlib import Path

import pytest
import torch

from weighin.checkpoint.checksum import pieces_of
from weighin.errors import CheckpointError
from weighin.formats.base import TensorPlan
from weighin.formats.per_key import PER_MODULE, module_of

STATE = {
    "emb.weight": torch.arange(6.0).reshape(2, 3),
    "layers.0.a": torch.ones(2),
    "layers.1.a": torch.zeros(3),
    "layers.0.b": torch.ones(4),
    "head.weight": torch.arange(6.0).reshape(2, 3),
}


@pytest.mark.parametrize(
    ("key", "module"),
    [
        ("trf_blocks.3.att.W_query.weight", "trf_blocks.3"),
        ("model.layers.0.mlp.0.weight", "model.layers.0"),
        ("layers.10.bias", "layers.10"),
        ("tok_emb.weight", "tok_emb"),
        ("0.weight", "0"),
        ("a.0", "a"),
        ("scale", "scale"),
        ("", ""),
        ("../../x", ""),
    ],
)
def test_a_key_belongs_to_its_first_numbered_module_or_its_first_word(
    key: str, module: str
) -> None:
    assert module_of(key) == module


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tensors = [
        TensorPlan(name, tuple(one.shape), one.dtype, "emb.weight" if "head" in name else None)
        for name, one in STATE.items()
    ]
    PER_MODULE.write(tmp_path / "split", tensors, lambda name: pieces_of(STATE[name]))
    return tmp_path / "split"


def test_the_index_of_a_model_of_many_modules_is_read(folder: Path) -> None:
    index = json.loads((folder / "index.json").read_text())
    names = {f"layers.{number}.pt": [f"layers.{number}.weight"] for number in range(20_000)}
    index |= {"files": names, "order": [key for (key,) in names.values()], "shared": {}}
    (folder / "index.json").write_text(json.dumps(index))
    for name in names:
        (folder / name).touch()
    assert list(PER_MODULE.read_index(folder)[0]) == list(names)


def test_each_file_is_a_state_dict_and_the_order_is_kept(folder: Path) -> None:
    assert [one.name for one in PER_MODULE.read(folder)] == list(STATE)
    files = PER_MODULE.read_index(folder)[0]
    assert files == {
        "emb.pt": ["emb.weight", "head.weight"],
        "layers.0.pt": ["layers.0.a", "layers.0.b"],
        "layers.1.pt": ["layers.1.a"],
    }
    for name, keys in files.items():
        state = torch.load(folder / name, weights_only=True)
        assert list(state) == keys
        assert all(torch.equal(state[key], STATE[key]) for key in keys)
    state = torch.load(folder / "emb.pt", weights_only=True)
    assert state["emb.weight"].data_ptr() == state["head.weight"].data_ptr()


def broken(**changes: object) -> dict[str, object]:
    return {
        "format": "per_module",
        "version": 1,
        "files": {"emb.pt": ["emb.weight", "head.weight"]},
        "shared": {"head.weight": "emb.weight"},
        "order": ["emb.weight", "head.weight"],
    } | changes


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (broken(version=2), "index of version 2, but this weighin reads 1"),
        (broken(order=3), "damaged: no 'files' or no 'shared' or no 'order'"),
        (broken(files={"no.pt": ["a"]}), "the file 'no.pt', which holds 'a', is missing"),
        (
            broken(files={"../x": ["a"]}),
            "the file that holds 'a' lies outside the folder: '../x'",
        ),
        (broken(files={"emb.pt": []}), "the keys of file 'emb.pt' are not a list of strings"),
        (broken(files={"emb.pt": ["a", "a"]}), "'a' occurs twice"),
        (broken(files={"emb.pt": ["a"], "layers.1.pt": ["a"]}), "'a' occurs twice"),
        (
            broken(order=["emb.weight"]),
            "'order' must name each tensor of 'files' exactly once, and no other",
        ),
        (
            broken(order=["emb.weight"] * 2),
            "'order' must name each tensor of 'files' exactly once, and no other",
        ),
        (
            broken(shared={"head.weight": "x"}),
            "'head.weight' is tied to 'x' but is in another file",
        ),
        (broken(shared={"head.weight": []}), "'head.weight' is tied to [] but is in another file"),
    ],
)
def test_a_damaged_index_is_named(folder: Path, index: object, message: str) -> None:
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError) as caught:
        PER_MODULE.read(folder)
    assert caught.value.message == f"{folder / 'index.json'}: {message}"


def test_a_tie_that_the_file_does_not_have_is_named(folder: Path) -> None:
    torch.save(
        {key: STATE[key].clone() for key in ("emb.weight", "head.weight")}, folder / "emb.pt"
    )
    with pytest.raises(CheckpointError) as caught:
        PER_MODULE.read(folder)
    assert caught.value.message.endswith(
        "'head.weight' is tied to 'emb.weight' but stored elsewhere"
    )


def test_a_file_with_other_keys_is_named(folder: Path) -> None:
    torch.save({"layers.1.c": torch.zeros(3)}, folder / "layers.1.pt")
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.pt: its keys differ from those that index\.json lists"
    ):
        PER_MODULE.read(folder)
