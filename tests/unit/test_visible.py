"""What a container sees: each path under its own name, and no folder merely because it is there."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import weighin
from weighin.cell import Cell, Job, ModelSpec
from weighin.isolation import visible
from weighin.suite.registry import data_folder

CELL = Cell(ModelSpec("m", "x:y"), "baseline", "docker")


def job(checkpoint: Path, **fields: object) -> Job:
    base = Job(CELL, str(checkpoint), "/c/w.json", "/s/mine.py")
    return replace(base, **fields)  # type: ignore[arg-type]


def seen(checkpoint: Path, **fields: object) -> set[str]:
    return set(visible.of_job(job(checkpoint, **fields))) - {"/c/w.json", "/s/mine.py", ""}


def test_the_machine_is_its_programs_this_python_and_weighin() -> None:
    found = visible.of_machine()
    binds = visible.binds(found)
    assert {"/usr", "/etc/passwd", sys.prefix} <= {*found}
    for path in (sys.executable, weighin.__file__, data_folder("strategies") / "baseline.py"):
        assert any(Path(path).is_relative_to(target) for target in binds), path
    assert not {"/", "/etc", "/home", "/root", str(Path.cwd())} & {*binds}


@pytest.mark.parametrize("place", ["home", "here", "root"])
def test_no_folder_is_seen_merely_because_it_is_in_the_path(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder := tmp_path / "folder").mkdir()
    if place == "home":
        monkeypatch.setenv("HOME", str(folder))
    elif place == "here":
        monkeypatch.chdir(folder)
    else:
        folder = Path("/")
    (other := tmp_path / "other").mkdir()
    monkeypatch.setattr(sys, "path", ["", str(folder), str(other)])
    found = visible.of_machine()
    assert str(folder) not in found
    assert str(other) in found


def test_a_package_that_is_installed_as_editable_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, editable in (("mine", True), ("other", False)):
        (folder := tmp_path / f"{name}-1.0.dist-info").mkdir()
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
        origin = {"url": f"file:///src/{name}%20x", "dir_info": {"editable": editable}}
        (folder / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setattr(visible, "_editable", visible._editable.__wrapped__)
    assert visible._editable() == ("/src/mine x",)


def test_a_strategy_of_ones_own_comes_alone(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").touch()
    given = {"strategy_path": f"{tmp_path}/mine.py", "use_path": f"{tmp_path}/use.py"}
    found = seen(Path("/c/w.pt"), python_path=("/p",), **given)
    assert found == {"/c/w.pt", *given.values(), "/p"}


def test_an_index_comes_with_its_shards(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index.write_text(json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}))
    for key, name in zip("abc", (*shards, "other.safetensors"), strict=True):
        save_file({key: torch.zeros(1)}, tmp_path / name)
    (tmp_path / "config.json").touch()
    assert {Path(path).name for path in seen(index)} == {index.name, *shards}


def test_a_model_of_a_library_comes_with_the_settings_beside_its_weights(tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json", "generation_config.json", "README.md"):
        (tmp_path / name).touch()
    file, folder = tmp_path / "model.safetensors", tmp_path
    cell = replace(CELL, model=ModelSpec("m", "weighin.models.pretrained:from_config"))
    names = {"model.safetensors", "config.json", "generation_config.json"}
    assert seen(file, cell=cell) == {f"{tmp_path}/{name}" for name in names}
    assert seen(folder, cell=cell) == {str(folder)}
    assert seen(file) == {str(file)}


def test_the_targets_of_links_in_a_folder_are_seen_too(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (blob := tmp_path / "blobs" / "abc").touch()
    (snapshot := tmp_path / "snapshot").mkdir()
    (link := snapshot / "model.safetensors").symlink_to("../blobs/abc")
    binds = visible.binds(seen(snapshot))
    assert binds == {str(snapshot): str(snapshot), str(link): str(blob), str(blob): str(blob)}


def test_a_path_is_bound_once_by_its_own_and_its_real_name(tmp_path: Path) -> None:
    (inner_folder := tmp_path / "outer" / "inner").mkdir(parents=True)
    (inner_folder / "file").touch()
    (tmp_path / "link").symlink_to("outer")
    inner, outer, link = str(inner_folder), str(tmp_path / "outer"), str(tmp_path / "link")
    assert visible.binds([link]) == {outer: outer, link: outer}
    within = [f"{inner}/file", outer, inner, f"{outer}/", f"{outer}/gone", "", "/"]
    assert visible.binds(within) == {outer: outer}
    assert visible.binds([outer], [inner]) == {outer: outer, inner: inner}  # in another way
    assert visible.binds([inner], [outer]) == {outer: outer}
