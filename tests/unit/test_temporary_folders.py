"""Temporary folders: each process has its own, and those of killed processes go."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from weighin.checkpoint import temporary_folders
from weighin.child_process import Child, environment


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
