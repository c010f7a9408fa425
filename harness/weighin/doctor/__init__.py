"""``weighin doctor``: test which limits this machine can enforce and which figures it can measure.

weighin tests each capability of the machine, and infers none from version numbers: what a cgroup can
measure is tested in a temporary cgroup.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from math import isclose
from mmap import PAGESIZE, mmap
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, Literal

from weighin import slow_disk
from weighin.cell import Cell, Job
from weighin.checkpoint import cache, staging
from weighin.errors import HarnessError
from weighin.isolation import cgroup, select, visible
from weighin.isolation.base import Isolation
from weighin.isolation.cgroup import limit, temporary_group
from weighin.probes import environment, gpu_memory, page_cache
from weighin.probes.cgroup import Cgroup, memory_hierarchy, pressure_hierarchy
from weighin.result import Outcome
from weighin.run.loads import LoadSpec
from weighin.run.measure import measure, remove_leftovers
from weighin.show.table import Column, Entry, Table
from weighin.slow_disk import Pace
from weighin.suite.registry import model, read_strategy
from weighin.units import MIB, format_bytes

_PROBE = Path(__file__).with_name("oom_probe.py")
_PROBE_LIMIT_BYTES = 384 * MIB
_GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA, of WSL and of AMD
_PACE = Pace(100_000_000, 5_000_000)
_WORDS = {"good": "yes", "poor": "partly", "bad": "no"}
_KINDS = {"good": "ok", "poor": "changed", "bad": "failed"}

Verdict = Literal["good", "poor", "bad"]
Found = tuple[Verdict, str]
"""The verdict on a capability, and its detail."""


@dataclass(frozen=True, slots=True)
class Capability:
    """A row of the table that ``weighin doctor`` prints; "good" means yes, "poor" partly and "bad" no."""

    subject: str
    verdict: Verdict
    detail: str


@dataclass(frozen=True, slots=True)
class Examination:
    """The rows of the table."""

    capabilities: tuple[Capability, ...]

    @property
    def holds_a_limit(self) -> bool:
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
    """Test this machine; remove what killed runs left behind. ``say`` gets a line before each slow
    step.
    """
    isolations = [select.named(name) for name in select.NAMES]
    limits = [finding for one in isolations for finding in _isolation(one, say)]
    folders = map(_removed, remove_leftovers())
    mounts = map(_removed, slow_disk.remove_stale(staging.slow_disks()))
    say(f"reading directly from a disk of {_PACE}")
    disk = tried("slow disks (--disk, disk_latency)", _slow_disk, "poor")
    return Examination((*folders, *mounts, *limits, disk, *_figures(), *_machine()))


def table(examination: Examination) -> Table:
    columns = [Column(head, is_name=True) for head in ("subject", "works", "detail")]
    rows: list[list[Entry | str]] = [
        [one.subject, Entry(_WORDS[one.verdict], kind=_KINDS[one.verdict]), one.detail]
        for one in examination.capabilities
    ]
    return Table("", columns, rows)


def tried(subject: str, attempt: Callable[[], Found], otherwise: Verdict = "bad") -> Capability:
    """Return the row of what an attempt found, or else (an error) ``otherwise``, with the reason."""
    try:
        return Capability(subject, *attempt())
    except HarnessError as error:
        return Capability(subject, otherwise, f"{error.message}. {error.repair}")
    except OSError as error:
        return Capability(subject, otherwise, str(error))


def row(subject: str, works: bool, yes: str, verdict: Verdict, no: str) -> Capability:
    """Return the row of a capability that works (good: ``yes``), or else ``verdict``: ``no``."""
    return Capability(subject, "good", yes) if works else Capability(subject, verdict, no)


def _removed(line: str) -> Capability:
    return Capability("left behind by a killed run", "good", f"removed: {line}")


def _isolation(isolation: Isolation, say: Callable[[str], None]) -> Iterator[Capability]:
    subject = f"isolation {isolation.name}"
    try:
        isolation.check()
        yield from map(_removed, isolation.remove_stale())
        if not isolation.limits:
            yield Capability(subject, "good", "measures; enforces no limit")
            return
        limit_size = format_bytes(_PROBE_LIMIT_BYTES)
        say(f"running a probe into a limit of {limit_size} with {isolation.name}")
        yield Capability(f"{subject} enforces a limit", *_prove(isolation, say))
        if isolation.name == "docker":
            seen = ", ".join(sorted(visible.binds(visible.of_machine())))
            detail = f"read-only: {seen}; beside them, the files of a load or command alone"
            yield Capability("files that a container sees", "good", detail)
    except HarnessError as error:
        yield Capability(subject, "bad", f"{error.message}. {error.repair}")


def _prove(isolation: Isolation, say: Callable[[str], None]) -> Found:
    isolation.prepare(say)
    spec, probe = model("gpt2-tiny"), read_strategy(_PROBE)
    checkpoint = cache.ensure(spec, "pt")
    cell = Cell(spec, probe.name, isolation.name, ram_limit_bytes=_PROBE_LIMIT_BYTES)
    job = Job(cell, str(checkpoint.path), str(checkpoint.manifest_path), str(probe.path))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "samples").mkdir()
        measured = measure(isolation, LoadSpec(job, [checkpoint.path]))
        measured.finish(Path(folder))
    result, size = measured.result, format_bytes(_PROBE_LIMIT_BYTES)
    if result.outcome is not Outcome.OOM_KILLED or result.last_phase != "overrun":
        why = f"a probe above its limit was not killed: {result.outcome} {result.message}"
        return "bad", why.rstrip()
    peak = result.peaks.cgroup_bytes
    charged = f"cgroup peak {format_bytes(peak)}" if peak else "cgroup peak not measured"
    killed = f"a probe that allocated more than {size} was killed, {charged}"
    return "good", "; ".join([killed, *result.warnings])


def _slow_disk() -> Found:
    """Slow a disk down, and compare the time of direct reads (O_DIRECT) of a page with its latency."""
    slow_disk.check(in_container=False)
    staging.folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=staging.folder()) as folder:
        (Path(folder) / "file").write_bytes(bytes(MIB))
        with closing(slow_disk.Mount(Path(folder), _PACE, staging.slow_disks())) as disk:
            latency_s = _page_read_s(disk.folder / "file")
    verdict: Verdict = "good" if isclose(latency_s, 0.005, rel_tol=0.1) else "poor"
    found = f"asked for {_PACE}: a direct read of a page took {latency_s * 1e3:.2f} ms through FUSE"
    try:
        slow_disk.check(in_container=True)
    except HarnessError as error:
        return "poor", f"{found}; not for a load in docker: {error.message}: {error.repair}"
    return verdict, found


def _page_read_s(file: Path) -> float:
    descriptor, page, times_s = os.open(file, os.O_RDONLY | os.O_DIRECT), mmap(-1, PAGESIZE), []
    for number in range(30):
        start_s = monotonic()
        os.preadv(descriptor, [page], number * PAGESIZE)
        times_s.append(monotonic() - start_s)
    os.close(descriptor)
    return median(times_s)


def _figures() -> Iterator[Capability]:
    yield row(
        "peak RSS of each phase",
        os.access("/proc/self/clear_refs", os.W_OK),
        "exact: VmHWM, reset through clear_refs",
        "bad",
        "/proc/self/clear_refs cannot be written, as in a sandbox that is not Linux itself",
    )
    sampled = (
        "sampled, and exact at the end of each phase, because the kernel keeps no peak of them"
    )
    yield Capability("anonymous, file, shared memory", "good", sampled)
    try:
        with temporary_group() as group:
            yield from of_group(Cgroup(group))
    except HarnessError as error:
        why = f"{error.message}: not measured with --isolation cgroup; docker has its own cgroups"
        verdict: Verdict = "bad" if memory_hierarchy() is None else "poor"
        yield Capability("figures of the cell's cgroup", verdict, why)
    yield pressure()
    (folder := staging.folder()).mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(bytes(MIB))
        file.flush()
        left = page_cache.drop([Path(file.name)])
    why = f"{folder} keeps its pages: is it a tmpfs?"
    if left is None:
        why = f"{folder}: this kernel does not tell which pages are cached"
    yes = f"files in {folder} are evicted, and checked"
    yield row("cold page cache", left == 0, yes, "bad", why)


def of_group(cgroup: Cgroup) -> Iterator[Capability]:
    name, kills = cgroup.file("peak").name, cgroup.file("oom").name
    with closing(cgroup):
        now = cgroup.counters()
        exact = f"exact for each phase: {name}, reset at the end of each"
        verdict: Verdict = "poor"
        why = f"exact for the whole cell, not for a phase: resetting {name} needs Linux 6.12"
        if now.peak_bytes is None:
            verdict, why = "bad", f"missing: {name} needs Linux 5.19; only samples are available"
        yield row(
            "cgroup peak", now.peak_bytes is not None and cgroup.reset_peak(), exact, verdict, why
        )
    exact = f"exact: oom_kill in {kills}"
    why = f"missing: oom_kill in {kills} needs Linux 5.2 (v2) or 4.13 (v1)"
    yield row("kills for lack of memory", now.oom_kills is not None, exact, "bad", why)
    exact = "exact: workingset_refault_file in memory.stat"
    why = "missing: this counter needs Linux 5.9; only major page faults are available"
    yield row("refaults", now.refaults is not None, exact, "poor", why)
    soft, can_be_soft = "memory.high, with --isolation cgroup", cgroup.file("soft").exists()
    yield row("soft limit (ram_high)", can_be_soft, soft, "poor", "cgroup v1 has no memory.high")


def pressure() -> Capability:
    tree, hierarchy = pressure_hierarchy(), memory_hierarchy()
    is_on = Path("/proc/pressure/memory").exists()
    yes = "exact: memory.pressure of the cell's cgroup"
    if hierarchy and hierarchy[0] == 1:
        yes = f"exact with --isolation cgroup, through {tree}; not with docker on cgroup v1"
    no = "missing: disabled in this kernel; boot with psi=1"
    if is_on:
        no = "missing: it needs a cgroup v2 tree, and none is mounted"
    return row("memory pressure (PSI)", is_on and tree is not None, yes, "poor", no)


def _machine() -> Iterator[Capability]:
    machine, hierarchy, tree = environment.machine(), memory_hierarchy(), pressure_hierarchy()
    if hierarchy is None:
        why = "no memory controller: boot with cgroup_enable=memory"
        yield Capability("cgroup version", "bad", why)
    else:
        beside = f"beside a v2 tree at {tree}" if tree else "without a v2 tree"
        v1, v2 = f"v1 at {hierarchy[1]}, {beside}", f"v2 at {hierarchy[1]}"
        yield row("cgroup version", hierarchy[0] == 2, v2, "poor", v1)
    total, free = cgroup.ram_bytes()
    limited = " (the limit of a cgroup around weighin)" if total < machine["ram_bytes"] else ""
    yield Capability("RAM", "good", f"{format_bytes(free)} free of {format_bytes(total)}{limited}")
    disk = format_bytes(shutil.disk_usage(staging.folder()).free)
    yield Capability("disk for checkpoints", "good", f"{disk} free at {staging.folder()}")

    def unswapped() -> Found:
        if not (swap_bytes := machine["swap_bytes"]):
            return "good", "none"
        with temporary_group() as group:
            limit(group, _PROBE_LIMIT_BYTES)
        return "good", f"{format_bytes(swap_bytes)}, turned off for each limited cell"

    yield tried("swap", unswapped, "poor")
    detail = f"{machine['thp']} (affects memory figures; part of each record)"
    yield Capability("transparent huge pages", "good", detail)
    yield gpu()


def gpu() -> Capability:
    if not any(Path(file).exists() for file in _GPU_FILES):
        return Capability("CUDA GPU", "poor", "none: cells load to the CPU only")
    seen = gpu_memory.look()
    if not seen.gpus:
        return Capability("CUDA GPU", "bad", f"there is one, but {seen.why}: {seen.repair}")
    first = seen.gpus[0]
    detail = f"{first.name}, {format_bytes(first.total_bytes)}, peaks are exact"
    return Capability("CUDA GPU", "good", detail)
