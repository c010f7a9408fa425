"""What a container sees, and under which names."""

from dataclasses import replace
from pathlib import Path

from weighin.cell import Cell, Job, ModelSpec
from weighin.isolation.docker.mounts import Bind, place
from weighin.suite.registry import data_folder

CELL = Cell(ModelSpec("m", "x:y"), "baseline", "docker")


def test_our_own_strategy_is_found_in_the_code(tmp_path: Path) -> None:
    strategy = data_folder("strategies") / "baseline.py"
    inside, binds = place(
        Job(CELL, str(tmp_path / "w.pt"), str(tmp_path / "w.json"), str(strategy), (str(tmp_path),))
    )
    assert inside.checkpoint == "/weighin/checkpoint/w.pt"
    assert inside.manifest == "/weighin/manifest/w.json"
    assert inside.strategy_path == "/weighin/code/strategies/baseline.py"
    assert inside.python_path == ("/weighin/path/0",)
    assert inside.cell == CELL
    assert [bind.target for bind in binds] == [
        "/weighin/code/weighin",
        "/weighin/code/strategies",
        "/weighin/path/0",
        "/weighin/manifest/w.json",
        "/weighin/checkpoint/w.pt",
    ]


def test_a_strategy_of_ones_own_comes_alone_and_read_only(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").touch()
    inside, binds = place(Job(CELL, "/c/w.pt", "/c/w.json", str(tmp_path / "mine.py")))
    assert inside.strategy_path == "/weighin/strategy/mine.py"
    assert Bind(tmp_path / "mine.py", "/weighin/strategy/mine.py", writable=False) in binds
    assert [bind for bind in binds if (tmp_path / "secret.txt").is_relative_to(bind.source)] == []


def test_a_folder_is_one_bind(tmp_path: Path) -> None:
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "0.pt").touch()
    inside, binds = place(Job(CELL, str(tmp_path / "shards"), "/c/w.json", "/s/mine.py"))
    assert inside.checkpoint == "/weighin/checkpoint/shards"
    assert binds[-1] == Bind(tmp_path / "shards", "/weighin/checkpoint/shards")


def test_a_folder_of_links_is_given_file_by_file(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "abc").touch()
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "model.safetensors").symlink_to("../blobs/abc")
    _, binds = place(Job(CELL, str(snapshot), "/c/w.json", "/s/mine.py"))
    assert binds[-1] == Bind(
        tmp_path / "blobs" / "abc", "/weighin/checkpoint/snapshot/model.safetensors"
    )


def test_a_save_gets_one_folder_that_it_may_write_to(tmp_path: Path) -> None:
    job = Job(CELL, "/c/w.pt", "/c/w.json", "/s/mine.py", target=str(tmp_path))
    inside, binds = place(job)
    assert inside.target == "/weighin/written"
    assert [one for one in binds if one.writable] == [Bind(tmp_path, "/weighin/written", True)]


def test_a_preloaded_library_is_bound_read_only(tmp_path: Path) -> None:
    (library := tmp_path / "liballocator.so").touch()
    cell = replace(CELL, environment={"LD_PRELOAD": str(library)})
    _, binds = place(Job(cell, "/c/w.pt", "/c/w.json", "/s/mine.py"))
    assert Bind(library, "/weighin/preload/0/liballocator.so") in binds
