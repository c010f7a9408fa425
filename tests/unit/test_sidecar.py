"""Checksums go where a checkpoint goes: one byte that changes on the way is found, and named."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from weighin import formats
from weighin.cell import ModelSpec
from weighin.checkpoint import convert as converting
from weighin.checkpoint import convert_request, generate, sidecar
from weighin.checkpoint.checksum import checksum
from weighin.errors import CheckpointError, ConfigError

pytestmark = pytest.mark.usefixtures("torch_threads_restored")

STATE = {"a.weight": torch.arange(12.0).reshape(3, 4), "steps": torch.tensor(3)}
TIED = STATE | {"head": STATE["a.weight"]}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.save(TIED, tmp_path / "model.pt")
    return tmp_path / "model.pt"


def convert(source: Path, name: str, fmt: str, **changes: Any) -> Path:
    fields: dict[str, Any] = {"dtype": None, "max_shard_bytes": 2**40}
    fields |= {"checksums": sidecar.find(source)}
    converting.convert(source, source.parent / name, converting.Conversion(fmt, **fields | changes))
    return source.parent / name


def sums(path: Path) -> dict[str, str]:
    found = json.loads(path.read_text())
    assert (found["format"], found["version"]) == ("weighin-checksums", 1)
    tensors: dict[str, str] = found["tensors"]
    return tensors


def harm(path: Path, name: str) -> None:
    """Change one bit of one tensor's values."""
    (where,) = [one for one in formats.read(path)[1] if one.name == name]
    data = bytearray(where.file.read_bytes())
    data[where.offset + 5] ^= 1
    where.file.write_bytes(data)


WHOLE = {name: f"{str(one.dtype)[6:]} {checksum(one)}" for name, one in TIED.items()}


@pytest.mark.parametrize("fmt", formats.NAMES)
def test_verify_leaves_checksums_with_what_it_made(source: Path, fmt: str) -> None:
    assert sidecar.find(source) is None
    made = convert(source, "made", fmt, verify=True)
    found = sidecar.find(made)
    assert found == (made / sidecar.NAME if made.is_dir() else sidecar.beside(made))
    assert sums(found) == WHOLE


def test_without_verify_nothing_is_left_where_nothing_was(source: Path) -> None:
    convert(source, "made", "per_param")
    convert(source, "made.pt", "pt")
    assert {path.name for path in source.parent.iterdir()} == {"model.pt", "made", "made.pt"}


@pytest.mark.parametrize("verify", [False, True])
def test_checksums_are_carried_on_and_follow_a_cast(source: Path, verify: bool) -> None:
    first = convert(source, "one", "per_module", verify=True)
    second = convert(first, "two.safetensors", "safetensors", verify=verify)
    assert sums(sidecar.beside(second)) == WHOLE
    half = convert(second, "half", "dcp", dtype=torch.bfloat16, verify=verify)
    cast = checksum(STATE["a.weight"].to(torch.bfloat16))
    assert sums(half / sidecar.NAME) == {
        "a.weight": f"bfloat16 {cast}", "steps": WHOLE["steps"], "head": f"bfloat16 {cast}",
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [None, torch.float16])
@pytest.mark.parametrize("fmt", formats.NAMES)
def test_one_bit_that_changed_since_is_found(
    source: Path, fmt: str, dtype: torch.dtype | None
) -> None:
    first = convert(source, "one", fmt, verify=True)
    convert(first, "sound", "pt", dtype=dtype)
    harm(first, "a.weight")
    before = sorted(source.parent.rglob("*"))
    with pytest.raises(CheckpointError) as caught:
        convert(first, "two", "per_param", dtype=dtype)
    assert str(caught.value) == (
        f"{first}: has other values than {sidecar.find(first)} lists: 'a.weight', 'head'\n"
        "if it was changed on purpose, remove that file; if not, restore the checkpoint"
    )
    assert sorted(source.parent.rglob("*")) == before


def test_a_checkpoint_in_the_cache_is_compared_with_its_manifest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    entry = tmp_path / "cache" / "models" / "tied-0"
    entry.mkdir(parents=True)
    kwargs = {"vocab_size": 32, "emb_dim": 8, "n_layers": 1, "n_heads": 1}
    spec = ModelSpec("tied", "weighin.models.tied:tied", kwargs)
    for fmt in ("per_param", "pt"):
        generate.make(spec, seed=0, fmt=fmt, folder=entry)
        path = formats.checkpoint_in(entry, fmt)
        assert sidecar.find(path) == entry / "manifest.json"
        target = tmp_path / f"{fmt}.half"
        order = converting.Conversion(
            "pt", torch.bfloat16, 2**40, verify=True, checksums=sidecar.find(path)
        )
        converting.convert(path, target, order)
        manifest = json.loads((entry / "manifest.json").read_text())
        right = {
            one["name"]: f"bfloat16 {one['checksums']['bfloat16']}"
            for one in manifest["tensors"]
            if one["kind"] != "non_persistent_buffer"
        }
        assert sums(sidecar.beside(target)) == right
        harm(path, formats.read(path)[1][0].name)
        with pytest.raises(CheckpointError, match=r"has other values than .*manifest\.json lists"):
            converting.convert(path, tmp_path / "no", order)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "SUMS: truncated: the JSON object has no end"),
        ("{]}", "SUMS: damaged: Expecting property name"),
        ('{"format": "other"}', "SUMS: not a checksum file that this weighin reads"),
        (
            '{"format": "weighin-checksums", "version": 1, "tensors": {"steps": "int64 0"}}',
            "SUMS: damaged: 'steps' has no checksum",
        ),
        (
            '{"format": "weighin-checksums", "version": 1, "tensors": {"x": "int64 0000000000000000"}}',
            "MODEL: has other tensors or dtypes than SUMS lists: 'a.weight', 'steps', 'head'",
        ),
        (
            '{"format": "weighin-checksums", "version": 1}',
            "MODEL: has other tensors or dtypes than SUMS lists: 'a.weight', 'steps', 'head'",
        ),
    ],
)
def test_checksums_that_cannot_be_those_are_refused(source: Path, text: str, message: str) -> None:
    path = sidecar.beside(source)
    path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        convert(source, "new", "per_param")
    expected = message.replace("SUMS", str(path)).replace("MODEL", str(source))
    assert caught.value.message.startswith(expected)
    assert {one.name for one in source.parent.iterdir()} == {"model.pt", path.name}


def test_checksums_of_a_target_that_is_gone_are_not_left_to_the_new_one(source: Path) -> None:
    old = sidecar.beside(source.with_name("new.pt"))
    old.write_text("{}")
    with pytest.raises(ConfigError) as caught:
        convert(source, "new.pt", "pt")
    assert caught.value.message == f"{old} exists already"


def test_the_command_says_what_it_compared(source: Path) -> None:
    first = convert(source, "one", "per_module", verify=True)
    wish = convert_request.Wish(first, source.with_name("two.pt"), "pt", None, "5GiB", True)
    said = str(convert_request.convert(wish, Console(stderr=True)))
    assert said.endswith(
        f", source matches {first / sidecar.NAME}, every tensor's checksum verified"
    )
    assert sums(sidecar.beside(source.with_name("two.pt"))) == WHOLE
    harm(first, "a.weight")
    wish = convert_request.Wish(first, source.with_name("three"), "dcp", None, "5GiB", False)
    with pytest.raises(CheckpointError, match="has other values than"):
        convert_request.convert(wish, Console(stderr=True))
