"""Growing beside a target: one writer at a time, and no two targets that are taken for one."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from weighin.checkpoint import staging
from weighin.child_process import Child, environment
from weighin.errors import ConfigError


def test_of_conversions_at_once_to_one_target_one_writes(tmp_path: Path) -> None:
    target, start = tmp_path / "out", threading.Barrier(8)
    inside, most, refused = 0, 0, 0
    count = threading.Lock()

    def once() -> None:
        nonlocal inside, most, refused
        with suppress(threading.BrokenBarrierError):
            start.wait()
        try:
            with staging.growing_beside(target) as folder:
                with count:
                    inside += 1
                    most = max(most, inside)
                (folder / "part").write_text("x")
                time.sleep(0.001)
                assert [one.name for one in folder.iterdir()] == ["part"]
                with count:
                    inside -= 1
        except ConfigError as error:
            assert error.message == f"another weighin process is writing {target}"
            with count:
                refused += 1

    def often() -> None:
        try:
            for _ in range(60):
                once()
        finally:
            start.abort()  # an error in one thread must not leave the others waiting for it

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(often) for _ in range(8)]:
            done.result()
    assert most == 1
    assert 0 < refused < 480
    assert list(tmp_path.iterdir()) == []


def test_long_names_that_begin_alike_are_two_targets(tmp_path: Path) -> None:
    first, second = (tmp_path / ("x" * 150 + end) for end in "ab")
    with staging.growing_beside(first) as one, staging.growing_beside(second) as two:
        assert one != two


def test_a_folder_of_a_killed_process_is_removed_and_one_in_use_is_not(tmp_path: Path) -> None:
    code = (
        "import os, sys, pathlib; from weighin.checkpoint import staging;"
        "held = staging.own_folder(pathlib.Path(sys.argv[1]), 'ours-');"
        "from weighin.child_process import Parent; parent = Parent();"
        "parent.send('held', folder=str(held.__enter__())); parent.receive(); os._exit(0)"
    )
    with Child((sys.executable, "-P", "-c", code, str(tmp_path)), environment()) as child:
        folder = Path((child.receive(60) or {})["folder"])
        (tmp_path / "theirs").mkdir()
        with staging.own_folder(tmp_path, "ours-") as mine:
            assert folder.exists() and mine != folder
        assert not mine.exists()
    assert staging.remove_orphans(tmp_path, "ours-") == [folder]
    assert [path.name for path in tmp_path.iterdir()] == ["theirs"]
