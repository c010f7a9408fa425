"""Saves: what is written is read back from the disk, and nothing of it stays."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import FrozenInstanceError, asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_cell, make_result, refused
from fakes import BASELINE, FakeRunning, done, event, loaded, phase, watched
from torch.serialization import set_crc32_options
from worker_jobs import Model, manifest_of

from weighin.checkpoint.manifest import Manifest
from weighin.cli import _progress
from weighin.records.metrics import phases_of_load
from weighin.result import Outcome, Written
from weighin.run import loads
from weighin.settings.definition import DEFAULT_SAVING
from weighin.suite import registry
from weighin.units import GIB
from weighin.worker.loading import Save, import_strategy
from weighin.worker.saving import check, files_in, sizes, sync
from weighin.worker.verify import WrongWeights


def expected(model: Model) -> Manifest:
    """The manifest of a model, with ``step`` as what it is: in no checkpoint."""
    found = manifest_of(model)
    kinds: dict[str, Any] = {"step": "non_persistent_buffer"}
    tensors = tuple(replace(one, kind=kinds.get(one.name, one.kind)) for one in found.tensors)
    return replace(found, tensors=tensors)


def saved(name: str, folder: Path, fmt: str | None = None, **options: Any) -> Model:
    info, model = registry.strategy(name, "save"), Model()
    folder.mkdir(exist_ok=True)
    job = Save(model, folder, fmt or info.formats[0], options, lambda _: nullcontext())
    import_strategy(info.path, "save")(job)
    sync(folder)
    with pytest.raises(FrozenInstanceError):  # a strategy cannot change its job
        job.format = "pytorch"  # type: ignore[misc]
    return model


def complaint(folder: Path, model: Model) -> str:
    with pytest.raises(WrongWeights) as caught:
        check(folder, expected(model), torch.float32)
    return str(caught.value).replace(str(folder), "FOLDER")


WAYS = [(name, fmt) for name in DEFAULT_SAVING for fmt in registry.strategy(name, "save").formats]


@pytest.mark.filterwarnings("ignore")  # dcp warns that it runs as one process
@pytest.mark.parametrize(("name", "fmt"), WAYS)
def test_what_is_saved_is_the_model_and_a_single_wrong_byte_is_found(
    tmp_path: Path, name: str, fmt: str
) -> None:
    model = saved(name, tmp_path, fmt)
    if fmt == "per_param":  # each tied weight once
        shared = json.loads((tmp_path / "index.json").read_text())["shared"]
        assert shared == {"head.weight": "embedding.weight"}
        names = ["embedding.weight.pt", "index.json", "mask.pt"]
        assert [one.name for one in files_in(tmp_path)] == names
    check(tmp_path, expected(model), torch.float32)
    value = model.get_buffer("mask").numpy().tobytes()
    (file,) = [one for one in files_in(tmp_path) if value in one.read_bytes()]
    content = bytearray(file.read_bytes())
    content[content.index(value) + 5] ^= 1
    file.write_bytes(content)
    assert complaint(tmp_path, model) == "1 tensor saved with other values: mask"


def with_mask(mask: torch.Tensor) -> Callable[[Path], object]:
    def harm(folder: Path) -> None:
        state = torch.load(folder / "model.pt", weights_only=True)
        torch.save(state | {"mask": mask}, folder / "model.pt")

    return harm


OTHER = "1 tensor saved with another shape or dtype: mask"
UNREAD = "the saved checkpoint cannot be read: FOLDER"
HARMS: dict[str, tuple[Callable[[Path], object], str]] = {
    "names": (
        lambda folder: torch.save({"head.weight": torch.zeros(8, 4)}, folder / "model.pt"),
        "2 tensors missing from the saved checkpoint: embedding.weight, mask",
    ),
    "shape": (with_mask(torch.arange(5.0)), OTHER),
    "dtype": (with_mask(torch.arange(4.0).double()), OTHER),
    "content": (lambda folder: (folder / "model.pt").write_bytes(b"no"), f"{UNREAD}/model.pt: "),
    "another file": (lambda folder: (folder / "more.txt").touch(), f"{UNREAD}: no config.json and no index beside model.pt"),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARMS)
def test_what_is_not_the_model_is_told(tmp_path: Path, harm: str) -> None:
    model = saved("torch_save", tmp_path)
    spoil, words = HARMS[harm]
    spoil(tmp_path)
    assert complaint(tmp_path, model).startswith(words)


def test_the_options_of_ways_of_saving_take_effect(tmp_path: Path) -> None:
    for fmt in ("sharded", "sharded_pt"):
        model = saved("sharded", tmp_path / fmt, fmt, max_shard_bytes=128)
        names = [one.name for one in files_in(tmp_path / fmt)]
        assert len([name for name in names if "-of-00002." in name]) == 2
        check(tmp_path / fmt, expected(model), torch.float32)
    saved("torch_save", tmp_path / "with")
    saved("torch_save", tmp_path / "without", crc32=False)
    set_crc32_options(True)  # as it was
    files = [tmp_path / name / "model.pt" for name in ("with", "without")]
    assert len({file.read_bytes() for file in files}) == 2


@pytest.fixture
def saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path))
    return tmp_path / "saving"


def test_a_target_is_empty_and_is_removed_with_all_that_is_in_it(saving: Path) -> None:
    with pytest.raises(KeyboardInterrupt), loads.save_folder(1) as folder:
        assert folder.parent == saving
        assert list(folder.iterdir()) == []
        (folder / "part").write_bytes(b"x")
        raise KeyboardInterrupt
    assert list(saving.iterdir()) == []


def test_what_a_killed_run_left_is_measured_and_removed(saving: Path) -> None:
    (left := saving / "tmpx").mkdir(parents=True)
    (left / "model.pt").write_bytes(b"x" * 5000)
    written = Written(**sizes(left.parent))
    assert (written.file_bytes, written.files) == (5000, 1)
    assert written.disk_bytes % 512 == 0
    assert loads.remove_leftovers() == [f"files of a save in {left}"]
    with loads.save_folder(1) as mine:
        assert loads.remove_leftovers() == []
        assert mine.exists()


def test_a_disk_without_room_is_told_before_anything_is_written(saving: Path) -> None:
    message, repair = refused(loads.save_folder(2**60).__enter__).splitlines()
    assert message.startswith("a save needs ")
    assert message.endswith(f" are free in {saving}")
    assert repair == "put the cache on another disk: WEIGHIN_CACHE=/path weighin ..."


WRITTEN = Written(file_bytes=3 * GIB, disk_bytes=3 * GIB + 4096, files=2)


def test_a_worker_that_saves_becomes_a_result() -> None:
    ready = event("ready", ready_at_ns=2000, touch_ns=200, written=asdict(WRITTEN))
    script = [*BASELINE, phase("write", 500), loaded(), phase("sync", 400), ready, done(None)]
    result = watched(FakeRunning(script))
    assert (result.outcome, result.written, result.ready_ns) == (Outcome.OK, WRITTEN, 1200)


def test_a_finished_save_is_one_line_and_ends_when_it_is_synced() -> None:
    cell = make_cell("torch_save", operation="save")
    script = [(name, 1, 0.2, 0.1) for name in ("import", "write", "sync", "verify")]
    result = make_result(cell, script, written=WRITTEN, ready_ns=3_000_000_000)
    assert "on the disk 3.00 s" in _progress.line(result)
    assert [name for name, _ in phases_of_load(result)] == ["write", "sync"]
