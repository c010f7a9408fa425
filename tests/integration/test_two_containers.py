"""Runs in two containers that share the machine's cgroups leave each other's cells alone."""

import os
import subprocess
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import images
import leftovers
import pytest
from typed import ROOT, CommandLine, words

from weighin.isolation.process import CgroupIsolation
from weighin.probes.cgroup import LOCK_VARIABLE, lock_suffix, memory_hierarchy

pytestmark = [pytest.mark.docker, pytest.mark.cgroup, pytest.mark.root, pytest.mark.slow]

# The environment of the tests, below the process ids of the container. Each container has a file of
# its own under the name of the lock, and in the cache.
INSIDE = 'mount -t proc none /host/proc && mount -t tmpfs none "/host$0" && exec chroot /host "$@"'
NEEDED = ("--cap-add=SYS_ADMIN", "--security-opt=seccomp=unconfined", "--cgroupns=host")
BENCH = "bench gpt2-tiny --isolation cgroup --ram 1g --use none"

Start = Callable[[str], "subprocess.Popen[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts ``weighin LINE`` in a container; what still runs at the end is killed."""
    images.make(image := f"weighin-test-mounts:{os.getpid()}", ("sh", "mount", "chroot"))
    numbers, started = count(), dict[str, "subprocess.Popen[str]"]()
    (own := tmp_path / "own").mkdir()
    settings = {"WEIGHIN_CACHE": own, LOCK_VARIABLE: own / "lock", "PYTHONPATH": ROOT / "harness"}

    def starting(line: str) -> "subprocess.Popen[str]":
        name = f"weighin-test-{os.getpid()}-{next(numbers)}"
        container = ("docker", "run", "--rm", f"--name={name}", *NEEDED, "--volume=/:/host", image)
        variables = ("env", f"--chdir={tmp_path}", *(f"{k}={v}" for k, v in settings.items()))
        started[name] = subprocess.Popen(
            (*container, "sh", "-c", INSIDE, str(own), *variables, *words(line)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return started[name]

    yield starting
    for name, process in started.items():
        if process.poll() is None:
            subprocess.run(("docker", "rm", "--force", name), capture_output=True, check=False)
        process.communicate(timeout=30)
    images.remove(image)


def groups() -> list[Path]:
    """Return the groups of these tests' cells."""
    hierarchy = memory_hierarchy()
    assert hierarchy
    return [*hierarchy[1].rglob(f"weighin.*{lock_suffix()}")]


def test_runs_in_two_containers_and_on_the_host_leave_each_other_alone(
    tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOCK_VARIABLE, str(tmp_path / "own/lock"))
    line = CommandLine(tmp_path, tmp_path)
    line.strategy("pausing").chmod(0o755)

    def pausing(name: str, at_work: int) -> "subprocess.Popen[str]":
        process = start(f"{BENCH} -s ./pausing.py --out {name}")
        leftovers.wait_until(
            lambda: len(groups()) == at_work or process.poll() is not None,
            f"{name} does not begin",
            90,
        )
        assert process.poll() is None, process.communicate()
        return process

    first = pausing("first", 1)
    second = pausing("second", 2)  # its start looks for leftovers beside the first
    third = start(f"{BENCH} -s streaming --out third")  # and this one beside both
    assert third.wait(120) == 0, third.communicate()
    assert len(groups()) == 2
    assert CgroupIsolation().remove_stale() == []
    said, _ = start("doctor").communicate(timeout=120)
    assert "weighin." not in said
    line.let_go()
    for process in (first, second):
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 0, said
    for name in ("first", "second", "third"):
        record = line.record(name)
        assert (record["outcome"], record["message"]) == ("ok", "")
    leftovers.wait_until(lambda: groups() == [], "a group is left")
