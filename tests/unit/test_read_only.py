"""A worker sees its checkpoint through read-only mounts where this user may mount."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from weighin.isolation import read_only

WRITES = ("/bin/sh", "-c", 'echo new > "$0"; echo new > "$1"')


@pytest.mark.root
@pytest.mark.parametrize("is_folder", [False, True])
def test_only_the_checkpoint_is_read_only(tmp_path: Path, is_folder: bool) -> None:
    folder = tmp_path / "a checkpoint"
    folder.mkdir()
    model, beside = folder / "model.pt", tmp_path / "beside"
    model.write_text("old")
    checkpoint = folder if is_folder else model
    command = read_only.wrapped((*WRITES, str(model), str(beside)), str(checkpoint))
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "Read-only file system" in ended.stderr
    assert (model.read_text(), beside.read_text()) == ("old", "new\n")
    model.write_text("changed")  # the mount was the command's own


@pytest.mark.root
def test_a_checkpoint_that_weighin_made_is_read_only_with_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "models/tiny"
    (folder / "pt").mkdir(parents=True)
    checkpoint, manifest = folder / "pt/model.pt", folder / "manifest.json"
    for path in (checkpoint, manifest):
        path.write_text("old")
    writes = (*WRITES, str(checkpoint) + ".new", str(manifest))
    command = read_only.wrapped(writes, str(checkpoint), str(manifest))
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.stderr.count("Read-only file system") == 2
    assert manifest.read_text() == "old"
    assert not Path(f"{checkpoint}.new").exists()


def test_without_a_checkpoint_nothing_is_mounted() -> None:
    assert read_only.wrapped(WRITES, "") == WRITES


@pytest.fixture
def may_mount(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_only, "is_possible", lambda: True)


def mounted(*arguments: str) -> list[str]:
    """Return the paths that a command mounts read-only before it becomes WRITES."""
    command = read_only.wrapped(WRITES, *arguments)
    if command == WRITES:
        return []
    end = command.index("--", command.index("weighin"))
    assert command[:2] == ("unshare", "--mount")
    assert command[end + 1 :] == WRITES
    return list(command[command.index("weighin") + 1 : end])


@pytest.mark.usefixtures("may_mount")
def test_which_paths_are_read_only(tmp_path: Path) -> None:
    (ours := tmp_path / "models").mkdir()
    (ours / "model.pt").touch()
    (tmp_path / "link").symlink_to("models")
    model, manifest = str(ours / "model.pt"), str(ours / "manifest.json")
    assert mounted(model) == [model]
    assert mounted(str(tmp_path / "link")) == [str(ours)]
    assert mounted(model, manifest) == [str(ours)]
    assert mounted(model, str(tmp_path / "elsewhere" / "manifest.json")) == [model]
    assert mounted(str(ours / "missing.pt")) == []


@pytest.mark.usefixtures("may_mount")
def test_an_index_is_read_only_with_its_shards(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index.write_text(json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}))
    for shard in shards:
        (tmp_path / shard).touch()
    assert set(mounted(str(index))) == {str(tmp_path / name) for name in (index.name, *shards)}


@pytest.mark.parametrize(
    ("user", "program", "possible"), [(0, "true", True), (0, "false", False), (1000, "true", False),
                                      (0, "no-such-program", False)]
)  # fmt: skip
def test_who_may_mount(
    monkeypatch: pytest.MonkeyPatch, user: int, program: str, possible: bool
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(read_only, "_MOUNTING", (program,))
    read_only.is_possible.cache_clear()
    try:
        assert read_only.is_possible() is possible
    finally:
        read_only.is_possible.cache_clear()


def test_a_machine_that_refuses_a_mount_says_so_to_nobody(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    refuses = ("sh", "-c", "echo no; echo permission denied >&2; exit 1", "sh")
    monkeypatch.setattr(read_only, "_MOUNTING", refuses)
    read_only.is_possible.cache_clear()
    assert not read_only.is_possible()
    read_only.is_possible.cache_clear()
    assert capfd.readouterr() == ("", "")
