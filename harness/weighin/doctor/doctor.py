"""``weighin doctor``: test which limits this machine can enforce and which figures it can measure.

weighin tests each capability of the machine, and infers none from version numbers.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from math import isclose
from mmap import PAGESIZE, mmap
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from weighin.cell import Cell, Job
from weighin.checkpoint import cache, entries
from weighin.disk import mount
from weighin.disk.pace import Pace
from weighin.disk.passthrough import LARGEST_READ_BYTES
from weighin.doctor.capabilities import Capability, figures
from weighin.errors import HarnessError
from weighin.isolation import delegation, select
from weighin.isolation.base import Isolation
from weighin.isolation.cgroup import limit, temporary_group
from weighin.probes import environment
from weighin.probes.cgroup import memory_hierarchy, pressure_hierarchy
from weighin.result import Outcome
from weighin.run import command_runner
from weighin.run.cell_runner import Setting, measure
from weighin.suite.registry import model, read_strategy
from weighin.units import MIB, format_bytes

_PROBE = Path(__file__).with_name("oom_probe.py")
_PROBE_LIMIT_BYTES = 384 * MIB
_PACE = Pace(100_000_000, 5_000_000)
_PROBED_BYTES = 64 * MIB
_READERS = 16  # at 5 ms each, they have more in flight than a disk of 100 MB/s answers
_WORDS = {"good": "yes", "poor": "partly", "bad": "no"}
_STYLES = {"good": "green", "poor": "yellow", "bad": "red"}


@dataclass(frozen=True, slots=True)
class Examination:
    """The results of all tests of ``weighin doctor``, in the order of the table's rows."""

    capabilities: tuple[Capability, ...]

    @property
    def holds_a_limit(self) -> bool:
        """Whether at least one isolation enforces a RAM limit on this machine."""
        return any(
            "enforces a limit" in one.subject and one.verdict == "good" for one in self.capabilities
        )

    def as_json(self) -> dict[str, Any]:
        return {
            "holds_a_limit": self.holds_a_limit,
            "capabilities": [
                asdict(one) | {"verdict": _WORDS[one.verdict]} for one in self.capabilities
            ],
        }


def examine(say: Callable[[str], None]) -> Examination:
    """Test this machine; ``say`` is called with a line of text before each slow step.

    ``examine`` removes, and reports, the containers, cgroups, processes, mounts and folders that
    killed runs left behind.
    """
    isolations = [select.named(name) for name in select.NAMES]
    limits = [finding for one in isolations for finding in _isolation(one, say)]
    folders = map(_removed, command_runner.remove_leftovers())
    mounts = map(_removed, mount.remove_stale(entries.slow_disks()))
    return Examination((*folders, *mounts, *limits, _slow_disk(say), *figures(), *_machine()))


def table(examination: Examination) -> Table:
    shown = Table("subject", "works", "detail", box=SIMPLE_HEAD, pad_edge=False)
    for one in examination.capabilities:
        works = f"[{_STYLES[one.verdict]}]{_WORDS[one.verdict]}[/]"
        shown.add_row(escape(one.subject), works, escape(one.detail))
    return shown


def _isolation(isolation: Isolation, say: Callable[[str], None]) -> Iterator[Capability]:
    subject = f"isolation {isolation.name}"
    try:
        isolation.check()
    except HarnessError as error:
        yield Capability(subject, "bad", f"{error.message}. {error.repair}")
        return
    yield from map(_removed, isolation.remove_stale())
    if not isolation.limits:
        yield Capability(subject, "good", "measures; enforces no limit")
    else:
        limit_size = format_bytes(_PROBE_LIMIT_BYTES)
        say(f"running a probe into a limit of {limit_size} with {isolation.name}")
        try:
            yield _prove(isolation, say)
        except HarnessError as error:
            yield Capability(subject, "bad", f"{error.message}. {error.repair}")


def _slow_disk(say: Callable[[str], None]) -> Capability:
    """Slow a disk down, and compare direct reads of it (O_DIRECT) with the rate and latency set."""
    subject = "slow disks (--disk, --disk-latency)"
    say(f"reading directly from a disk of {_PACE}")
    try:
        mount.check(in_container=False)
        with tempfile.TemporaryDirectory(dir=cache.folder()) as folder:
            (Path(folder) / "file").write_bytes(bytes(_PROBED_BYTES))
            with closing(mount.Mount(Path(folder), _PACE, entries.slow_disks())) as disk:
                latency_s, rate = _direct_reads(disk.folder / "file")
    except (HarnessError, OSError) as error:
        why = f"{error.message}. {error.repair}" if isinstance(error, HarnessError) else str(error)
        return Capability(subject, "poor", why)
    holds = isclose(rate, 100e6, rel_tol=0.05) and isclose(latency_s, 0.005, rel_tol=0.1)
    found = f"{rate / 1e6:.1f} MB/s and {latency_s * 1e3:.2f} ms through FUSE"
    detail = f"asked for {_PACE}: a direct read got {found}"
    return Capability(subject, "good" if holds else "poor", detail)


