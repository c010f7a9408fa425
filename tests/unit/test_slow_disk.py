"""Which means slows a disk down, and what a worker waits for."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cgroup_trees import Kernel
from scripts import JOB

from weighin.disk import mount, throttle
from weighin.disk.mount import WaitingRead
from weighin.disk.pace import Pace
from weighin.errors import IsolationUnavailable
from weighin.isolation import delegation
from weighin.run import slow_disk
from weighin.run.slow_disk import SlowDisk, device_to_throttle, pace_of

MS = 1_000_000
RATE = Pace(50_000_000)
HERE = Path("/model.pt")


@pytest.fixture
def fuse(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let FUSE be missing, and the checkpoint lie on the disk vda; note who asks for FUSE."""
    containers: list[bool] = []

    def obstacle(*, in_container: bool) -> tuple[str, str]:
        containers.append(in_container)
        return "no /dev/fuse", "load it"

    monkeypatch.setattr(mount, "obstacle", obstacle)
    monkeypatch.setattr(throttle, "device_of", lambda path: ("vda", ""))
    return containers


def refused(pace: Pace, isolation: str) -> str:
    with pytest.raises(IsolationUnavailable) as caught:
        device_to_throttle(pace, HERE, isolation)
    return str(caught.value)


@pytest.mark.usefixtures("fuse")
def test_a_rate_alone_is_the_kernels(kernel: Kernel) -> None:
    assert device_to_throttle(RATE, HERE, "cgroup") == "vda"


@pytest.mark.parametrize(
    "pace", [Pace(None, MS), Pace(50_000_000, MS), replace(RATE, stall_from_bytes=1)]
)
def test_a_latency_needs_fuse(kernel: Kernel, fuse: list[bool], pace: Pace) -> None:
    message = refused(pace, "cgroup")
    assert (
        f"{pace} only with FUSE, because the kernel's throttle limits the rate, but adds no latency"
        in message
    )
    assert message.endswith("no /dev/fuse\nload it")
    assert fuse == [False]


def test_a_process_has_no_cgroup_to_throttle(kernel: Kernel, fuse: list[bool]) -> None:
    assert (
        "because --isolation process creates no cgroup that the kernel could throttle"
        in refused(RATE, "process")
    )
    assert fuse == [False]


def test_a_container_is_throttled_by_its_engine(kernel: Kernel, fuse: list[bool]) -> None:
    kernel.mounts.write_text("")
    assert device_to_throttle(RATE, HERE, "docker") == "vda"
    refused(Pace(None, MS), "docker")
    assert fuse == [True]


@pytest.mark.usefixtures("fuse")
def test_a_machine_without_the_controller(kernel: Kernel) -> None:
    kernel.mounts.write_text("")
    why = "this machine has no cgroup controller that limits reads (blkio or io)"
    assert why in refused(RATE, "cgroup")


@pytest.mark.parametrize("kernel", ["v1", "hybrid"], indirect=True)
@pytest.mark.usefixtures("fuse")
def test_a_user_who_may_make_no_group_in_the_controller_of_reads(kernel: Kernel) -> None:
    kernel.refused.add(kernel.reads)
    assert f"this user may not create cgroups in {kernel.reads}" in refused(RATE, "cgroup")


@pytest.mark.parametrize("kernel", ["v2"], indirect=True)
@pytest.mark.usefixtures("fuse")
def test_a_delegated_group_without_the_controller(kernel: Kernel) -> None:
    (group := kernel.memory / "mine").mkdir()
    for root in (group, None):
        with pytest.MonkeyPatch.context() as patch:  # which ends before the kernel does
            patch.setattr(delegation, "groups_root", lambda found=root: found)
            assert f"{root} lacks the cgroup controller io" in refused(RATE, "cgroup")


@pytest.mark.usefixtures("fuse")
def test_a_file_system_without_a_disk(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "device_of", lambda path: ("", f"{path} lies on tmpfs"))
    assert "because /model.pt lies on tmpfs" in refused(RATE, "cgroup")
    monkeypatch.setattr(mount, "obstacle", lambda **_: None)
    assert device_to_throttle(RATE, HERE, "cgroup") == ""


def test_a_cells_pace_is_that_of_its_disk() -> None:
    cell = replace(JOB.cell, disk_bytes_per_s=5, disk_latency_ns=7)
    assert pace_of(cell) == Pace(5, 7)
    assert not pace_of(JOB.cell)


@pytest.mark.usefixtures("fuse")
def test_a_disk_as_it_is_has_no_means(kernel: Kernel) -> None:
    with slow_disk.under(JOB, "process") as disk:
        assert disk == SlowDisk(JOB, {})
    slow = replace(JOB, cell=replace(JOB.cell, disk_bytes_per_s=5))
    with slow_disk.under(slow, "cgroup") as disk:
        means = {"disk": {"means": "throttle", "device": "vda"}}
        assert disk == SlowDisk(replace(slow, throttled_device="vda"), means)


class FakeMount:
    """Stands for the mount of a folder, and for the reads that wait in it."""

    def __init__(self, *reads: WaitingRead) -> None:
        self._reads = list(reads)

    def waiting(self) -> list[WaitingRead]:
        return self._reads

    def close(self) -> None: ...


def stalled(latency_ns: int | None, *waited_ns: int) -> str:
    job = replace(JOB, cell=replace(JOB.cell, disk_latency_ns=latency_ns))
    reads = [WaitingRead(Path("/m/a"), 4096, ns) for ns in waited_ns]
    disk: Any = FakeMount(*reads)
    return SlowDisk(job, {}, disk).stalled()


def test_a_read_stalls_half_a_second_after_its_latency() -> None:
    assert stalled(None) == stalled(None, 500 * MS) == stalled(20 * MS, 520 * MS) == ""
    said = "the read of /m/a at offset 4096 has had no answer for 501 ms"
    assert stalled(None, 501 * MS, 1000 * MS) == said
    assert stalled(20 * MS, 521 * MS) == said.replace("501", "521")


def test_a_latency_is_given_by_a_mount_that_ends_with_the_cell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounted: list[tuple[Any, ...]] = []
    closed: list[str] = []

    class Mounted:
        folder = Path("/mounted")

        def __init__(self, *asked: Any) -> None:
            mounted.append(asked)

        def close(self) -> None:
            closed.append("closed")

    monkeypatch.setattr(slow_disk, "Mount", Mounted)
    monkeypatch.setattr(mount, "obstacle", lambda **_: None)
    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "model.pt").touch()
    cell = replace(JOB.cell, disk_latency_ns=MS)
    job = replace(JOB, cell=cell, checkpoint=str(tmp_path / "model.pt"))
    with pytest.raises(KeyError), slow_disk.under(job, "cgroup", stall_from_bytes=7) as disk:
        assert disk.job == replace(job, checkpoint="/mounted/model.pt")
        assert disk.means == {"disk": {"means": "fuse", "request_bytes": 128 * 1024}}
        assert isinstance(disk.mount, Mounted)
        assert closed == []
        raise KeyError
    assert mounted == [(tmp_path, Pace(None, MS, 7), tmp_path / "cache" / "disks")]
    assert closed == ["closed"]
