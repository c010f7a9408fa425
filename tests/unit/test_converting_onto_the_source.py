"""Converting a checkpoint onto itself, under any of its names: refused, and nothing is changed."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from weighin.checkpoint.convert import Conversion
from weighin.errors import ConfigError


def _itself(source: Path) -> Path:
    return source


def _by_another_path(source: Path) -> Path:
    return source.parent / "other" / ".." / source.name


def _hard_link(source: Path) -> Path:
    link = source.with_name("hard.pt")
    os.link(source, link)
    return link


def _link(source: Path) -> Path:
    link = source.with_name("link.pt")
    link.symlink_to(source)
    return link


pytestmark = pytest.mark.usefixtures("torch_threads_restored")

ONTO: list[Callable[[Path], Path]] = [_itself, _by_another_path, _hard_link, _link]


@pytest.mark.parametrize("name_again", ONTO)
def test_a_file_is_not_converted_onto_itself(
    tmp_path: Path, name_again: Callable[[Path], Path]
) -> None:
    (tmp_path / "other").mkdir()
    source = tmp_path / "model.pt"
    torch.save({"weight": torch.randn(40, 30)}, source)
    target = name_again(source)
    before = source.read_bytes(), source.stat().st_mtime_ns, sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError) as caught:
        Conversion(source, target, dtype="bfloat16").write()
    assert caught.value.message == f"{target} exists already"
    assert (source.read_bytes(), source.stat().st_mtime_ns, sorted(tmp_path.iterdir())) == before


@pytest.mark.parametrize("linked", [False, True], ids=["itself", "link"])
def test_a_folder_is_not_converted_onto_itself_or_into_itself(tmp_path: Path, linked: bool) -> None:
    source = tmp_path / "source.pt"
    torch.save({"weight": torch.randn(40, 30)}, source)
    folder = tmp_path / "folder"
    Conversion(source, folder, "per_param").write()
    target = folder
    if linked:
        target = tmp_path / "link"
        target.symlink_to(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ConfigError) as caught:
        Conversion(folder, target, "per_param").write()
    assert caught.value.message == f"{target} exists already"
    with pytest.raises(ConfigError) as caught:
        Conversion(folder, target / "new", "per_param").write()
    assert caught.value.message == f"{target / 'new'} is inside {folder}"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
