"""Converting: nothing half-made, nothing touched, nothing large held, and errors that say it."""

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fork_server import ForkServer
from safetensors.torch import save_file

from weighin import child_process
from weighin.checkpoint import convert as converting
from weighin.checkpoint import reader, staging
from weighin.checkpoint.child import run_child
from weighin.checkpoint.convert import Conversion, sentence
from weighin.cli.app import app
from weighin.errors import CheckpointError, ConfigError
from weighin.stream import formats, hugging_face
from weighin.stream import write as writing
from weighin.units import MIB

pytestmark = pytest.mark.usefixtures("torch_threads_restored")

PEAK_SOURCE = """
import sys, threading, time, torch
from pathlib import Path
from weighin.checkpoint import checksum, reader, truth
from weighin.checkpoint.convert import Conversion

def anonymous():
    for line in open("/proc/self/status"):
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024

start, peak, ended = anonymous(), 0, False
def watch():
    global peak
    while not ended:
        peak = max(peak, anonymous())
        time.sleep(0.001)

thread = threading.Thread(target=watch, daemon=True); thread.start()
Conversion(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4], verify=True).write()
ended = True
thread.join()
print(peak - start)
"""


def silent(text: str, share: float | None) -> None: ...


@pytest.fixture
def source(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "model.pt"
    torch.save({"layers.0.weight": torch.randn(40, 30), "head": torch.randn(7)}, path)
    return path


def convert(source: Path, target: Path, fmt: str = "per_param", **options: Any) -> None:
    Conversion(source, target, fmt, **options).write()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def weighin(*arguments: object) -> None:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert result.exit_code == 0, result.output


def test_an_error_leaves_nothing(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(where: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(reader, "read_pieces", fail)
    with pytest.raises(OSError, match="No space left"):
        convert(source, source.with_name("new"))
    assert names(source.parent) == ["model.pt"]


def test_what_must_not_be_written_over_is_refused(source: Path, tmp_path: Path) -> None:
    def complaint(source: Path, target: Path) -> str:
        with pytest.raises(ConfigError) as caught:
            convert(source, target)
        return str(caught.value)

    folder, link = tmp_path / "folder", tmp_path / "link"
    convert(source, folder)
    link.symlink_to(tmp_path / "nowhere")
    for target in (source, folder, link):
        assert complaint(source, target) == (
            f"{target} exists already\nname another target, or first remove the existing one"
        )
    assert complaint(source, tmp_path / "no" / "new") == (
        f"{tmp_path}/no: no such folder\ncreate the folder: mkdir -p {tmp_path}/no"
    )
    assert complaint(folder, folder / "new") == (
        f"{folder}/new is inside {folder}\nname a target outside of the source"
    )


def test_a_checkpoint_without_tensors_is_not_converted(tmp_path: Path) -> None:
    torch.save({}, tmp_path / "empty.pt")
    with pytest.raises(CheckpointError) as caught:
        convert(tmp_path / "empty.pt", tmp_path / "new", "dcp")
    assert caught.value.message == f"{tmp_path}/empty.pt: no tensors in it"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("name", ["new.pt", "new.PTH", "new.bin", "new.ckpt", "new.pth.tar"])
def test_the_suffix_of_a_file_of_torch_means_that_torch_load_reads_it(
    source: Path, name: str
) -> None:
    target = source.with_name(name)
    weighin("convert", source, target)
    written, original = torch.load(target), torch.load(source)
    assert written.keys() == original.keys()
    assert all(torch.equal(written[key], original[key]) for key in original)


@pytest.mark.parametrize("name", ["new", "llama-3.1"])
def test_a_name_without_the_suffix_of_a_file_means_a_folder_of_shards(
    source: Path, name: str
) -> None:
    target = source.with_name(name)
    weighin("convert", source, target, "--max-shard-size", "1000B")
    assert [path.name for path in sorted(target.glob("*.safetensors"))] == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    ]
    assert formats.detect(target) == "sharded"


@pytest.mark.parametrize(
    ("name", "fmt", "format_of_suffix", "other"),
    [
        ("new.pt", "safetensors", "pt", "new.safetensors"),
        ("new.safetensors", "pt", "safetensors", "new.pt"),
        ("new.bin", "sharded", "pt", "new"),
        ("new.pth.tar", "dcp", "pt", "new"),
    ],
)
def test_a_suffix_of_another_format_is_refused_with_the_two_ways_on(
    source: Path, name: str, fmt: str, format_of_suffix: str, other: str
) -> None:
    target, suffix = source.with_name(name), name.removeprefix("new")
    with pytest.raises(ConfigError) as caught:
        Conversion(source, target, fmt).run(silent)
    assert str(caught.value) == (
        f"{target}: {suffix} is the suffix of format {format_of_suffix}, but --format says"
        f" {fmt}\nto write {format_of_suffix}, leave --format out; for the format of --format, name"
        f" the target {other}"
    )
    assert names(source.parent) == ["model.pt"]


@pytest.mark.parametrize("harm", ["value", "key", "nothing"])
def test_verify_finds_a_single_wrong_byte_and_a_missing_key(
    source: Path, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    real = writing.write

    def harmful(fmt: str, target: Path, *arguments: Any, **options: Any) -> None:
        real(fmt, target, *arguments, **options)
        path = target / "head.pt"
        if harm == "value":
            (place,) = [one for one in formats.read(target) if one.name == "head"]
            text = bytearray(path.read_bytes())
            text[place.offset] ^= 1
            path.write_bytes(text)
        elif harm == "key":
            index = json.loads((target / "index.json").read_text())
            del index["tensors"]["head"]
            (target / "index.json").write_text(json.dumps(index))

    monkeypatch.setattr(writing, "write", harmful)
    target = source.with_name("new")
    if harm == "nothing":
        convert(source, target, verify=True)
        return
    with pytest.raises(CheckpointError) as caught:
        convert(source, target, verify=True)
    what = {
        "value": "other values than the source in head",
        "key": "other names, shapes, dtypes or ties than the source",
    }
    assert caught.value.message == f"new: the written checkpoint has {what[harm]}; it was removed"
    assert names(source.parent) == ["model.pt"]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint with a tensor of 256 MiB and one of 128."""
    path = tmp_path_factory.mktemp("large") / "large.pt"
    torch.save({"a.w": torch.zeros(64 * MIB), "b.w": torch.zeros(32 * MIB)}, path)
    yield path
    path.unlink()


@pytest.mark.parametrize("fmt", ["pt", "per_param", "per_module", "dcp", "safetensors"])
def test_memory_stays_far_below_the_largest_tensor_and_300_mib(
    large: Path, tmp_path: Path, fmt: str, torch_fork_server: ForkServer
) -> None:
    done = torch_fork_server.run(PEAK_SOURCE, large, tmp_path / "new", fmt, "bfloat16")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 130 * MIB


def test_the_progress_is_the_share_of_the_bytes_that_are_read_and_written(
    large: Path, tmp_path: Path
) -> None:
    told: list[float | None] = []
    Conversion(large, tmp_path / "new").run(lambda _, share: told.append(share))
    shares = [share for share in told if share is not None]
    assert shares == sorted(shares)
    assert 0.5 < shares[-1] <= 1


def test_the_command_says_what_it_made(source: Path) -> None:
    target = source.with_name("half.pt")
    done = Conversion(source, target, dtype="bfloat16", verify=True).run(silent)
    said = sentence(done)
    assert said.startswith(f"{target}: pt from pt, {target.stat().st_size / 1024:.3f} KiB in ")
    assert said.endswith("every tensor's checksum verified")
    assert torch.load(target)["head"].dtype is torch.bfloat16
    assert done == {
        "source": str(source),
        "source_format": "pt",
        "target": str(target),
        "format": "pt",
        "bytes": target.stat().st_size,
        "seconds": done["seconds"],
        "verified": True,
        "quantised": None,
        "left_out": [],
    }


@pytest.mark.parametrize(("size", "shards"), [("4.8KB", 2), ("4.8KiB", 1)])
def test_shards_are_sized_as_hugging_face_writes_it(source: Path, size: str, shards: int) -> None:
    """The tensors have 4800 and 28 bytes: together more than 4.8 KB, and less than 4.8 KiB."""
    target = source.with_name("shards")
    weighin("convert", source, target, "--max-shard-size", size)
    assert len(list(target.glob("*.safetensors"))) == shards


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--format", "per-param", "no checkpoint format is called 'per-param'"),
        ("--dtype", "bfloat", "no dtype is called 'bfloat'"),
        ("--max-shard-size", "5XB", "cannot read '5XB' as a size"),
    ],
)
def test_the_command_refuses_before_it_starts_anything(
    source: Path, monkeypatch: pytest.MonkeyPatch, option: str, value: str, said: str
) -> None:
    monkeypatch.setattr(converting, "run_child", None)
    result = CliRunner().invoke(app, ["convert", str(source), f"{source}.new", option, value])
    assert said in str(result.exception)


def test_an_interrupted_command_leaves_nothing(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = source.with_name(".new.weighin-x")

    def run(*_: object, **__: object) -> None:
        left.mkdir()
        (left / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(converting, "run_child", run)
    with pytest.raises(KeyboardInterrupt):
        Conversion(source, source.with_name("new")).run(silent)
    assert names(source.parent) == ["model.pt"]


def test_a_stop_that_comes_when_the_target_is_complete_ends_well(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(*arguments: Any, **options: Any) -> None:
        run_child(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(converting, "run_child", run)
    target = source.with_name("new.pt")
    done = Conversion(source, target).run(silent)
    assert done["bytes"] == target.stat().st_size


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(source: Path) -> None:
    target = source.with_name("new")

    def permit(to_write: int, _to_read: int) -> None:
        staging.check_space(source.parent, "it", to_write << 46, "name a target on another disk")

    with pytest.raises(ConfigError, match=r"it needs [\d,.]+ TiB, but only .* are free in "):
        Conversion(source, target, "pt").write(permit)
    assert names(source.parent) == ["model.pt"]


def test_values_of_a_model_that_are_no_tensors_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Counting(torch.nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"step": 1}

        def set_extra_state(self, state: dict[str, int]) -> None: ...

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(torch.nn.Linear(2, 2).state_dict(), folder / "model.safetensors")
    monkeypatch.setattr(hugging_face, "load_pretrained", lambda *_, **__: Counting(2, 2))
    target = tmp_path / "new.pt"
    done = Conversion(folder, target, model_keys=True).write()
    assert (done["left_out"], [*torch.load(target)]) == (["_extra_state"], ["weight", "bias"])


def test_two_conversions_to_one_folder_do_not_disturb_each_other(source: Path) -> None:
    threads = [
        threading.Thread(target=convert, args=(source, source.with_name(name)))
        for name in ("a", "b" * 250)
    ]
    started = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert time.monotonic() - started < 60
    assert names(source.parent) == ["a", "b" * 250, "model.pt"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_told_to_end_exits_as_after_ctrl_c_and_leaves_nothing(
    source: Path, number: signal.Signals
) -> None:
    command = child_process.module("weighin", "convert", str(source), str(source.with_name("new")))
    with child_process.Child(command, child_process.environment()) as child:
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
        while not (makers := children.read_text().split()):
            time.sleep(0.005)
        os.kill(child.pid, number)
        assert child.wait(60) == 130
    assert names(source.parent) == ["model.pt"]
    maker = Path(f"/proc/{makers[0]}/cmdline")
    deadline = time.monotonic() + 60
    while maker.exists() and maker.read_bytes():  # it is empty for a zombie
        assert time.monotonic() < deadline, "the process that converts goes on"
        time.sleep(0.01)
