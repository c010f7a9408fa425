"""What a container sees, and under which names."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from weighin.cell import Cell, Job, ModelSpec
from weighin.errors import ConfigError
from weighin.isolation.docker import packages
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


def test_a_use_of_ones_own_comes_alone_and_one_of_ours_is_in_the_code(tmp_path: Path) -> None:
    job = Job(CELL, "/c/w.pt", "/c/w.json", "/s/mine.py")
    assert place(job)[0].use_path == ""
    inside, binds = place(replace(job, use_path=str(tmp_path / "use.py")))
    assert inside.use_path == "/weighin/use/use.py"
    assert Bind(tmp_path / "use.py", "/weighin/use/use.py") in binds
    ours = data_folder("strategies") / "baseline.py"
    inside, binds = place(replace(job, use_path=str(ours)))
    assert inside.use_path == "/weighin/code/strategies/baseline.py"
    assert ours.resolve() not in [bind.source for bind in binds]


def test_an_index_comes_with_its_shards(tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    shards = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index.write_text(json.dumps({"weight_map": dict(zip("ab", shards, strict=True))}))
    for name in (*shards, "config.json", "other.safetensors"):
        (tmp_path / name).touch()
    inside, binds = place(Job(CELL, str(index), "/c/w.json", "/s/mine.py"))
    assert inside.checkpoint == f"/weighin/checkpoint/{index.name}"
    found = {bind.source.name for bind in binds if bind.target.startswith("/weighin/checkpoint/")}
    assert found == {index.name, *shards}


def test_a_model_of_a_library_gets_the_settings_beside_its_weights(tmp_path: Path) -> None:
    for name in ("model.safetensors", "config.json", "generation_config.json", "README.md"):
        (tmp_path / name).touch()
    cell = replace(CELL, model=ModelSpec("m", "weighin.models.pretrained:from_config"))
    job = Job(cell, str(tmp_path / "model.safetensors"), "/c/w.json", "/s/mine.py")
    targets = [bind.target for bind in place(job)[1] if "/checkpoint/" in bind.target]
    names = ("model.safetensors", "config.json", "generation_config.json")
    assert targets == [f"/weighin/checkpoint/{name}" for name in names]
    job = replace(job, checkpoint=str(tmp_path))  # the folder has them
    targets = [bind.target for bind in place(job)[1] if "/checkpoint/" in bind.target]
    assert targets == [f"/weighin/checkpoint/{tmp_path.name}"]
    job = replace(job, cell=CELL, checkpoint=str(tmp_path / "model.safetensors"))
    targets = [bind.target for bind in place(job)[1] if "/checkpoint/" in bind.target]
    assert targets == ["/weighin/checkpoint/model.safetensors"]


def test_a_preloaded_library_is_bound_read_only(tmp_path: Path) -> None:
    (library := tmp_path / "liballocator.so").touch()
    cell = replace(CELL, environment={"LD_PRELOAD": str(library)})
    _, binds = place(Job(cell, "/c/w.pt", "/c/w.json", "/s/mine.py"))
    assert Bind(library, "/weighin/preload/0/liballocator.so") in binds


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages: ``outer`` requires ``inner`` and ``fast``, which is compiled."""
    folder = tmp_path / "site"
    for name, requires in (
        ("outer", ["inner>=1", "fast", "torch", "gone"]),
        ("inner", []),
        ("fast", []),
    ):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
        metadata = folder / f"{name}-1.0.dist-info"
        metadata.mkdir()
        lines = [f"Requires-Dist: {one}" for one in requires]
        (metadata / "METADATA").write_text("\n".join([f"Name: {name}", "Version: 1.0", *lines]))
        (metadata / "RECORD").write_text(f"{name}/__init__.py,,\n{metadata.name}/METADATA,,\n")
    (folder / "fast/core.so").touch()
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    packages._lacking.cache_clear()
    return folder


def of(builder: str, mounts: tuple[str, ...] = ()) -> Job:
    cell = Cell(ModelSpec("m", builder), "baseline", "docker")
    return Job(cell, "/c/w.pt", "/c/w.json", "/s/mine.py", ("/gone",), mounts=mounts)


def test_an_installed_package_that_the_image_lacks_is_mounted_with_those_it_requires(
    site: Path,
) -> None:
    inside, binds = place(of("outer.nets:build"))
    assert inside.python_path == ("/weighin/path/0", "/weighin/packages")
    names = ["outer", "outer-1.0.dist-info", "inner", "inner-1.0.dist-info"]
    wanted = {Bind(site / name, f"/weighin/packages/{name}") for name in names}
    assert {bind for bind in binds if bind.target.startswith("/weighin/packages/")} == wanted
    assert sorted(packages.lacking(of("outer.nets:build")).notes) == [
        f"mounting {site}/outer read-only: the image has no package outer",
        "mounting inner read-only: outer requires it, and the image lacks it",
        "not mounting fast, which the image lacks: it contains compiled code",
    ]


def test_a_package_of_the_image_and_an_unknown_one_are_not_mounted(site: Path) -> None:
    for builder in (
        "torch.nn:Linear",
        "numpy:array",
        "weighin.models.gpt2:gpt2",
        "gone:x",
        "json:x",
    ):
        assert packages.lacking(of(builder)) == packages.Lacking()


def test_a_package_with_compiled_code_is_an_error_unless_the_user_mounts_it(site: Path) -> None:
    with pytest.raises(ConfigError, match=r"compiled code.*fast/core\.so"):
        place(of("fast:build"))
    inside, binds = place(of("fast:build", (str(site / "fast"),)))
    assert inside.python_path == ("/weighin/path/0", str(site))
    assert Bind(site / "fast", str(site / "fast")) in binds


def test_a_mounted_path_is_read_only_and_the_same_inside(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    inside, binds = place(of("weighin.models.gpt2:gpt2", (str(tmp_path / "data"),)))
    assert Bind(tmp_path / "data", str(tmp_path / "data"), writable=False) in binds
    assert inside.python_path == ("/weighin/path/0",)