def _direct_reads(file: Path) -> tuple[float, float]:
    """Return the median time of a read of one page in s, and the rate of many reads in bytes per s."""
    descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT)

    def read(offset: int, area: mmap) -> float:
        start_s = monotonic()
        os.preadv(descriptor, [area], offset)
        return monotonic() - start_s

    try:
        page = mmap(-1, PAGESIZE)
        latency_s = median(read(number * PAGESIZE, page) for number in range(30))
        areas = [mmap(-1, LARGEST_READ_BYTES) for _ in range(_READERS)]
        offsets = iter(range(0, _PROBED_BYTES, LARGEST_READ_BYTES))
        with ThreadPoolExecutor(_READERS) as pool:
            start_s = monotonic()
            list(pool.map(lambda area: [read(offset, area) for offset in offsets], areas))
            spent_s = monotonic() - start_s
    finally:
        os.close(descriptor)
    rate = _PROBED_BYTES / (spent_s - latency_s)
    return latency_s - PAGESIZE / rate, rate


def _removed(line: str) -> Capability:
    return Capability("left behind by a killed run", "good", f"removed: {line}")


def _prove(isolation: Isolation, say: Callable[[str], None]) -> Capability:
    """Run a worker that allocates more than its limit, and check that the kernel kills the worker."""
    isolation.prepare(say)
    spec = model("gpt2-tiny")
    checkpoint = cache.ensure(spec, "pt")
    probe = read_strategy(_PROBE)
    cell = Cell(spec, probe.name, isolation.name, ram_limit_bytes=_PROBE_LIMIT_BYTES)
    job = Job(cell, str(checkpoint.path), str(checkpoint.manifest_path), str(probe.path))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "samples").mkdir()
        setting = Setting(isolation, Path(folder), {})
        result = measure(setting, job, [checkpoint.path], None)
    peak = result.peaks.cgroup_bytes
    subject = f"isolation {isolation.name} enforces a limit"
    if result.outcome is Outcome.OOM_KILLED and result.last_phase == "overrun":
        measured = f"cgroup peak {format_bytes(peak)}" if peak else "cgroup peak not measured"
        killed = f"a probe that allocated more than {format_bytes(_PROBE_LIMIT_BYTES)} was killed"
        return Capability(subject, "good", "; ".join([f"{killed}, {measured}", *result.warnings]))
    survived = f"a probe above its limit was not killed: {result.outcome} {result.message}"
    return Capability(subject, "bad", survived.rstrip())


def _machine() -> Iterator[Capability]:
    machine = environment.machine()
    yield _hierarchy()
    total, free = delegation.ram_bytes()
    limited = " (the limit of a cgroup around weighin)" if total < machine["ram_bytes"] else ""
    yield Capability("RAM", "good", f"{format_bytes(free)} free of {format_bytes(total)}{limited}")
    disk = shutil.disk_usage(cache.folder()).free
    yield Capability(
        "disk for checkpoints", "good", f"{format_bytes(disk)} free at {cache.folder()}"
    )
    yield _swap(machine["swap_bytes"])
    yield Capability(
        "transparent huge pages",
        "good",
        f"{machine['thp']} (affects memory figures; part of each record)",
    )
    yield gpu()


def _hierarchy() -> Capability:
    subject, hierarchy = "cgroup version", memory_hierarchy()
    if hierarchy is None:
        return Capability(subject, "bad", "no memory controller: boot with cgroup_enable=memory")
    version, place = hierarchy
    tree = pressure_hierarchy()
    if version == 2:
        return Capability(subject, "good", f"v2 at {place}")
    beside = f"beside a v2 tree at {tree}" if tree else "without a v2 tree"
    return Capability(subject, "poor", f"v1 at {place}, {beside}")


def _swap(swap_bytes: int) -> Capability:
    if not swap_bytes:
        return Capability("swap", "good", "none")
    try:
        with temporary_group() as group:
            limit(group, _PROBE_LIMIT_BYTES)
    except HarnessError as error:
        return Capability("swap", "poor", f"{format_bytes(swap_bytes)}; {error.message}")
    return Capability(
        "swap", "good", f"{format_bytes(swap_bytes)}, turned off for each limited cell"
    )


def gpu() -> Capability:
    """Test whether torch can use a GPU."""
    import torch  # takes 2 s, as the earlier tests have brought torch into the page cache

    subject = "CUDA GPU"
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        name = torch.cuda.get_device_name()
        detail = f"{name}, {format_bytes(free)} free of {format_bytes(total)}, peaks are exact"
        return Capability(subject, "good", detail)
    if not Path("/dev/nvidiactl").exists():
        return Capability(subject, "poor", "none: cells load to the CPU only")
    if torch.version.cuda is None:
        why = f"torch {torch.__version__} is a build without CUDA: install one from pytorch.org"
        return Capability(subject, "bad", f"there is one, but {why}")
    return Capability(subject, "bad", "there is one, but torch cannot use it: see nvidia-smi")
