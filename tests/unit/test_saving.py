"""Saves: what is written is read back from the disk, and nothing of it stays."""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import FrozenInstanceError, asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import make_cell, make_result
from fakes import BASELINE, FakeRunning, done, event, loaded, phase, watched
from torch import nn
from torch.serialization import set_crc32_options
from worker_jobs import Model, manifest_of

from weighin.checkpoint.manifest import Kind, Manifest
from weighin.cli import _progress
from weighin.errors import ConfigError
from weighin.records import run_folder
from weighin.records.metrics import phases_of_load
from weighin.records.series import name_of
from weighin.result import Outcome, Written
from weighin.run import loads
from weighin.settings.definition import DEFAULT_SAVING
from weighin.suite import registry
from weighin.units import GIB
from weighin.worker.loading import Save, WrongWeights, import_strategy
from weighin.worker.saving import check, files_in, sizes, sync

CPU = torch.float32


@dataclass
class Job:
    """What a strategy sees, outside of a worker."""

    model: nn.Module
    target: Path
    format: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def phase(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()


def expected(model: Model) -> Manifest:
    """The manifest of a model, with ``step`` as what it is: in no checkpoint."""
    found = manifest_of(model)
    kinds: dict[str, Kind] = {"step": "non_persistent_buffer"}
    return replace(
        found, tensors=tuple(replace(e, kind=kinds.get(e.name, e.kind)) for e in found.tensors)
    )


def saved(name: str, folder: Path, fmt: str | None = None, **options: Any) -> Model:
    info = registry.strategy(name, "save")
    model = Model()
    import_strategy(info.path, "save")(Job(model, folder, fmt or info.formats[0], options))
    sync(folder)
    return model


WAYS = [(name, fmt) for name in DEFAULT_SAVING for fmt in registry.strategy(name, "save").formats]


@pytest.mark.filterwarnings("ignore")  # dcp warns that it runs as one process
@pytest.mark.parametrize(("name", "fmt"), WAYS)
def test_what_is_saved_is_the_model(tmp_path: Path, name: str, fmt: str) -> None:
    model = saved(name, tmp_path, fmt)
    check(tmp_path, expected(model), CPU)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "fmt"), WAYS)
def test_a_single_wrong_byte_of_the_weights_is_found(tmp_path: Path, name: str, fmt: str) -> None:
    model = saved(name, tmp_path, fmt)
    value = model.get_buffer("mask").numpy().tobytes()
    (file,) = [one for one in files_in(tmp_path) if value in one.read_bytes()]
    content = file.read_bytes()
    at = content.index(value) + 5
    file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(WrongWeights) as caught:
        check(tmp_path, expected(model), CPU)
    assert str(caught.value) == "1 tensor saved with other values than the model's: mask"


def harm_names(folder: Path) -> None:
    torch.save({"head.weight": torch.zeros(8, 4), "other": torch.zeros(3)}, folder / "model.pt")


def harm_shape(folder: Path) -> None:
    state = torch.load(folder / "model.pt", weights_only=True)
    torch.save(state | {"mask": torch.arange(5.0)}, folder / "model.pt")


def harm_dtype(folder: Path) -> None:
    state = torch.load(folder / "model.pt", weights_only=True)
    torch.save(state | {"mask": torch.arange(4.0).double()}, folder / "model.pt")


@pytest.mark.parametrize(
    ("harm", "complaint"),
    [
        (harm_names, "2 tensors missing from the saved checkpoint: embedding.weight, mask"),
        (harm_shape, "1 tensor saved in another shape or dtype than the model's: mask"),
        (harm_dtype, "1 tensor saved in another shape or dtype than the model's: mask"),
        (
            lambda folder: (folder / "model.pt").write_bytes(b"nothing"),
            "the saved checkpoint cannot be read: FOLDER/model.pt: ",
        ),
        (
            lambda folder: (folder / "more.txt").touch(),
            "the saved checkpoint cannot be read: FOLDER: no config.json and no index beside model.pt",
        ),
    ],
)
def test_what_is_not_the_model_is_told(tmp_path: Path, harm: Any, complaint: str) -> None:
    model = saved("torch_save", tmp_path)
    harm(tmp_path)
    with pytest.raises(WrongWeights) as caught:
        check(tmp_path, expected(model), CPU)
    assert str(caught.value).replace(str(tmp_path), "FOLDER").startswith(complaint)


def test_a_tied_weight_is_written_once(tmp_path: Path) -> None:
    saved("per_param", tmp_path)
    assert json.loads((tmp_path / "index.json").read_text())["shared"] == {
        "head.weight": "embedding.weight"
    }
    assert [one.name for one in files_in(tmp_path)] == [
        "embedding.weight.pt", "index.json", "mask.pt",
    ]  # fmt: skip


