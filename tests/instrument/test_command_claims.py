"""weighin claims a copy, and leaves a kind of memory out, only as far as it saw the memory."""

from pathlib import Path

import leftovers
import pytest
from cells import MIB
from typed import measured

pytestmark = [pytest.mark.cgroup, pytest.mark.compiler]

ISOLATIONS = pytest.mark.parametrize("isolation", ["cgroup", "process"])


@ISOLATIONS
@pytest.mark.parametrize("how", ["freed", "dropped"])
def test_memory_of_forked_processes_own_is_no_copy(
    how: str, isolation: str, programs: Path, tmp_path: Path
) -> None:
    command = (str(programs / "heirs"), "300", "100", how)
    found = measured(tmp_path / "run", command, f"--isolation {isolation}")
    print([one["copied_bytes"] for one in found.record["ran"]["processes"]])
    assert "Copy-on-write" not in found.said
    assert found.needed_bytes >= 300 * MIB


@ISOLATIONS
def test_shared_pages_that_become_private_are_copies(
    isolation: str, programs: Path, tmp_path: Path
) -> None:
    # On a busy machine a table of the processes takes long, and the next follows after 20 times that:
    # the parent's memory is to be seen twice before the forks, the children's after them.
    command = (str(programs / "forks"), "128", "3", "6000", "3000")
    found = measured(tmp_path / "run", command, f"--isolation {isolation}")
    copied = [one["copied_bytes"] or 0 for one in found.record["ran"]["processes"]]
    print(copied, found.said)
    assert "Copy-on-write: 3 forked processes wrote to pages" in found.said
    assert 150 * MIB <= sum(copied) <= 194 * MIB


def test_a_plain_process_says_what_is_not_seen(programs: Path, tmp_path: Path) -> None:
    command = (str(programs / "writes"), "150", "-", "300")
    found = measured(tmp_path / "run", command, "--isolation process")
    assert found.needed_bytes < 10 * MIB
    for unseen in ("kernel memory", "huge pages", "files in memory that no process maps"):
        assert unseen in found.said


@ISOLATIONS
def test_a_file_that_stays_in_memory_is_named_with_its_size(
    isolation: str, programs: Path, tmp_path: Path
) -> None:
    path = Path("/dev/shm") / f"weighin-test-{isolation}-{tmp_path.name}"
    try:
        command = (str(programs / "writes"), "40", str(path), "100")
        found = measured(tmp_path / "run", command, f"--isolation {isolation}")
    finally:
        path.unlink()
    assert f"{path} (40.000 MiB)" in found.said


def test_a_file_that_was_removed_is_not_named(programs: Path, tmp_path: Path) -> None:
    found = measured(tmp_path / "run", (str(programs / "writes"), "40", "-", "100"))
    assert found.record["warnings"] == []
    assert leftovers.processes(str(programs / "writes")) == []
