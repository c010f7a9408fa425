"""Each kind of harm, in each layout where it can occur, through each door of the library.

Reading, streaming and converting end in one CheckpointError that names the file and the place; nothing
is executed, nothing outside of the checkpoint is opened, and nothing is written. The kinds are in harms.py.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from harms import DATA, HARMS, STATE, Given, Harm, complaint
from state_files import write_state

from weighin.checkpoint.convert import Conversion
from weighin.stream import formats
from weighin.stream.model import load_streaming

pytestmark = pytest.mark.usefixtures("torch_threads_restored")


def suffix_of(layout: str) -> str:
    return ".pth" if layout == "pt_legacy" else str(formats.suffix_of(layout))


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    for name in DATA:
        write_state(folder / f"{name}{suffix_of(name)}", name, STATE)
    return folder


@pytest.fixture
def give(tmp_path: Path, sound: Path) -> Callable[[str], Given]:
    def given(layout: str) -> Given:
        source = sound / f"{layout}{suffix_of(layout)}"
        path = tmp_path / "given" / source.name
        path.parent.mkdir()
        outside = tmp_path / "outside" / "x"
        outside.parent.mkdir()
        one = Given(layout, path, outside, tmp_path / "EXECUTED")
        shutil.copytree(source, path) if source.is_dir() else shutil.copy(source, path)
        shutil.copy(one.data, outside)
        return one

    return given


def test_the_matrix_has_every_layout() -> None:
    assert set(DATA) == {*formats.NAMES, "pt_legacy"}


@pytest.mark.parametrize(
    ("layout", "harm", "where", "words"),
    [
        pytest.param(layout, harm, where, words, id=f"{name}-{layout}")
        for name, layouts, harm, where, words in HARMS
        for layout in layouts
    ],
)
def test_harm_is_named_and_does_none(
    layout: str, harm: Harm, where: str, words: str,
    give: Callable[[str], Given], opened: list[str], tmp_path: Path,
) -> None:  # fmt: skip
    given = give(layout)
    assert [one.name for one in formats.read(given.path)] == [*STATE]
    assert str(given.data) in opened
    harm(given)
    words = words.replace("{data}", given.data.name).replace("{outside}", str(given.outside))
    before = sorted(tmp_path.rglob("*"))
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 3)})
    weight = model.get_parameter("a.weight").detach().clone()
    conversion = Conversion(given.path, tmp_path / "new", "per_param", verify=True)
    doors: list[Callable[[], object]] = [
        lambda: formats.read(given.path),
        lambda: load_streaming(model, given.path),
        conversion.write,
    ]
    del opened[:]
    for door in doors:
        error = complaint(door)
        message = error.message
        assert message.startswith(str(getattr(given, where)))
        assert words in message
        assert len(message) < 1000
        assert error.repair
        is_proven = "truncated" in message or "empty file" in message
        assert is_proven or "download" not in error.repair
    assert torch.equal(model.get_parameter("a.weight"), weight)
    assert sorted(tmp_path.rglob("*")) == before
    assert not given.proof.exists()
    inside = [Path(os.path.normpath(one)) for one in opened if str(tmp_path) in one]
    assert all(tmp_path / "given" in one.parents for one in inside)
