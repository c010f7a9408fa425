"""The cache: made once, whole or not there, and never anything outside of its folder."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock

from weighin.cell import ModelSpec
from weighin.checkpoint import cache, staging
from weighin.errors import CheckpointError, ConfigError, UnknownName

TIED = ModelSpec(
    "tied-tiny",
    "weighin.models.tied:tied",
    {"vocab_size": 64, "emb_dim": 16, "n_layers": 1, "n_heads": 2},
)
SLOW = ModelSpec("slow", "slow_model:build")
SLOW_SOURCE = """
import os, pathlib, time
from torch import nn
def build():
    marker = pathlib.Path(__file__).with_name("pid")
    if not marker.exists():
        marker.write_text(str(os.getpid()))
        time.sleep(60)
    return nn.Linear(2, 2)
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def in_process(
    monkeypatch: pytest.MonkeyPatch, torch_threads_restored: None
) -> list[dict[str, Any]]:
    """Run the maker in this process: a second torch import a call would take most of the time."""
    from weighin.checkpoint import __main__ as maker

    calls: list[dict[str, Any]] = []

    def run(request: dict[str, Any], **_: object) -> dict[str, Any]:
        calls.append(request)
        parent = SimpleNamespace(send=lambda *_, **__: None)
        return maker.answer(request, parent)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "run_child", run)
    return calls


@pytest.fixture
def slow_folder(tmp_path: Path) -> Path:
    (tmp_path / "slow_model.py").write_text(SLOW_SOURCE)
    return tmp_path


def wait_for(path: Path, failed: Sequence[BaseException] = ()) -> str:
    deadline = time.monotonic() + 60
    while not (path.exists() and path.read_text()):
        assert not failed, failed[0]
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)
    return path.read_text()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_is_made_once_in_a_process_of_its_own(root: Path) -> None:
    said: list[tuple[str, float | None]] = []
    first = cache.ensure(TIED, "pt", progress=lambda text, share: said.append((text, share)))
    assert first.made
    assert said[0] == ("making the checkpoint of tied-tiny", None)
    assert all(share is None or 0 < share <= 1 for _, share in said)
    assert first.path == root / "models" / first.path.parents[1].name / "pt" / "model.pt"
    assert names(first.manifest_path.parent) == ["manifest.json", "pt", "pt.json"]
    second = cache.ensure(TIED, "pt")
    assert not second.made
    assert second.path == first.path


def test_the_parent_does_not_import_torch() -> None:
    code = "import sys, weighin.checkpoint.cache; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "False\n"


def test_an_error_of_the_maker_is_raised_here_and_leaves_nothing(root: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        cache.ensure(ModelSpec("m", "weighin.models.tied:tide"), "pt")
    assert caught.value.message == (
        "builder 'weighin.models.tied:tide': module 'weighin.models.tied' has no function 'tide'"
    )
    assert names(root / "models") == []


def test_another_seed_or_other_arguments_are_another_entry(
    in_process: list[dict[str, Any]], root: Path
) -> None:
    other = ModelSpec(TIED.name, TIED.builder, {**TIED.kwargs, "n_layers": 2})
    found = {cache.ensure(TIED, "pt").path, cache.ensure(TIED, "pt", seed=1).path}
    assert len(found | {cache.ensure(other, "pt").path}) == 3


def test_both_formats_live_in_one_entry(in_process: list[dict[str, Any]]) -> None:
    one, other = cache.ensure(TIED, "pt"), cache.ensure(TIED, "per_param")
    assert one.manifest_path == other.manifest_path
    assert other.path.name == "per_param"
    assert not cache.ensure(TIED, "pt").made


def test_other_values_from_another_torch_make_the_old_formats_void(
    in_process: list[dict[str, Any]],
) -> None:
    one = cache.ensure(TIED, "pt")
    text = one.manifest_path.read_text().replace('"float32": "', '"float32": "f', 1)
    one.manifest_path.write_text(text)
    cache.ensure(TIED, "per_param")
    assert not one.path.exists()
    assert cache.ensure(TIED, "pt").made


@pytest.mark.parametrize(
    "harm",
    [
        lambda p: p.write_bytes(p.read_bytes()[:-1]),
        lambda p: os.utime(p, ns=(1, 1)),
        Path.unlink,
        lambda p: (p.parents[1] / "pt.json").write_text("{"),
        lambda p: (p.parents[1] / "manifest.json").write_text("{"),
        lambda p: (p.parents[1] / "manifest.json").unlink(),
    ],
)
def test_a_damaged_entry_is_made_again_with_a_warning(
    in_process: list[dict[str, Any]], harm: Callable[[Path], object]
) -> None:
    good = cache.ensure(TIED, "pt")
    content = good.path.read_bytes()
    assert good.path.stat().st_mode & 0o777 == 0o444
    good.path.chmod(0o644)  # only root could write to it
    harm(good.path)
    again = cache.ensure(TIED, "pt")
    assert again.made
    assert again.warnings == (
        f"the cached checkpoint in {good.path.parent} was replaced: its files were changed or removed",
    )
    assert again.path.read_bytes() == content
    assert cache.ensure(TIED, "pt").warnings == ()


def test_a_disk_one_byte_too_small_is_refused_before_anything_is_written(
    in_process: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, root: Path
) -> None:
    free = [2**60]
    asked: list[int] = []
    real = staging.check_space

    def check(folder: Path, what: str, needed: int, repair: str) -> None:
        asked.append(needed)
        free[0] = needed - 1 if len(asked) == 1 else needed
        real(folder, what, needed, repair)

    monkeypatch.setattr(staging, "check_space", check)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=free[0]))
    with pytest.raises(ConfigError) as caught:
        cache.ensure(TIED, "pt")
    assert caught.value.message.startswith("the pt checkpoint of tied-tiny needs ")
    assert caught.value.message.endswith(f" are free in {root}")
    assert caught.value.repair == (
        "put the cache on another disk: WEIGHIN_CACHE=/path weighin ..., or empty the cache:"
        " weighin cache clear"
    )
    assert names(root / "models") == []
    assert cache.ensure(TIED, "pt").made


