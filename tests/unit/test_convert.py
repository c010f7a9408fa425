"""Converting: nothing half-made, nothing touched, nothing large held, and errors that say it."""

import json
import os
import re
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from factories import refused
from fork_server import ForkServer
from leftovers import lives, wait_until
from model_differences import state_differences
from pytest import MonkeyPatch
from safetensors.torch import load_file, save_file
from typed_here import typed

from weighin import child_process
from weighin.checkpoint import convert as converting
from weighin.checkpoint import temporary_folders
from weighin.checkpoint.child import run_child
from weighin.checkpoint.convert import Conversion, sentence
from weighin.stream import formats
from weighin.stream import load_pretrained as loading
from weighin.stream import write as writing
from weighin.units import GIB, MIB

pytestmark = pytest.mark.usefixtures("torch_threads_restored")


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


def snapshot(folder: Path) -> dict[Path, tuple[int, bytes]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


# What a target must not be: the source, under any of its names, or what is there already.
TAKEN: dict[str, Callable[[Path, Path], object]] = {
    "itself": lambda source, other: source,
    "itself by another path": lambda source, other: source.parent / "other" / ".." / source.name,
    "a hard link": os.link,
    "a link": lambda source, other: other.symlink_to(source),
    "a link to nothing": lambda source, other: other.symlink_to("gone"),
    "a folder": lambda source, other: other.mkdir(),
}


@pytest.mark.parametrize("kind", ["file", "folder"])
@pytest.mark.parametrize("name", TAKEN)
def test_nothing_is_converted_onto_what_is_there(source: Path, name: str, kind: str) -> None:
    (source.parent / "other").mkdir()
    if kind == "folder":
        if name == "a hard link":
            return  # a folder has none
        convert(source, source := source.with_name("folder"))
    taken = TAKEN[name](source, source.with_name("taken")) or source.with_name("taken")
    assert isinstance(taken, Path)
    before = snapshot(source.parent)
    assert refused(convert, source, taken, dtype="bfloat16").startswith(f"{taken} exists already\n")
    if kind == "folder" and name in ("itself", "a link"):
        assert refused(convert, source, taken / "new") == (
            f"{taken}/new is inside {source}\nchoose a target outside of the source"
        )
    assert snapshot(source.parent) == before


def test_a_checkpoint_without_tensors_is_not_converted(tmp_path: Path) -> None:
    torch.save({}, path := tmp_path / "empty.pt")
    assert refused(convert, path, tmp_path / "new", "dcp").startswith(f"{path}: has no tensors\n")
    assert names(tmp_path) == ["empty.pt"]


@pytest.mark.parametrize(
    ("name", "size", "files"),
    [(f"new{suffix}", "", []) for suffix in (".pt", ".PTH", ".bin", ".ckpt", ".pth.tar")]
    # The tensors have 4800 and 28 bytes: together more than 4.8 KB, and less than 4.8 KiB.
    + [("llama-3.1", "4.8KB", ["1-of-00002", "2-of-00002"]), ("new", "4.8KiB", ["1-of-00001"])],
)
def test_the_targets_name_says_what_is_written(
    source: Path, name: str, size: str, files: list[str]
) -> None:
    """A file that torch.load reads, or a folder of shards, whose sizes are read as Hugging Face does."""
    target = source.with_name(name)
    code, said = typed("convert", source, target, *(["--max-shard-size", size] if size else []))
    assert code == 0, said
    assert formats.detect(target) == ("sharded" if files else "pt")
    shards = [target / f"model-0000{part}.safetensors" for part in files]
    assert sorted(target.glob("*.safetensors")) == shards
    written = {k: v for file in shards for k, v in load_file(file).items()} or torch.load(target)
    assert state_differences(written, torch.load(source)) == []


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
    setup = "from weighin.checkpoint import checksum, convert, reader, generate"
    code = "convert.Conversion(*map(Path, sys.argv[1:3]), *sys.argv[3:], verify=True).write()"
    peak = torch_fork_server.peak_of(setup, code, large, tmp_path / "new", fmt, "bfloat16")
    assert peak < 130 * MIB


def test_the_progress_is_the_share_of_all_bytes(large: Path, tmp_path: Path) -> None:
    told: list[float | None] = []
    Conversion(large, tmp_path / "new").run(lambda _, share: told.append(share))
    shares = [share for share in told if share is not None]
    assert shares == sorted(shares)
    assert 0.5 < shares[-1] <= 1


def test_the_command_says_what_it_made() -> None:
    said = {"target": "new.pt", "format": "pt", "source_format": "sharded", "bytes": 3 * GIB}
    done = said | {"seconds": 2.0, "quantised": None, "left_out": [], "verified": False}
    text = "new.pt: pt from sharded, 3.000 GiB in 2.00 s (1.50 GiB/s)"
    assert sentence(done) == text
    told = {"verified": True, "quantised": {"summary": "CODES"}, "left_out": ["a", "b\n"]}
    assert sentence(done | told) == (
        f"{text}, every tensor's checksum verified; CODES; left out, because they are no tensors: a, b"
    )


def stopped(monkeypatch: MonkeyPatch, act: Callable[..., object]) -> None:
    """Let Ctrl-C come when the child that converts has done this."""

    def run(*arguments: Any, **options: Any) -> None:
        act(*arguments, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(converting, "run_child", run)


def test_a_stop_takes_away_what_a_killed_child_left(source: Path, monkeypatch: MonkeyPatch) -> None:
    half = source.with_name(".new.weighin-x") / "half"
    stopped(monkeypatch, lambda *_, **__: half.mkdir(parents=True))
    with pytest.raises(KeyboardInterrupt):
        Conversion(source, source.with_name("new")).run(lambda *_: None)
    assert names(source.parent) == ["model.pt"]


def test_a_stop_after_the_end_ends_well(source: Path, monkeypatch: MonkeyPatch) -> None:
    stopped(monkeypatch, run_child)
    done = Conversion(source, target := source.with_name("new.pt")).run(lambda *_: None)
    assert done["bytes"] == target.stat().st_size


def altered(monkeypatch: MonkeyPatch, change: Callable[[Path], object]) -> None:
    """Change a checkpoint as soon as it is written."""
    real = writing.write

    def write(fmt: str, target: Path, *arguments: Any, **options: Any) -> None:
        real(fmt, target, *arguments, **options)
        change(target)

    monkeypatch.setattr(writing, "write", write)


def test_a_target_that_appears_meanwhile_is_not_replaced(
    source: Path, monkeypatch: MonkeyPatch
) -> None:
    target = source.with_name("new.pt")
    altered(monkeypatch, lambda _: target.write_text("theirs"))
    assert "new.pt exists already" in refused(convert, source, target, "pt")
    assert target.read_text() == "theirs"


def change_value(target: Path) -> None:
    (place,) = [one for one in formats.read(target) if one.name == "head"]
    text = bytearray(place.file.read_bytes())
    text[place.offset] ^= 1
    place.file.write_bytes(text)


def drop_key(target: Path) -> None:
    index = json.loads((target / "index.json").read_text())
    del index["tensors"]["head"]
    (target / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (change_value, "other values than the source, such as in head"),
        (drop_key, "other names, shapes, dtypes or ties than the source"),
    ],
)
def test_verify_finds_a_single_wrong_byte_and_a_missing_key(
    source: Path, monkeypatch: MonkeyPatch, harm: Callable[[Path], object], words: str
) -> None:
    convert(source, source.with_name("sound"), verify=True)
    altered(monkeypatch, harm)
    said = refused(convert, source, source.with_name("new"), verify=True)
    assert said.startswith(f"new: read back, the new checkpoint has {words}; weighin removed it\n")
    assert names(source.parent) == ["model.pt", "sound"]


def test_a_disk_that_is_too_small_is_refused_before_anything_is_written(source: Path) -> None:
    def permit(to_write: int, _to_read: int) -> None:
        temporary_folders.check_space(source.parent, "it", to_write << 46, "take another disk")

    said = refused(Conversion(source, source.with_name("new"), "pt").write, permit)
    assert re.match(r"it needs [\d,.]+ TiB, but only .* are free in .*\ntake another disk$", said)
    assert names(source.parent) == ["model.pt"]


def test_values_of_a_model_that_are_no_tensors_are_named(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    class Counting(torch.nn.Linear):
        def get_extra_state(self) -> int:
            return 1

    (folder := tmp_path / "model").mkdir()
    (folder / "config.json").write_text("{}")
    save_file(torch.nn.Linear(2, 2).state_dict(), folder / "model.safetensors")
    monkeypatch.setattr(loading, "load_pretrained", lambda *_, **__: Counting(2, 2))
    done = Conversion(folder, target := tmp_path / "new.pt", model_keys=True).write()
    assert (done["left_out"], [*torch.load(target)]) == (["_extra_state"], ["weight", "bias"])


def test_two_conversions_to_one_folder_do_not_disturb_each_other(source: Path) -> None:
    targets = [source.with_name("a"), source.with_name("b" * 250)]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(convert, source, target) for target in targets]:
            done.result()
    assert names(source.parent) == ["a", "b" * 250, "model.pt"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_command_that_is_told_to_end_exits_as_after_ctrl_c_and_leaves_nothing(
    source: Path, number: signal.Signals
) -> None:
    command = child_process.module("weighin", "convert", str(source), str(source.with_name("new")))
    with child_process.Child(command, child_process.environment()) as child:
        children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
        makers: list[int] = []

        def started() -> list[int]:
            makers[:] = map(int, children.read_text().split())
            return makers

        wait_until(started, "nobody converts")
        os.kill(child.pid, number)
        assert child.wait(60) == 130
    assert names(source.parent) == ["model.pt"]
    wait_until(lambda: not lives(makers[0]), "the process that converts goes on")
