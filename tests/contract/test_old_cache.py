"""A cache of an older weighin: used where it is right, replaced where it is not, never trusted wrongly."""

import hashlib
import json
import os
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from old_files import BUILDER, KWARGS, put_cache
from outside import Checkpoint, checkpoint, typed
from snapshots import Compare

MODEL = ("--model", BUILDER, "--set", f"kwargs={json.dumps(KWARGS)}", "--isolation", "process")


pytestmark = pytest.mark.usefixtures("warm")


@pytest.fixture
def entry(here: Path) -> Path:
    """The only entry of the old cache, in the cache that the commands of the test use."""
    return put_cache(here / "cache")


@pytest.fixture(scope="module")
def fresh(warm: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    """What a new cache would hold, by format."""
    folder = tmp_path_factory.mktemp("fresh")
    return {fmt: _sums(_ensure(folder, fmt).path) for fmt in ("pt", "per_param")}


def _ensure(folder: Path, fmt: str = "pt", **choices: Any) -> Checkpoint:
    kwargs = choices.pop("kwargs", KWARGS)
    return checkpoint(BUILDER, kwargs, fmt, folder, **choices)


def _sums(path: Path) -> dict[str, str]:
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def _state(path: Path) -> dict[str, tuple[int, int, int]]:
    return {
        str(file.relative_to(path)): (each.st_ino, each.st_size, each.st_mtime_ns)
        for file in sorted(path.rglob("*"))
        if file.is_file() and (each := file.stat())
    }


@pytest.mark.parametrize("fmt", ["pt", "per_param"])
def test_an_old_checkpoint_is_used_as_it_is(entry: Path, fmt: str) -> None:
    before = _state(entry / fmt)
    found = _ensure(entry.parents[1], fmt)
    assert (found.made, found.said) == (False, [])
    assert found.path == (entry / "pt/model.pt" if fmt == "pt" else entry / "per_param")
    assert _state(entry / fmt) == before


def test_a_load_from_the_old_cache_is_right(entry: Path) -> None:
    before = _state(entry / "pt")
    ended = typed("bench", *MODEL, "-s", "baseline", "--use", "none", "--out", "run")
    assert ended.code == 0, ended.err
    assert "making" not in ended.err
    assert _state(entry / "pt") == before


def _rewrite(path: Path, change: Callable[[Any], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _put(file: Path, content: bytes) -> None:
    if file.exists():
        file.chmod(0o644)
    file.write_bytes(content)


def _link(entry: Path) -> None:
    """Put a link to a copy in the place of the file; the copy is later and lies outside of the cache."""
    copy = entry.parents[2] / "out"
    (entry / "pt/model.pt").rename(copy)
    (entry / "pt/model.pt").symlink_to(copy)
    os.utime(copy)


def _kill(entry: Path) -> None:
    (entry / ".making-dead/pt").mkdir(parents=True)
    (entry / "pt.json").unlink()


HARMS: dict[str, Callable[[Path], object]] = {
    "other bytes": lambda e: _put(e / "pt/model.pt", b"x" * (e / "pt/model.pt").stat().st_size),
    "cut off": lambda e: _put(e / "pt/model.pt", (e / "pt/model.pt").read_bytes()[:-1]),
    "longer": lambda e: _put(e / "pt/model.pt", (e / "pt/model.pt").read_bytes() + b"x"),
    "empty": lambda e: _put(e / "pt/model.pt", b""),
    "changed now": lambda e: os.utime(e / "pt/model.pt"),
    "no file": lambda e: (e / "pt/model.pt").unlink(),
    "no folder": lambda e: shutil.rmtree(e / "pt"),
    "no marker": lambda e: (e / "pt.json").unlink(),
    "half a marker": lambda e: _put(e / "pt.json", (e / "pt.json").read_bytes()[:40]),
    "an empty marker": lambda e: _put(e / "pt.json", b""),
    "a marker of another format": lambda e: shutil.copy(e / "per_param.json", e / "pt.json"),
    "a marker that is a list": lambda e: _put(e / "pt.json", b"[]"),
    "a marker with another size": lambda e: _rewrite(e / "pt.json", lambda one: one["files"].update({"model.pt": [1, one["files"]["model.pt"][1]]})),
    "no manifest": lambda e: (e / "manifest.json").unlink(),
    "half a manifest": lambda e: _put(e / "manifest.json", (e / "manifest.json").read_bytes()[:200]),
    "a manifest of a later version": lambda e: _rewrite(e / "manifest.json", lambda one: one.update(schema=2)),
    "a manifest with a field more": lambda e: _rewrite(e / "manifest.json", lambda one: one.update(colour="red")),
    "a manifest without tensors": lambda e: _rewrite(e / "manifest.json", lambda one: one.pop("tensors")),
    "killed while it was made": _kill,
    "a link to a later file": _link,
}  # fmt: skip


@pytest.mark.parametrize("name", HARMS)
def test_what_is_harmed_is_made_again(
    entry: Path, fresh: dict[str, dict[str, str]], same: Compare, name: str
) -> None:
    whole, outside = _state(entry / "per_param"), Path("out")
    HARMS[name](entry)
    linked = outside.read_bytes() if outside.exists() else b""
    found = _ensure(entry.parents[1])
    assert found.made
    assert _sums(found.path) == fresh["pt"]
    assert not found.path.is_symlink()
    assert not [*entry.glob(".making-*")]
    assert not linked or outside.read_bytes() == linked
    again = _ensure(entry.parents[1])
    assert (again.made, again.said) == (False, [])
    assert _state(entry / "per_param") == whole
    said = "\n".join(found.said).replace(str(entry), "ENTRY")
    said = re.sub(r"[\d,]+ bytes, not [\d,]+", "N bytes, not M", said)
    same(f"old_cache/{name}.txt", f"{said}\n")


def test_a_load_finds_what_the_cache_cannot_see(entry: Path) -> None:
    """Neither the size nor the time of the file has changed: the checksums of the load decide."""
    file = entry / "pt/model.pt"
    state, content = file.stat(), bytearray(file.read_bytes())
    with zipfile.ZipFile(file) as archive:
        largest = max(archive.infolist(), key=lambda one: one.file_size)
        content[content.index(archive.read(largest))] ^= 1
    _put(file, bytes(content))
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    ended = typed("bench", *MODEL, "-s", "baseline", "--use", "none", "--out", "run")
    (record,) = map(json.loads, Path("run/records.jsonl").read_text().splitlines())
    assert (ended.code, record["outcome"]) == (5, "wrong_weights")
    assert "error: baseline: wrong_weights: " in ended.err


def test_other_values_void_every_format_that_was_made_with_them(entry: Path) -> None:
    """As with a torch whose random numbers are others."""
    text = (entry / "manifest.json").read_text()
    (entry / "manifest.json").write_text(text.replace('"float32": "', '"float32": "f', 1))
    (entry / "per_param.json").unlink()
    assert _ensure(entry.parents[1], "per_param").made
    assert not (entry / "pt").exists()
    assert _ensure(entry.parents[1], "pt").made


def test_another_seed_or_model_is_another_checkpoint(entry: Path) -> None:
    before, folder = _state(entry), entry.parents[1]
    others = [_ensure(folder, seed=1), _ensure(folder, kwargs=KWARGS | {"n_layers": 2})]
    assert all(one.made and entry not in one.path.parents for one in others)
    assert _state(entry) == before


@pytest.mark.parametrize("change", ["moved", "with leftovers"])
def test_a_cache_in_another_place_or_with_leftovers_is_used(entry: Path, change: str) -> None:
    before, cache = _state(entry / "pt"), entry.parents[1]
    if change == "moved":  # to another disk
        (cache / "models").rename(cache / "elsewhere")
        (cache / "models").symlink_to(cache / "elsewhere")
    else:  # of a killed weighin
        (entry / ".making-dead/pt").mkdir(parents=True)
        (entry / ".making-dead/pt/model.pt").write_bytes(b"half")
    assert not _ensure(cache).made
    assert _state(entry / "pt") == before
    assert not [*entry.glob(".making-*")]


def test_the_old_cache_is_listed_and_cleared(entry: Path, here: Path, same: Compare) -> None:
    (mine := here / "mine").mkdir()
    (mine / "file").write_text("mine")
    (here / "cache/models/link-0").symlink_to(mine)
    (here / "cache/notes.txt").write_text("mine")
    for fmt in ("pt.json", "per_param.json"):
        os.utime(entry / fmt, (1_800_000_000, 1_800_000_000 + (fmt == "pt.json")))
    listed = typed("cache", "list", "--json", "-").out.replace(str(here), "FOLDER")
    same("old_cache/list.json", listed)
    assert typed("cache", "clear", "--yes").code == 0
    assert not entry.exists()
    assert (mine / "file").read_text() == "mine"
    assert (here / "cache/notes.txt").exists()