def test_a_maker_that_is_killed_leaves_no_entry(slow_folder: Path, root: Path) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            cache.ensure(SLOW, "pt", python_path=[str(slow_folder)])
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    os.kill(int(wait_for(slow_folder / "pid", failed)), signal.SIGKILL)
    thread.join(30)
    assert str(failed[0]).startswith(
        "the process that prepares the checkpoint was killed by SIGKILL\n"
    )
    assert names(root / "models") == []


def test_a_harness_that_is_killed_takes_its_maker_along_and_frees_the_lock(
    slow_folder: Path, root: Path
) -> None:
    code = (
        "from weighin.cell import ModelSpec; from weighin.checkpoint import cache; "
        f"cache.ensure(ModelSpec('slow', 'slow_model:build'), 'pt', python_path=[{str(slow_folder)!r}])"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        maker = int(wait_for(slow_folder / "pid"))
        (entry,) = (root / "models").iterdir()
        assert names(entry)[0].startswith(cache._TEMPORARY)
        parent.kill()
    deadline = time.monotonic() + 60
    while Path(f"/proc/{maker}/cmdline").exists() and Path(f"/proc/{maker}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the maker outlived its parent"
        time.sleep(0.02)
    prepared = cache.ensure(SLOW, "pt", python_path=[str(slow_folder)])
    assert names(prepared.manifest_path.parent) == ["manifest.json", "pt", "pt.json"]


def test_whoever_waits_for_another_is_told_so(in_process: list[dict[str, Any]], root: Path) -> None:
    prepared = cache.ensure(TIED, "pt")
    lock = FileLock(
        root / "locks" / f"{prepared.manifest_path.parent.name}.lock", thread_local=False
    )
    lock.acquire()
    said: list[str] = []

    def progress(text: str, _share: float | None) -> None:
        said.append(text)
        lock.release()

    cache.ensure(TIED, "pt", progress=progress)
    assert said == [
        f"waiting for another weighin process that uses {prepared.manifest_path.parent.name}"
    ]


def test_a_users_own_file_is_read_once_and_again_when_it_changes(
    in_process: list[dict[str, Any]], tmp_path: Path
) -> None:
    path = tmp_path / "mine.pt"
    shutil.copy(cache.ensure(TIED, "pt").path, path)
    first = cache.ensure(TIED, "pt", checkpoint=path)
    assert (first.path, first.made) == (path, True)
    assert not cache.ensure(TIED, "pt", checkpoint=path).made
    split = cache.ensure(TIED, "per_param", checkpoint=path)
    assert split.path.parent == first.manifest_path.parent
    assert first.path.exists()
    os.utime(path, (1, 1))
    assert cache.ensure(TIED, "pt", checkpoint=path).made
    with pytest.raises(CheckpointError, match="no such file"):
        cache.ensure(TIED, "pt", checkpoint=tmp_path / "none")


def test_listing_and_clearing(in_process: list[dict[str, Any]], root: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_text("x")
    prepared = cache.ensure(TIED, "pt")
    cache.ensure(TIED, "per_param")
    (root / "models" / "link-0").symlink_to(kept)
    for used, fmt in enumerate(("per_param", "pt"), start=10**15):  # within one second
        os.utime(prepared.manifest_path.with_name(f"{fmt}.json"), ns=(used * 10**3, used * 10**3))
    listed = cache.list_entries()
    assert [stored["format"] for stored in listed] == ["pt", "per_param"]
    assert {(stored["name"], stored["format"]) for stored in listed} == {
        (prepared.manifest_path.parent.name, "pt"),
        (prepared.manifest_path.parent.name, "per_param"),
    }
    assert all(stored["bytes"] > 0 for stored in listed)
    with pytest.raises(UnknownName, match=r"no cached model is called '\.\./kept'"):
        cache.clear("../kept")
    assert len(cache.clear("tied-tiny")) == 2
    assert cache.list_entries() == []
    assert (kept / "file").exists()
    assert cache.clear() == []


def test_a_models_name_cannot_lead_out_of_the_cache(
    in_process: list[dict[str, Any]], root: Path
) -> None:
    spec = ModelSpec("../../evil", TIED.builder, TIED.kwargs)
    assert cache.ensure(spec, "pt").path.is_relative_to(root / "models")


def test_a_cache_that_cannot_be_written_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match=r"cannot write to the cache .*file: "):
        cache.ensure(TIED, "pt")


def test_another_code_of_a_users_model_is_another_checkpoint(tmp_path: Path, root: Path) -> None:
    code = "import torch\n\n\ndef build():\n    return torch.nn.Linear(3, {})\n"
    made = []
    for width in (2, 2, 40):
        (tmp_path / "edited_nets.py").write_text(code.format(width))
        spec = ModelSpec("edited", "edited_nets:build")
        made.append(cache.ensure(spec, "pt", python_path=[str(tmp_path)]))
    assert [one.made for one in made] == [True, False, True]
    assert [one.manifest().tensors[0].shape for one in made] == [(2, 3), (2, 3), (40, 3)]
    assert len(names(root / "models")) == 2
