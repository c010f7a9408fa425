"""What the doctor says of each figure, on kernels that have it and on those that have not."""

import subprocess
import sys
from pathlib import Path

import pytest
from test_cgroup_probe import HYBRID
from test_memory_cgroup import make_group

from weighin import doctor, slow_disk
from weighin.doctor import Capability, Verdict, gpu, of_group, pressure
from weighin.errors import IsolationUnavailable
from weighin.probes import gpu_memory
from weighin.probes.cgroup import PeakMark
from weighin.probes.gpu_memory import Gpu, GpuAnswer
from weighin.units import GIB

KILLS = Capability("kills for lack of memory", "good", "exact: oom_kill in memory.events.local")
REFAULTS = Capability("refaults", "good", "exact: workingset_refault_file in memory.stat")
SOFT = Capability("soft limit (--ram-high)", "good", "memory.high, with --isolation cgroup")


def findings(folder: Path, kernel: str) -> list[Capability]:
    return list(of_group(make_group(folder, kernel)))


def test_version_1(tmp_path: Path) -> None:
    exact = "exact for each phase: memory.max_usage_in_bytes, reset at the end of each"
    assert findings(tmp_path, HYBRID) == [
        Capability("cgroup peak", "good", exact),
        Capability("kills for lack of memory", "good", "exact: oom_kill in memory.oom_control"),
        REFAULTS,
        Capability("soft limit (--ram-high)", "poor", "cgroup v1 has no memory.high"),
    ]


def test_version_2_whose_mark_resets(tmp_path: Path) -> None:
    exact = "exact for each phase: memory.peak, reset at the end of each"
    peak = Capability("cgroup peak", "good", exact)
    assert findings(tmp_path, "v2-6.12") == [peak, KILLS, REFAULTS, SOFT]


def test_version_2_whose_mark_is_the_whole_cells(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PeakMark, "reset", lambda mark: False)
    assert findings(tmp_path, "v2-6.12")[0] == Capability(
        "cgroup peak",
        "poor",
        "exact for the whole cell, not for a phase: resetting memory.peak needs Linux 6.12",
    )


def test_version_2_without_a_mark(tmp_path: Path) -> None:
    missing = "missing: memory.peak needs Linux 5.19; only samples are available"
    peak = Capability("cgroup peak", "bad", missing)
    assert findings(tmp_path, "v2-5.10") == [peak, KILLS, REFAULTS, SOFT]


def test_a_kernel_that_counts_neither_kills_nor_refaults(tmp_path: Path) -> None:
    group = make_group(tmp_path, "v2-6.12")
    group.file("oom").unlink()
    group.file("stat").write_text("anon 1\nworkingset_refault 7\n")
    assert list(of_group(group))[1:3] == [
        Capability(
            "kills for lack of memory",
            "bad",
            "missing: oom_kill in memory.events.local needs Linux 5.2 (v2) or 4.13 (v1)",
        ),
        Capability(
            "refaults",
            "poor",
            "missing: this counter needs Linux 5.9; only major page faults are available",
        ),
    ]


@pytest.mark.parametrize(
    ("on", "tree", "version", "verdict", "detail"),
    [
        (False, "/u", 2, "poor", "missing: disabled in this kernel; boot with psi=1"),
        (
            True,
            None,
            1,
            "poor",
            "missing: it needs a cgroup v2 tree, and none is mounted",
        ),
        (
            True,
            "/u",
            1,
            "good",
            "exact with --isolation cgroup, through /u; not with docker on cgroup v1",
        ),
        (True, "/u", 2, "good", "exact: memory.pressure of the cell's cgroup"),
    ],
)
def test_pressure(
    monkeypatch: pytest.MonkeyPatch,
    on: bool,
    tree: str | None,
    version: int,
    verdict: Verdict,
    detail: str,
) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: on)
    monkeypatch.setattr(doctor, "pressure_hierarchy", lambda: Path(tree) if tree else None)
    monkeypatch.setattr(doctor, "memory_hierarchy", lambda: (version, Path("/m")))
    assert pressure() == Capability("memory pressure (PSI)", verdict, detail)


@pytest.mark.parametrize(
    ("seen", "verdict", "detail"),
    [
        (GpuAnswer((Gpu("Example", GIB),)), "good", "Example, 1.000 GiB, peaks are exact"),
        (
            GpuAnswer(
                why="torch finds no CUDA GPU", repair="nvidia-smi shows whether the driver does"
            ),
            "bad",
            "there is one, but torch finds no CUDA GPU: nvidia-smi shows whether the driver does",
        ),
    ],
)
def test_a_gpu_is_looked_for_in_a_subprocess(
    monkeypatch: pytest.MonkeyPatch, seen: GpuAnswer, verdict: Verdict, detail: str
) -> None:
    monkeypatch.setattr(doctor, "_GPU_FILES", ("/proc",))
    monkeypatch.setattr(gpu_memory, "look", lambda: seen)
    assert gpu() == Capability("CUDA GPU", verdict, detail)


def test_without_the_file_of_a_driver_nobody_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_GPU_FILES", ())
    assert gpu() == Capability("CUDA GPU", "poor", "none: cells load to the CPU only")


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
            self.folder = folder

        def close(self) -> None:
            pass

    monkeypatch.setenv("WEIGHIN_CACHE", str(tmp_path / "none" / "yet"))
    monkeypatch.setattr(slow_disk, "check", check)
    monkeypatch.setattr(slow_disk, "Mount", Mounted)
    monkeypatch.setattr(doctor, "_page_read_s", lambda file: 0.005 if file.exists() else 0)
    found = "asked for 100MB/s, 5ms: a direct read of a page took 5.00 ms through FUSE"
    why = "; not for a load in docker: they may not read it: write a line" if is_refused else ""
    assert doctor._slow_disk() == ("poor" if is_refused else "good", found + why)
