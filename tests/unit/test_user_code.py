"""The module of a user's own model is found where it lives."""

import os
from pathlib import Path

import pytest
from factories import refused

from weighin.cell import ModelSpec
from weighin.suite import registry, user_code


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    return tmp_path


def written(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    return path


def test_a_file_is_a_module_of_its_folder_or_of_its_package(here: Path) -> None:
    written(here / "deep/nets.py")
    mine = ModelSpec("build", "nets:build", {"width": 2})
    assert registry.model("deep/nets.py:build", {"width": 2}) == mine
    found = user_code.import_path(["deep/nets.py:build", "gpt2-tiny"])
    assert found == (str(here / "deep"), str(here))
    for name in ("src/mine/__init__.py", "src/mine/nets/__init__.py", "src/mine/nets/large.py"):
        written(here / name)
    large = user_code.of_file("src/mine/nets/large.py:build")
    assert large == ("mine.nets.large:build", here / "src")
    package = user_code.of_file("src/mine/nets/__init__.py:build")
    assert package == ("mine.nets:build", here / "src")


def test_the_folders_of_pythonpath_that_exist_come_last(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "lib").mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here / "gone"), "", "lib", str(here)]))
    assert user_code.import_path(["a:b"]) == (str(here), str(here / "lib"))


NO_MODULE = (
    "cannot be the name of a module of yours\n"
    "rename it, for example to nets.py: letters, digits and underscores, and no module's name of"
    " Python or weighin"
)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("gone", "there is no file gone.py\nname a Python file and a function in it: --model path/nets.py:build"),
        ("my-nets", f"'my-nets' {NO_MODULE}"),
        ("queue", f"'queue' {NO_MODULE}"),
    ],
)  # fmt: skip
def test_a_file_that_is_missing_or_cannot_be_imported_is_refused(
    here: Path, name: str, said: str
) -> None:
    if name != "gone":
        written(here / f"{name}.py")
    model = f"{name}.py:build"
    assert refused(registry.model, model) == f"--model {model}: {said}"


def test_the_file_of_a_builder_is_known_without_importing_it(here: Path) -> None:
    file = written(here / "nets.py")
    file.write_text("raise RuntimeError")
    assert user_code.file_of("nets:build", [str(here)]) == file
    assert user_code.file_of("nets:build", [str(here / "gone")]) is None
    (here / "spaced").mkdir()
    assert user_code.file_of("spaced.nets:build", [str(here)]) == here / "spaced"
