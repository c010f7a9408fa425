"""A group is stopped for an instant and goes on, and nothing of it stays if its owner dies."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_trees import command
from leftovers import lives, wait_until

from weighin.isolation import cgroup
from weighin.probes.freezer import Freezer, groups_of

pytestmark = pytest.mark.cgroup

COUNTING = """
import threading
counter = [0]
def count():
    while True:
        counter[0] += 1
        open(PATH, "w").write(str(counter[0]))
        time.sleep(0.001)
threading.Thread(target=count, daemon=True).start()
step("counting")
"""


@pytest.fixture
def groups() -> Iterator[list[Path]]:
    made = cgroup._make_groups()
    try:
        yield made
    finally:
        cgroup._remove(made)


def enter(groups: list[Path], pid: int) -> None:
    for group in groups:
        (group / "cgroup.procs").write_text(str(pid))


def test_a_frozen_group_does_nothing_and_then_goes_on(groups: list[Path], tmp_path: Path) -> None:
    freezer = Freezer(groups)
    if not freezer.works:
        pytest.skip("no group of a cell has a freezer here")
    file = tmp_path / "count"
    with command(f"PATH = {str(file)!r}\n{COUNTING}") as one:
        enter(groups, one.pid)
        one.reach("counting")
        wait_until(lambda: file.exists() and file.read_text() > "3", "it does not count")
        with freezer.frozen() as is_frozen:
            assert is_frozen
            before = file.read_text()
            time.sleep(0.1)
            assert file.read_text() == before
        wait_until(lambda: file.read_text() not in ("", before), "it does not go on")
        with pytest.raises(KeyboardInterrupt), freezer.frozen():
            raise KeyboardInterrupt
        before = file.read_text()
        wait_until(lambda: file.read_text() not in ("", before), "it does not go on")


def test_a_frozen_process_can_be_killed(groups: list[Path]) -> None:
    freezer = Freezer(groups)
    if not freezer.works:
        pytest.skip("no group of a cell has a freezer here")
    with command('step("started")') as one:
        enter(groups, one.pid)
        one.reach("started")
        with freezer.frozen():
            os.kill(one.pid, signal.SIGKILL)
            if freezer._control and freezer._control.name == "cgroup.freeze":
                assert one.process.wait(60) == -9
        assert one.process.wait(60) == -9


DYING = """
import os, signal, subprocess
from weighin.isolation import cgroup
from weighin.probes.freezer import Freezer
groups = cgroup._make_groups()
child = subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=-3, stderr=-3)
for group in groups:
    (group / "cgroup.procs").write_text(str(child.pid))
with Freezer(groups).frozen() as is_frozen:
    print(child.pid, is_frozen, *groups, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_frozen_group_of_a_dead_owner_is_removed() -> None:
    died = subprocess.run(
        [sys.executable, "-c", DYING], capture_output=True, text=True, check=False
    )
    assert died.returncode == -9, died.stderr
    pid, _, *groups = died.stdout.split()
    assert lives(int(pid))
    removed = cgroup.CgroupIsolation().remove_stale()
    assert {f"cgroup {group}" for group in groups} <= set(removed)
    wait_until(lambda: not lives(int(pid)), "the frozen process lives")
    assert not any(Path(group).exists() for group in groups)


def test_a_group_that_is_gone_stops_nothing(groups: list[Path]) -> None:
    freezer = Freezer(groups)
    for group in groups:
        group.rmdir()
    with freezer.frozen() as is_frozen:
        assert not is_frozen


def test_the_other_groups_of_a_process_are_found_by_their_name(groups: list[Path]) -> None:
    with command('step("started")') as one:
        one.reach("started")
        assert groups_of(one.pid, groups[0]) == groups[:1]
        enter(groups, one.pid)
        assert groups_of(one.pid, groups[0]) == groups
        one.process.kill()
        one.process.wait()
        assert groups_of(one.pid, groups[0]) == groups[:1]
