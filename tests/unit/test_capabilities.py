"""What the doctor says of each figure, on kernels that have it and on those that have not."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_cgroup_probe import HYBRID
from test_memory_cgroup import make_group

from weighin import doctor, slow_disk
from weighin.doctor import Capability, of_group
from weighin.errors import IsolationUnavailable
from weighin.probes.cgroup import Cgroup

KILLS = Capability("kills for lack of memory", "yes", "exact: oom_kill in memory.events.local")
REFAULTS = Capability("refaults", "yes", "exact: workingset_refault_file in memory.stat")


def findings(folder: Path, kernel: str) -> list[Capability]:
    return list(of_group(make_group(folder, kernel)))


def test_version_1(tmp_path: Path) -> None:
    exact = "exact for each phase: memory.max_usage_in_bytes, reset at the end of each"
    assert findings(tmp_path, HYBRID) == [
        Capability("cgroup peak", "yes", exact),
        Capability("kills for lack of memory", "yes", "exact: oom_kill in memory.oom_control"),
        REFAULTS,
    ]


def test_version_2_whose_mark_is_the_whole_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Cgroup, "reset_peak", lambda _: False)
    assert findings(tmp_path, "v2-6.12")[0] == Capability(
        "cgroup peak",
        "partly",
        "exact for the whole cell, not for a phase: resetting memory.peak needs Linux 6.12",
    )


def test_version_2_without_a_mark(tmp_path: Path) -> None:
    missing = "missing: memory.peak needs Linux 5.19; only samples are available"
    peak = Capability("cgroup peak", "no", missing)
    assert findings(tmp_path, "v2-5.10") == [peak, KILLS, REFAULTS]


def test_a_kernel_without_refaults_tells_part_of_it(tmp_path: Path) -> None:
    why = "missing: this counter needs Linux 5.9; only major page faults are available"
    group = make_group(tmp_path, "hybrid-5.10-without-psi")
    assert list(of_group(group))[-1] == Capability("refaults", "partly", why)


def test_the_doctor_imports_no_torch() -> None:
    code = "import sys, weighin.doctor; print('torch' in sys.modules)"
    asked = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True
    )
    assert asked.stdout == "False\n"


@pytest.mark.parametrize("is_refused", [False, True])
def test_a_slow_disk_on_a_fresh_machine_and_for_containers(
    is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(*, in_container: bool) -> None:
        if in_container and is_refused:
            raise IsolationUnavailable("they may not read it", "write a line")

    class Mounted:
        def __init__(self, folder: Path, *_: object) -> None:
            assert folder.exists()

        def close(self) -> None:
            pass

    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "none" / "yet"))
    monkeypatch.setattr(slow_disk, "check", check)
    monkeypatch.setattr(slow_disk, "Mount", Mounted)
    found = doctor._slow_disk()
    assert (found.verdict, found.detail) == (
        ("partly", "they may not read it. write a line")
        if is_refused
        else ("yes", "FUSE has mounted a folder a second time")
    )
