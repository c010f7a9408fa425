"""A limit above a cell's cgroup, such as that of a container, is seen, and named when it kills."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import JOB, followed

from weighin.isolation import cgroup
from weighin.isolation.process import Started
from weighin.probes.cgroup import Cgroup, limits_around, memory_hierarchy
from weighin.result import Outcome
from weighin.settings.definition import Settings
from weighin.units import MIB

pytestmark = pytest.mark.cgroup

# What a container sees on cgroup v1: its own group as the root of the hierarchy.
CONTAINER = """
echo $BASHPID > $0/cgroup.procs
exec unshare -C -m bash -c 'umount $0; mount -t cgroup -o memory none $0; exec "$@"' $1 "${@:2}"
"""
BENCH = ("bench", "gpt2-tiny", "--isolation", "cgroup", "--ram", "2g", "--out")
TAKES = ("python3", "-c", "held = bytearray(200 << 20)")


@pytest.fixture
def around() -> Iterator[Path]:
    """A cgroup with a limit of 64 MiB, in which further groups can be limited."""
    root = cgroup.groups_root()
    assert root
    group = root / f"weighin-test-{os.getpid()}"
    group.mkdir()
    cgroup.limit(group, 64 * MIB)
    if (control := group / "cgroup.subtree_control").exists():
        control.write_text("+memory")
    yield group
    cgroup.remove([group])


@pytest.mark.parametrize("limit_bytes", [None, 160 * MIB, 48 * MIB])
def test_a_kill_by_a_limit_above_the_cells_own_names_it(
    around: Path, limit_bytes: int | None
) -> None:
    (cell := around / "cell").mkdir()
    if limit_bytes:
        cgroup.limit(cell, limit_bytes)
    job = replace(JOB, cell=replace(JOB.cell, ram_limit_bytes=limit_bytes))
    with closing(Started(TAKES, groups=[cell])) as running:
        result, _ = followed(running, job=job, settings=Settings())
    assert result.outcome is Outcome.OOM_KILLED
    own, _, outer = result.message.partition(": ")
    assert own == "killed by the kernel for lack of memory before its first phase"
    if limit_bytes == 48 * MIB:
        assert outer == ""
    else:
        assert outer.startswith("the load reached the limit of 64.000 MiB of the outer cgroup /")
        assert outer.endswith(f"/{around.name}")


def test_the_smallest_limit_from_a_cell_to_the_root_is_the_first(around: Path) -> None:
    (cell := around / "cell").mkdir()
    assert limits_around(cell)[0] == (64 * MIB, around)
    cgroup.limit(cell, 32 * MIB)
    assert limits_around(cell)[:2] == [(32 * MIB, cell), (64 * MIB, around)]


def test_a_limit_above_that_of_the_container_is_refused(around: Path, tmp_path: Path) -> None:
    version, mount = memory_hierarchy() or (0, Path())
    if version != 1:
        pytest.skip("this container is one of cgroup v1")
    Cgroup(around).raise_limit()
    cgroup.limit(around, 640 * MIB)
    command = (sys.executable, "-m", "weighin", *BENCH, str(tmp_path / "run"))
    ended = subprocess.run(
        ("bash", "-c", CONTAINER, str(around), str(mount), *command),
        env=os.environ | {"WEIGHIN_LOCK": str(tmp_path / "lock")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert ended.stderr.endswith(
        f"error: --ram 2GiB is more than the limit of the cgroup in which weighin measures, {mount}"
        " (640.000 MiB)\ngive a smaller --ram, or raise the limit of that cgroup, for example the"
        " memory limit of the container\n"
    )
    assert Cgroup(around).numbers("oom")["oom_kill"] == 0
