"""A worker sees its checkpoint through read-only mounts where this user may mount."""

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
