"""``--disk``, ``disk_latency`` and ``storage`` on the command line, what a killed run leaves, and a late disk."""

import json
import os
import signal
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import leftovers
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from typed import CommandLine, Ended, Started

from weighin.errors import CheckpointError
from weighin.slow_disk import Mount, Pace
from weighin.stream.load_streaming import load_streaming

pytestmark = pytest.mark.fuse

LATENCY_NS = 20_000_000
CONNECTIONS = "/sys/fs/fuse/connections"
BENCH = "bench gpt2-tiny --isolation process"


def mounts(started: Started) -> list[str]:
    return leftovers.mounts(started.process.pid)


def paused(command: CommandLine, out: str) -> Started:
    """Start a run whose cell has a slow disk and waits."""
    return command.hold(
        f"{BENCH} --set disk_latency=20ms -s ./pausing.py --out {out}",
        at_work=lambda started: started.workers() and mounts(started),
    )


def wait_for_its_end(started: Started) -> None:
    leftovers.wait_until(lambda: not leftovers.processes(started.mark), "a process stayed")


@pytest.mark.slow
def test_a_killed_run_takes_its_slow_disk_with_it(command: CommandLine) -> None:
    started = paused(command, "killed")
    started.process.kill()
    leftovers.wait_until(lambda: not mounts(started), "the disk stayed mounted")
    wait_for_its_end(started)


def next_to_a_killed_run(command: CommandLine, line: str) -> Ended:
    """Run weighin beside the slow disk of a killed run, and return what it says about this disk.

    Any other run on this machine may be the next one and remove the disk first; then try again.
    """
    for attempt in range(5):
        started = paused(command, f"killed-{attempt}")
        # Kill the run and the process behind its disk, so that nobody is left to unmount it.
        behind = [one for one in leftovers.processes(started.mark) if "weighin.slow_disk" in one]
        (server,) = (int(one.split()[0]) for one in behind)
        os.kill(server, signal.SIGSTOP)
        started.process.kill()
        started.process.wait()
        os.kill(server, signal.SIGKILL)
        wait_for_its_end(started)
        ended = command.run(line)
        assert mounts(started) == []
        if "slow disk at" in ended.out + ended.err:
            break
    return ended


@pytest.mark.slow
def test_the_next_run_unmounts_what_a_killed_one_left(command: CommandLine) -> None:
    ended = next_to_a_killed_run(command, f"{BENCH} -s baseline")
    assert (ended.code, ended.left) == (0, [])
    assert "removed a leftover of a killed run: slow disk at " in ended.err
    assert list((command.cache / "disks").iterdir()) == []


@pytest.mark.slow
@pytest.mark.nightly
def test_doctor_unmounts_what_a_killed_run_left(command: CommandLine) -> None:
    ended = next_to_a_killed_run(command, "doctor --json -")
    details = [one["detail"] for one in json.loads(ended.out)["capabilities"]]
    assert [text for text in details if text.startswith("removed: slow disk at ")], details


@pytest.mark.slow
def test_a_run_on_two_disks_is_recorded_with_its_storage(command: CommandLine) -> None:
    disks = "--disk 20MB/s --set disk_latency=4ms,none --set 'storage=slow storage'"
    ended = command.run(f"{BENCH} -s streaming {disks} --out run")
    assert (ended.code, ended.left) == (0, []), ended.err
    assert "gpt2-tiny streaming    disk=20MB/s, disk_latency=4ms  ok" in ended.err
    for record in command.records("run"):
        assert record["environment"]["disk"]["means"] == "fuse"
        assert record["environment"]["storage"]["file_system"]
    assert list((command.folder / "slow storage" / "models").iterdir())
    plan = json.loads((command.folder / "run" / "plan.json").read_text())
    assert Path(plan["settings"]["storage"]) == command.folder / "slow storage"
    again = command.run("bench --resume run")
    assert (again.code, again.left) == (0, [])


def test_a_machine_that_cannot_be_slow_says_why(command: CommandLine) -> None:
    without = "import sys; sys.modules['mfusepy'] = None"
    (command.folder / "sitecustomize.py").write_text(without)
    path = f"{command.folder}{os.pathsep}{command.environment['PYTHONPATH']}"
    line = f"{BENCH} -s baseline --set disk_latency=5ms --out run"
    ended = command.run(line, PYTHONPATH=path)
    why = "error: weighin slows a disk down with FUSE, which does not work here: mfusepy is not installed"
    assert (ended.code, why in ended.err.splitlines()) == (3, True)
    assert not (command.folder / "run").exists()


def large() -> nn.Module:
    return nn.Sequential(*(nn.Linear(1000, 1003) for _ in range(10)))


def small() -> nn.Module:
    return nn.Sequential(*(nn.Linear(110, 100) for _ in range(900)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (folder := tmp_path / "disk").mkdir()
    return folder


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("build", [large, small])
def test_a_load_from_a_late_disk_is_right(
    build: Callable[[], nn.Module], suffix: str, folder: Path
) -> None:
    right, path = build().state_dict(), folder / f"model{suffix}"
    torch.save(right, path) if suffix == ".pt" else save_file(right, path)
    with closing(Mount(folder, Pace(None, LATENCY_NS), folder.parent)) as disk:
        found = load_streaming(build, disk.folder / path.name).state_dict()
    assert all(torch.equal(found[name], tensor) for name, tensor in right.items())


@pytest.mark.nightly  # on a machine with much other work, fewer were under way
@pytest.mark.parametrize("build", [large, small])
@pytest.mark.parametrize(("threads", "under_way"), [(None, 64), (4, 4)])
def test_a_late_disk_has_64_requests_under_way_unless_the_caller_wants_fewer_threads(
    threads: int | None, under_way: int, build: Callable[[], nn.Module], folder: Path
) -> None:
    """The last third of the file is never answered, so that each thread waits with its request."""
    if not os.path.ismount(CONNECTIONS):
        pytest.skip(f"the kernel does not tell: mount -t fusectl fusectl {CONNECTIONS}")
    path = folder / "model.safetensors"
    save_file(build().state_dict(), path)
    pace = Pace(None, LATENCY_NS, stall_from_bytes=path.stat().st_size * 2 // 3)

    def load() -> None:
        with pytest.raises(CheckpointError, match="cannot be read"):
            load_streaming(build, disk.folder / path.name, threads=threads)

    def waiting() -> int:
        """Return the number of requests without an answer, which the kernel counts."""
        device = os.minor(disk.folder.stat().st_dev)
        return int(Path(f"{CONNECTIONS}/{device}/waiting").read_text())

    with closing(Mount(folder, pace, folder.parent)) as disk:
        loading = threading.Thread(target=load)
        loading.start()
        leftovers.wait_until(lambda: waiting() >= under_way, "too few requests are under way")
        # The kernel may divide the read of a thread into two requests.
        assert waiting() <= 2 * under_way
    loading.join()
