"""Formats, manifests and offsets; and one line for whatever is not a checkpoint."""

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from weighin.checkpoint.manifest import Manifest, TensorEntry, read_manifest
from weighin.errors import CheckpointError, UnknownName
from weighin.stream import formats
from weighin.stream.slices import TensorPlan
from weighin.stream.torch_files import open_zip, read_one
from weighin.stream.write import write as write_checkpoint

AGAIN = "copy or download the file again"


class Command:
    """Would end the tests if pickle itself read it."""

    def __reduce__(self) -> tuple[object, ...]:
        return (os.system, (f"kill {os.getpid()}",))


def entry(name: str, shape: tuple[int, ...], dtype: str, **options: Any) -> TensorEntry:
    numel = torch.Size(shape).numel()
    fields: dict[str, Any] = {"kind": "parameter", "shared_with": None}
    fields |= {"checksums": dict.fromkeys(("float32", "bfloat16"), "00")} | options
    return TensorEntry(name, shape, dtype, numel * getattr(torch, dtype).itemsize, **fields)


MANIFEST = Manifest(
    "tiny",
    "package:build",
    "seed 0",
    (
        entry("b", (3, 5), "float32"),
        entry("a", (2,), "float32", kind="persistent_buffer"),
        entry("tied", (3, 5), "float32", shared_with="b"),
        entry("steps", (), "int64", kind="persistent_buffer", checksums={"int64": "11"}),
        entry("table", (4,), "float32", kind="non_persistent_buffer"),
    ),
)


def test_a_manifest_survives_the_disk_and_counts_tied_tensors_once(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path / "manifest.json")
    assert read_manifest(tmp_path / "manifest.json") == MANIFEST
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    assert MANIFEST.checkpoint_bytes == 60 + 8 + 8
    assert MANIFEST.largest_bytes == 60
    assert MANIFEST.model_bytes() == 60 + 8 + 8 + 16
    assert MANIFEST.model_bytes("bfloat16") == 30 + 4 + 8 + 8
    assert MANIFEST.entry("steps").bytes == 8


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "damaged manifest: JSONDecodeError"),
        ('{"schema": 2}', "another version of weighin wrote this manifest"),
        ('{"schema": 1, "tensors": [{}]}', "damaged manifest: "),
    ],
)
def test_a_damaged_manifest_is_named(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_manifest(path)
    assert caught.value.message.startswith(f"{path}: {problem}")


def test_layouts_by_what_is_there(tmp_path: Path) -> None:
    file, folder = tmp_path / "m.pt", tmp_path / "split"
    torch.save({"w": torch.ones(2)}, file)
    folder.mkdir()
    with pytest.raises(CheckpointError, match="split: an empty folder"):
        formats.detect(folder)
    write_checkpoint(
        "per_param", folder / "a", [TensorPlan("w", (2,), torch.float32)], lambda _: [torch.ones(2)]
    )
    assert formats.detect(file) == "pt"
    assert formats.detect(folder / "a") == "per_param"
    assert formats.files(file) == [file]
    (folder / "a" / "notes.txt").touch()
    assert formats.files(folder / "a") == [folder / "a" / "index.json", folder / "a" / "w.pt"]
    with pytest.raises(CheckpointError, match="none: no such file or folder"):
        formats.detect(tmp_path / "none")
    with pytest.raises(UnknownName, match="no checkpoint format is called 'per-param'"):
        formats.suffix_of("per-param")


def test_offsets_lead_to_the_values(tmp_path: Path) -> None:
    base = torch.arange(24.0)
    state = {
        "weight": base[:12].view(3, 4),
        "view": base[12:],
        "transposed": torch.arange(6).view(2, 3).t(),
        "tied": base[:12].view(3, 4),
        "empty": torch.empty(0),
    }
    path = tmp_path / "model.pt"
    torch.save(state, path)
    data = path.read_bytes()
    places = {place.name: place for place in formats.read(path)}
    assert list(places) == list(state)
    assert places["tied"].offset == places["weight"].offset
    assert (
        places["tied"].storage_offset
        == places["weight"].storage_offset
        == places["view"].storage_offset
    )
    assert places["view"].storage_bytes == 96
    for name, place in places.items():
        assert place.contiguous == state[name].is_contiguous()
        if place.contiguous:
            raw = data[place.offset : place.offset + state[name].nbytes]
            assert raw == state[name].numpy().tobytes()
    assert (places["transposed"].shape, places["transposed"].stride) == ((3, 2), (1, 3))


def test_a_record_that_a_zip_program_compressed_is_refused(tmp_path: Path) -> None:
    import zipfile

    path, packed = tmp_path / "model.pt", tmp_path / "packed.pt"
    torch.save({"weight": torch.zeros(1000)}, path)
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as to:
        for record in source.infolist():
            to.writestr(record.filename, source.read(record))
    with pytest.raises(CheckpointError, match=r"record 'model/.*' is compressed"):
        formats.read(packed)


def saved(path: Path, value: object) -> None:
    torch.save(value, path)


def legacy(path: Path) -> None:
    torch.save({"w": torch.zeros(2)}, path, _use_new_zipfile_serialization=False)


def truncated(path: Path) -> None:
    torch.save({"w": torch.zeros(1000)}, path)
    path.write_bytes(path.read_bytes()[:2000])


def nested(path: Path) -> None:
    torch.save({"model": {"w": torch.zeros(2)}, "step": 3}, path)


@pytest.mark.parametrize(
    ("write", "message", "repair"),
    [
        (lambda p: None, "no such file or folder", "check the path"),
        (Path.touch, "empty file", AGAIN),
        (
            lambda p: p.write_text("garbage " * 100),
            "a text file, not a checkpoint; it begins with 'garbage garbage ",
            "give the checkpoint itself; if the text is an answer of a web server, ask it for the"
            " file again",
        ),
        (truncated, "truncated: the zip archive has no end record", AGAIN),
        (
            lambda p: p.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n"),
            "a git-lfs pointer (a small text file that stands for the real file), not the checkpoint",
            "fetch the checkpoint: git lfs pull --include model.pt",
        ),
        (
            lambda p: p.write_text("\n<!DOCTYPE html><html>Sign in</html>"),
            "an HTML page, not a checkpoint",
            "download the checkpoint again with the file's own link: the used link leads to a web"
            " page",
        ),
        (
            nested,
            "not a flat state dict: 'model' holds a dict",
            "select the weights: --key model (8 B); in load_streaming: key='model'; in a suite:"
            " key: model",
        ),
        (
            lambda p: saved(p, torch.zeros(2)),
            "holds a Tensor, not a state dict",
            "save the weights alone: torch.save(model.state_dict(), ...)",
        ),
        (
            lambda p: saved(p, {"w": torch.zeros(2), "f": Command()}),
            "holds more than tensors, and was NOT executed: 'f' refers to posix.system",
            "if you trust the file, load it and save plain weights: torch.save(model.state_dict(),"
            " ...)",
        ),
    ],
)
def test_what_is_no_checkpoint_is_called_by_its_name(
    tmp_path: Path, write: Callable[[Path], object], message: str, repair: str
) -> None:
    path = tmp_path / "model.pt"
    write(path)
    with pytest.raises(CheckpointError) as caught:
        formats.read(path)
    assert caught.value.message.startswith(f"{path}: {message}")
    assert caught.value.repair == repair


def test_the_old_format_comes_with_the_line_that_converts_it(tmp_path: Path) -> None:
    import subprocess
    import sys

    path = tmp_path / "it's old.pt"
    legacy(path)
    with pytest.raises(CheckpointError, match=r"in the format of torch before 1\.6") as caught:
        open_zip(path)
    line = caught.value.repair.removeprefix("save it again: ")
    subprocess.run(line.replace("python", sys.executable, 1), shell=True, check=True)
    assert [place.name for place in formats.read(Path(f"{path}.new"))] == ["w"]


def test_a_plain_pickle_is_not_executed(tmp_path: Path) -> None:
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(Command()))
    with pytest.raises(
        CheckpointError, match=r"a pickle that torch\.save did not write, and was NOT executed"
    ):
        formats.read(path)


