"""The kernel's limit of reads from one disk, on trees of every kind."""

from pathlib import Path

import pytest
from cgroup_trees import Kernel

from weighin.disk import throttle
from weighin.errors import IsolationUnavailable


@pytest.fixture(name="kernel")
def _kernel(kernel: Kernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Each tree of cgroups, on a machine with the disk vda."""
    (disk := tmp_path / "block" / "vda").mkdir(parents=True)
    (disk / "dev").write_text("254:0\n")
    monkeypatch.setattr(throttle, "_DISKS", disk.parent)
    return kernel


def test_the_hierarchy_with_the_controller_of_reads(kernel: Kernel) -> None:
    assert throttle.hierarchy() == (2 if kernel.reads == kernel.unified else 1, kernel.reads)


def test_a_kernel_without_the_throttle(kernel: Kernel) -> None:
    for file in kernel.reads.glob("blkio.throttle.*"):
        file.unlink()
    if kernel.unified:
        (kernel.unified / "cgroup.controllers").write_text("cpu memory pids\n")
    assert throttle.hierarchy() is None


def test_the_rate_is_of_the_group_that_can_limit_reads(kernel: Kernel) -> None:
    others = [root / "cell" for root in (kernel.memory, kernel.unified) if root]
    groups = list(dict.fromkeys([*others, kernel.reads / "cell"]))
    for group in groups:
        group.mkdir()
    for _ in range(2):  # the second time, the controller is on
        throttle.limit(groups, "vda", 1_000_000)
    is_v2 = kernel.reads == kernel.unified
    file = kernel.reads / "cell" / ("io.max" if is_v2 else "blkio.throttle.read_bps_device")
    assert file.read_text() == ("254:0 rbps=1000000" if is_v2 else "254:0 1000000")
    if is_v2:
        assert (kernel.reads / "cgroup.subtree_control").read_text().split() == ["io"]


def test_a_kernel_that_refuses_is_named_with_its_reason(kernel: Kernel) -> None:
    (group := kernel.reads / "cell").mkdir()
    kernel.refused |= {
        group / "blkio.throttle.read_bps_device",
        kernel.reads / "cgroup.subtree_control",
    }
    with pytest.raises(IsolationUnavailable) as caught:
        throttle.limit([group], "vda", 1)
    assert str(caught.value) == (
        "the kernel does not limit reads from /dev/vda: Permission denied\n"
        "leave out --disk, or use a machine with the cgroup controller blkio (v1) or io (v2)"
    )
