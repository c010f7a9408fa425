"""The module of a user's own model is found where it lives."""

import os
from pathlib import Path

import pytest

from weighin.cell import ModelSpec
from weighin.errors import ConfigError
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


def complaint(name: str) -> str:
    with pytest.raises(ConfigError) as caught:
        registry.model(name)
    return str(caught.value)


def test_a_file_is_a_module_of_its_folder(here: Path) -> None:
    written(here / "deep/nets.py")
    assert registry.model("deep/nets.py:build", {"width": 2}) == ModelSpec(
        "build", "nets:build", {"width": 2}
    )
    assert user_code.import_path(["deep/nets.py:build", "gpt2-tiny"]) == (
        str(here / "deep"),
        str(here),
    )


def test_a_file_in_a_package_is_a_module_of_the_package(here: Path) -> None:
    for name in ("src/mine/__init__.py", "src/mine/nets/__init__.py", "src/mine/nets/large.py"):
        written(here / name)
    assert user_code.of_file("src/mine/nets/large.py:build") == (
        "mine.nets.large:build",
        here / "src",
    )
    assert user_code.of_file("src/mine/nets/__init__.py:build") == ("mine.nets:build", here / "src")


def test_the_folders_of_pythonpath_that_exist_come_last(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "lib").mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(here / "gone"), "", "lib", str(here)]))
    assert user_code.import_path(["a:b"]) == (str(here), str(here / "lib"))


NO_MODULE = (
    "is no name for a module of yours\n"
    "rename it, for example to nets.py: letters, digits and underscores, and no module's name of"
    " Python or weighin"
)


def test_a_file_that_is_missing_or_cannot_be_imported_is_refused(here: Path) -> None:
    assert complaint("nets.py:build") == (
        "--model nets.py:build: there is no file nets.py\nname a Python file and a function in it:"
        " --model path/nets.py:build"
    )
    written(here / "my-nets.py")
    assert complaint("my-nets.py:build") == (f"--model my-nets.py:build: 'my-nets' {NO_MODULE}")
    written(here / "queue.py")
    assert complaint("queue.py:build") == f"--model queue.py:build: 'queue' {NO_MODULE}"


def test_the_file_of_a_builder_is_known_without_importing_it(here: Path) -> None:
    file = written(here / "nets.py")
    file.write_text("raise RuntimeError")
    assert user_code.file_of("nets:build", [str(here)]) == file
    assert user_code.file_of("nets:build", [str(here / "gone")]) is None
    (here / "spaced").mkdir()
    assert user_code.file_of("spaced.nets:build", [str(here)]) == here / "spaced"
