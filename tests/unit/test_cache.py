"""The cache: made once, whole or not there, and never anything outside of its folder."""

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from filelock import FileLock
from leftovers import lives, wait_until

from weighin.cell import ModelSpec
from weighin.checkpoint import cache, temporary_folders
from weighin.child_process import Child, environment
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
        time.sleep(600)
    return nn.Linear(2, 2)
"""


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch, torch_threads_restored: None) -> None:
    """Run the maker in this process: a second torch import a call would take most of the time."""
    from weighin.checkpoint import __main__ as maker

    parent: Any = SimpleNamespace(send=lambda *_, **__: None)
    monkeypatch.setattr(cache, "run_child", lambda request, **_: maker.answer(request, parent))


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
    assert first.path.stat().st_mode & 0o777 == 0o444  # only root could write to it
    second = cache.ensure(TIED, "pt")
    assert not second.made
    assert second.path == first.path


def test_an_error_of_the_maker_is_raised_here_and_leaves_nothing(root: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        cache.ensure(ModelSpec("m", "weighin.models.tied:tide"), "pt")
    assert caught.value.message == (
        "builder 'weighin.models.tied:tide': module 'weighin.models.tied' has no function 'tide'"
    )
    assert names(root / "models") == []


@pytest.mark.usefixtures("in_process")
def test_a_disk_one_byte_too_small(monkeypatch: pytest.MonkeyPatch, root: Path) -> None:
    needs: list[int] = []
    real = temporary_folders.check_space

    def check(folder: Path, what: str, needed: int, repair: str) -> None:
        needs.append(needed)
        free = SimpleNamespace(free=needed - (len(needs) == 1))
        monkeypatch.setattr(shutil, "disk_usage", lambda _: free)
        real(folder, what, needed, repair)

    monkeypatch.setattr(temporary_folders, "check_space", check)
    with pytest.raises(ConfigError) as caught:
        cache.ensure(TIED, "pt")
    assert caught.value.message.startswith("the pt checkpoint of tied-tiny needs ")
    assert caught.value.message.endswith(f" are free in {root}")
    assert caught.value.repair == (
        "put the cache on another disk (WEIGHIN_CACHE=/path weighin ...), or empty the cache"
        " (weighin cache clear)"
    )
    assert names(root / "models") == []
    assert cache.ensure(TIED, "pt").made


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    """The folder of a model whose first maker takes ten minutes."""
    (tmp_path / "slow_model.py").write_text(SLOW_SOURCE)
    return tmp_path


def maker_of(folder: Path) -> int:
    """Wait for the process that makes the checkpoint of the slow model, and return its number."""
    marker = folder / "pid"
    wait_until(lambda: marker.exists() and marker.read_text(), "no process makes a checkpoint")
    return int(marker.read_text())


def test_a_maker_that_is_killed_leaves_no_entry(slow: Path, root: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(cache.ensure, SLOW, "pt", python_path=[str(slow)])
        os.kill(maker_of(slow), signal.SIGKILL)
        said = str(done.exception(60))
    assert said.startswith("the process that prepares the checkpoint was killed by SIGKILL\n")
    assert names(root / "models") == []


def test_a_killed_harness_takes_its_maker_along_and_frees_the_lock(slow: Path, root: Path) -> None:
    code = (
        "from weighin.cell import ModelSpec; from weighin.checkpoint import cache; "
        f"cache.ensure(ModelSpec('slow', 'slow_model:build'), 'pt', python_path=[{str(slow)!r}])"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as parent:
        maker = maker_of(slow)
        (entry,) = (root / "models").iterdir()
        assert names(entry)[0].startswith(cache._TEMPORARY)
        parent.kill()
    wait_until(lambda: not lives(maker), "the maker outlived its parent")
    prepared = cache.ensure(SLOW, "pt", python_path=[str(slow)])
    assert names(prepared.manifest_path.parent) == ["manifest.json", "pt", "pt.json"]


@pytest.mark.usefixtures("in_process")
def test_whoever_waits_for_another_is_told_so(root: Path) -> None:
    entry = cache.ensure(TIED, "pt").manifest_path.parent.name
    lock = FileLock(root / "locks" / f"{entry}.lock", thread_local=False)
    lock.acquire()
    said: list[str] = []

    def progress(text: str, _share: float | None) -> None:
        said.append(text)
        lock.release()

    cache.ensure(TIED, "pt", progress=progress)
    assert said == [f"waiting for another weighin process, which uses {entry}"]


@pytest.mark.usefixtures("in_process")
def test_a_users_own_file_is_read_once_and_again_when_it_changes(tmp_path: Path) -> None:
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


@pytest.mark.usefixtures("in_process")
def test_listing_and_clearing_stay_in_the_cache(root: Path, tmp_path: Path) -> None:
    (kept := tmp_path / "kept").mkdir()
    (kept / "file").write_text("x")
    outside = cache.ensure(ModelSpec("../../evil", TIED.builder, TIED.kwargs), "pt")
    assert outside.path.is_relative_to(root / "models")
    (root / "models" / "link-0").symlink_to(kept)
    with pytest.raises(UnknownName, match=r"no cached model is called '\.\./kept'"):
        cache.clear("../kept")
    assert len(cache.list_entries()) == len(cache.clear()) == 1
    assert cache.list_entries() == []
    assert (kept / "file").exists()


# Temporary folders: each process has its own, and those of killed processes go


def test_processes_at_once_have_folders_of_their_own(tmp_path: Path) -> None:
    barrier = threading.Barrier(8)

    def often() -> None:
        for _ in range(40):
            barrier.wait(60)
            with temporary_folders.own_folder(tmp_path, "ours-") as folder:
                (folder / "part").write_text("x")
                time.sleep(0.001)
                assert [one.name for one in folder.iterdir()] == ["part"]

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(often) for _ in range(8)]:
            done.result()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_of_a_killed_process_is_removed_and_one_in_use_is_not(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib; from weighin.checkpoint import temporary_folders;"
        "held = temporary_folders.own_folder(pathlib.Path(sys.argv[1]), 'ours-');"
        "from weighin.child_process import Parent; parent = Parent();"
        "parent.send('held', folder=str(held.__enter__())); parent.receive(); os._exit(0)"
    )
    with Child((sys.executable, "-P", "-c", code, str(tmp_path)), environment()) as child:
        folder = Path((child.receive(60) or {})["folder"])
        (tmp_path / "theirs").mkdir()
        with temporary_folders.own_folder(tmp_path, "ours-") as mine:
            assert folder.exists() and mine != folder
        assert not mine.exists()
    assert temporary_folders.remove_orphans(tmp_path, "ours-") == [folder]
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