def test_a_file_of_one_tensor(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "w.pt")
    assert read_one(tmp_path / "w.pt", "w").shape == (3,)
    torch.save([1], tmp_path / "l.pt")
    with pytest.raises(CheckpointError, match="holds a list, not a tensor"):
        read_one(tmp_path / "l.pt", "l")


def test_the_manifest_is_plain_json(tmp_path: Path) -> None:
    MANIFEST.write(tmp_path / "manifest.json")
    assert json.loads((tmp_path / "manifest.json").read_text())["tensors"][0]["shape"] == [3, 5]


class Net(torch.nn.Module):
    """Somebody's own, pickled as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(2, 2)


class Settings:
    """No module, but an object all the same."""

    def __init__(self) -> None:
        self.width = 2


@pytest.mark.parametrize("is_zip", [True, False], ids=["zip", "legacy"])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a dict"])
@pytest.mark.filterwarnings("ignore:Couldn't retrieve source code")
def test_a_whole_pickled_module_is_refused_with_its_class_and_the_way_out(
    tmp_path: Path, is_zip: bool, inside: bool
) -> None:
    path = tmp_path / "net.pt"
    module = Net()
    value = {"epoch": 3, "model": module} if inside else module
    place = " at 'model'" if inside else ""
    torch.save(value, path, _use_new_zipfile_serialization=is_zip)
    with pytest.raises(CheckpointError) as caught:
        formats.read(path)
    assert caught.value.message == (
        f"{path}: holds a whole pickled module ({Net.__module__}.Net){place}, which cannot be"
        " loaded without"
        " executing its code: it was NOT executed"
    )
    assert caught.value.repair.startswith("if you trust the file, load it and save")


def test_an_object_that_is_no_module_is_named_by_its_class(tmp_path: Path) -> None:
    path = tmp_path / "settings.pt"
    torch.save({"weight": torch.zeros(2), "settings": Settings()}, path)
    with pytest.raises(CheckpointError) as caught:
        formats.read(path)
    assert caught.value.message == (
        f"{path}: holds more than tensors, and was NOT executed: 'settings' refers to"
        f" {Settings.__module__}.Settings"
    )
