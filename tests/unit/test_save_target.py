"""The folder that a save writes to: its room, its end, and what is said of a tmpfs."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest

from weighin.errors import ConfigError
from weighin.probes import page_cache
from weighin.run import save_target
from weighin.units import GIB, MIB


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path))
    return tmp_path


def free(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=free_bytes))


def test_a_folder_is_there_for_one_save(cache: Path) -> None:
    with save_target.target(10) as folder:
        (folder / "model.pt").write_bytes(bytes(10))
        assert folder.parent == cache / "saving"
    assert list((cache / "saving").iterdir()) == []


def test_a_save_needs_room_for_the_model_and_64_mib(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free(monkeypatch, GIB + 64 * MIB)
    with save_target.target(GIB):
        pass
    free(monkeypatch, GIB + 64 * MIB - 1)
    with pytest.raises(ConfigError) as caught, save_target.target(GIB):
        pass
    assert str(caught.value) == (
        f"a save needs 1.062 GiB in {cache / 'saving'}, but only 1.062 GiB are free\n"
        "put the cache on another disk: WEIGHIN_CACHE=/path weighin ..."
    )


def test_files_that_stay_in_memory_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shards").mkdir()
    files = [tmp_path / "a", tmp_path / "shards" / "b"]
    for file in files:
        file.touch()
    kept: list[int | None] = [0, None, 3 * MIB]
    dropped: list[list[Path]] = []

    def drop(paths: Iterable[Path]) -> int | None:
        dropped.append(sorted(paths))
        return kept[len(dropped) - 1]

    monkeypatch.setattr(page_cache, "drop", drop)
    found = [save_target.doubts(tmp_path) for _ in kept]
    assert dropped == [files] * 3
    assert found[:2] == [[], []]
    assert found[2] == [
        "3.000 MiB of the written files could not be dropped from the page cache: on a tmpfs, files"
        " take up memory; put weighin's cache on a disk: WEIGHIN_CACHE=/path",
    ]


def test_folders_of_killed_saves_are_removed(cache: Path) -> None:
    (left := cache / "saving" / "left").mkdir(parents=True)
    with save_target.target(1) as mine:
        assert not left.exists()
        left.mkdir()
        assert save_target.remove_leftovers() == [f"files of a save in {left}"]
        assert mine.exists()