@pytest.mark.parametrize(("fmt", "suffix"), [("sharded", "safetensors"), ("sharded_pt", "bin")])
def test_shards_are_filled_up_to_their_size(tmp_path: Path, fmt: str, suffix: str) -> None:
    model = saved("sharded", tmp_path, fmt, max_shard_bytes=128)
    names = [one.name for one in files_in(tmp_path)]
    assert sum(name.endswith(f"-of-00002.{suffix}") for name in names) == 2
    check(tmp_path, expected(model), CPU)


def test_the_checksums_of_a_zip_can_be_left_out(tmp_path: Path) -> None:
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    saved("torch_save", tmp_path / "with")
    saved("torch_save", tmp_path / "without", crc32=False)
    set_crc32_options(True)  # as it was
    with_, without = ((tmp_path / n / "model.pt").read_bytes() for n in ("with", "without"))
    assert with_ != without


def test_what_was_written_is_measured(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 5000)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c").write_bytes(b"y")
    sync(tmp_path)
    written = Written(**sizes(tmp_path))
    assert (written.file_bytes, written.files) == (5001, 2)
    assert written.disk_bytes % 512 == 0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path))
    return tmp_path


def test_a_target_is_empty_and_is_removed_with_all_that_is_in_it(cache: Path) -> None:
    with pytest.raises(KeyboardInterrupt), loads.save_folder(1) as folder:
        assert folder.parent == cache / "saving"
        assert list(folder.iterdir()) == []
        (folder / "part").write_bytes(b"x")
        raise KeyboardInterrupt
    assert list((cache / "saving").iterdir()) == []


def test_what_a_killed_run_left_is_removed(cache: Path) -> None:
    left = cache / "saving" / "tmpx"
    left.mkdir(parents=True)
    (left / "model.pt").write_bytes(b"x")
    assert loads.remove_leftovers() == [f"files of a save in {left}"]
    with loads.save_folder(1) as mine:
        assert loads.remove_leftovers() == []
        assert mine.exists()


def test_a_disk_without_room_is_told_before_anything_is_written(cache: Path) -> None:
    with pytest.raises(ConfigError) as caught, loads.save_folder(2**60):
        pass
    message, repair = str(caught.value).splitlines()
    assert message.startswith("a save needs ")
    assert message.endswith(f" are free in {cache}/saving")
    assert repair == "put the cache on another disk: WEIGHIN_CACHE=/path weighin ..."


def test_a_strategy_cannot_assign_to_its_job(tmp_path: Path) -> None:
    job = Save(nn.Linear(1, 1), tmp_path, "safetensors", {}, lambda _: nullcontext())
    with pytest.raises(FrozenInstanceError):
        job.format = "pytorch"  # type: ignore[misc]


WRITTEN = Written(file_bytes=3 * GIB, disk_bytes=3 * GIB + 4096, files=2)


def test_a_worker_that_saves_becomes_a_result() -> None:
    ready = event("ready", ready_at_ns=2000, touch_ns=200, written=asdict(WRITTEN))
    script = [*BASELINE, phase("write", 500), loaded(), phase("sync", 400), ready, done(None)]
    result = watched(FakeRunning(script))
    assert (result.outcome, result.written, result.ready_ns) == (Outcome.OK, WRITTEN, 1200)


def saved_result(**changes: Any) -> Any:
    cell = make_cell("torch_save", operation="save", **changes)
    return make_result(cell, written=WRITTEN)


def test_a_save_survives_its_record(tmp_path: Path) -> None:
    result = saved_result()
    run_folder.append(tmp_path, result)
    assert run_folder.read(tmp_path).results == (result,)


def test_records_that_are_older_than_saves_are_of_loads(tmp_path: Path) -> None:
    old = Path(__file__).parent / "fixtures" / "records-schema1.jsonl"
    (tmp_path / run_folder.RECORDS).write_text(old.read_text())
    assert '"operation"' not in old.read_text()
    assert {one.cell.operation for one in run_folder.read(tmp_path).results} == {"load"}


def test_a_finished_save_is_one_line() -> None:
    result = replace(saved_result(), ready_ns=3_000_000_000)
    assert "on the disk 3.00 s" in _progress.line(result)


def test_a_gate_tells_a_save_from_a_load_and_ends_it_when_it_is_synced() -> None:
    cell = make_cell("torch_save", operation="save", options={"crc32": False})
    assert name_of(cell).endswith(" operation=save crc32=False")
    assert "operation" not in name_of(make_cell())
    script = (
        ("import", 1, 0.2, 0.1),
        ("write", 1, 0.2, 0.1),
        ("sync", 1, 0.2, 0.1),
        ("verify", 1, 0.3, 0.1),
    )
    phases = phases_of_load(make_result(cell, script))
    assert [name for name, _ in phases] == ["write", "sync"]
