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
from typing import Any, Final, Literal

from weighin import slow_disk
from weighin.cell import Cell, Job
from weighin.checkpoint import cache, staging
from weighin.errors import HarnessError
from weighin.isolation import cgroup, select, visible
from weighin.isolation.base import Isolation
from weighin.probes import environment, gpu_memory, page_cache
from weighin.probes.cgroup import Cgroup, memory_hierarchy, pressure_hierarchy
from weighin.result import Outcome
from weighin.run.loads import LoadSpec, remove_leftovers
from weighin.run.measure import PREFIX, measure
from weighin.show.table import Column, Entry, Table
from weighin.slow_disk import Pace
from weighin.suite.registry import model, read_strategy
from weighin.units import MIB, format_bytes

_PROBE: Final = Path(__file__).with_name("oom_probe.py")
_PROBE_LIMIT_BYTES: Final = 384 * MIB
_GPU_FILES: Final = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA, of WSL and of AMD
_PACE: Final = Pace(100_000_000, 5_000_000)
_KINDS: Final = {"yes": "ok", "partly": "changed", "no": "failed"}  # of an entry: its colour

Verdict = Literal["yes", "partly", "no"]


@dataclass(frozen=True, slots=True)
class Capability:
    """A row of the table that ``weighin doctor`` prints: what works, and its detail."""

    subject: str
    verdict: Verdict
    detail: str


@dataclass(frozen=True, slots=True)
class Examination:
    """The rows of the table."""

    capabilities: tuple[Capability, ...]

    @property
    def holds_a_limit(self) -> bool:
        limits = (one for one in self.capabilities if "enforces a limit" in one.subject)
        return any(one.verdict == "yes" for one in limits)

    def as_json(self) -> dict[str, Any]:
        rows = [asdict(one) for one in self.capabilities]
        return {"holds_a_limit": self.holds_a_limit, "capabilities": rows}


def examine(say: Callable[[str], None]) -> Examination:
    """Test this machine; remove what killed runs left behind. ``say`` gets a line before each slow
    step.
    """
    limits = [row for name in select.NAMES for row in _isolation(select.named(name), say)]
    folders = staging.remove_orphans(Path(tempfile.gettempdir()), PREFIX)  # of killed runs
    left = [f"folder {folder}" for folder in folders] + remove_leftovers()
    say(f"reading directly from a disk of {_PACE}")
    disk = _tried("slow disks (--disk, disk_latency)", _slow_disk)
    return Examination((*map(_removed, left), *limits, disk, *_figures(), *_machine()))


def table(examination: Examination) -> Table:
    columns = [Column(head, is_name=True) for head in ("subject", "works", "detail")]
    rows: list[list[Entry | str]] = [
        [one.subject, Entry(one.verdict, kind=_KINDS[one.verdict]), one.detail]
        for one in examination.capabilities
    ]
    return Table("", columns, rows)


def _tried(subject: str, attempt: Callable[[], tuple[Verdict, str]]) -> Capability:
    """Return the row of what an attempt found; after an error, "partly", with the reason."""
    try:
        return Capability(subject, *attempt())
    except HarnessError as error:
        return Capability(subject, "partly", f"{error.message}. {error.repair}")
    except OSError as error:
        return Capability(subject, "partly", str(error))


def _row(subject: str, works: bool, yes: str, verdict: Verdict, no: str) -> Capability:
    """Return the row of a capability that works (``yes``), or else ``verdict``: ``no``."""
    return Capability(subject, "yes", yes) if works else Capability(subject, verdict, no)


def _removed(line: str) -> Capability:
    return Capability("left behind by a killed run", "yes", f"removed: {line}")


def _isolation(isolation: Isolation, say: Callable[[str], None]) -> Iterator[Capability]:
    subject = f"isolation {isolation.name}"
    try:
        isolation.check()
        yield from map(_removed, isolation.remove_stale())
        if not isolation.limits:
            yield Capability(subject, "yes", "measures; enforces no limit")
            return
        limit_size = format_bytes(_PROBE_LIMIT_BYTES)
        say(f"running a probe into a limit of {limit_size} with {isolation.name}")
        yield Capability(f"{subject} enforces a limit", *_prove(isolation))
        if isolation.name == "docker":
            seen = ", ".join(sorted(visible.binds(visible.of_machine())))
            detail = f"read-only: {seen}; beside them, the files of a load or command alone"
            yield Capability("files that a container sees", "yes", detail)
    except HarnessError as error:
        yield Capability(subject, "no", f"{error.message}. {error.repair}")


def _prove(isolation: Isolation) -> tuple[Verdict, str]:
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
        return "no", why.rstrip()
    peak = result.peaks.cgroup_bytes
    charged = f"cgroup peak {format_bytes(peak)}" if peak else "cgroup peak not measured"
    killed = f"a probe that allocated more than {size} was killed, {charged}"
    return "yes", "; ".join([killed, *result.warnings])


def _slow_disk() -> tuple[Verdict, str]:
    """Slow a disk down, and compare the time of direct reads (O_DIRECT) of a page with its latency."""
    slow_disk.check(in_container=False)
    staging.folder().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=staging.folder()) as folder:
        (Path(folder) / "file").write_bytes(bytes(MIB))
        with closing(slow_disk.Mount(Path(folder), _PACE, staging.slow_disks())) as disk:
            latency_s = _page_read_s(disk.folder / "file")
    found = f"asked for {_PACE}: a direct read of a page took {latency_s * 1e3:.2f} ms through FUSE"
    try:
        slow_disk.check(in_container=True)
    except HarnessError as error:
        return "partly", f"{found}; not for a load in docker: {error.message}: {error.repair}"
    return "yes" if isclose(latency_s, 0.005, rel_tol=0.1) else "partly", found


def _page_read_s(file: Path) -> float:
    descriptor, page, times_s = os.open(file, os.O_RDONLY | os.O_DIRECT), mmap(-1, PAGESIZE), []
    for number in range(30):
        start_s = monotonic()
        os.preadv(descriptor, [page], number * PAGESIZE)
        times_s.append(monotonic() - start_s)
    os.close(descriptor)
    return median(times_s)


def _figures() -> Iterator[Capability]:
    exact = "exact: VmHWM, reset through clear_refs"
    why = "/proc/self/clear_refs cannot be written, as in a sandbox that is not Linux itself"
    resets = os.access("/proc/self/clear_refs", os.W_OK)
    yield _row("peak RSS of each phase", resets, exact, "no", why)
    why = "sampled, and exact at the end of each phase, because the kernel keeps no peak of them"
    yield Capability("anonymous, file, shared memory", "yes", why)
    tree, hierarchy = pressure_hierarchy(), memory_hierarchy()
    try:
        with cgroup.temporary_group() as group:
            yield from of_group(Cgroup(group))
    except HarnessError as error:
        why = f"{error.message}: not measured with --isolation cgroup; docker has its own cgroups"
        verdict: Verdict = "partly" if hierarchy else "no"
        yield Capability("figures of the cell's cgroup", verdict, why)
    is_on = Path("/proc/pressure/memory").exists()
    exact = "exact: memory.pressure of the cell's cgroup"
    if hierarchy and hierarchy[0] == 1:
        exact = f"exact with --isolation cgroup, through {tree}; not with docker on cgroup v1"
    why = "missing: disabled in this kernel; boot with psi=1"
    if is_on:
        why = "missing: it needs a cgroup v2 tree, and none is mounted"
    yield _row("memory pressure (PSI)", is_on and tree is not None, exact, "partly", why)
    (folder := staging.folder()).mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(bytes(MIB))
        file.flush()
        left = page_cache.drop([Path(file.name)])
    why = f"{folder} keeps its pages: is it a tmpfs?"
    if left is None:
        why = f"{folder}: this kernel does not tell which pages are cached"
    yes = f"files in {folder} are evicted, and checked"
    yield _row("cold page cache", left == 0, yes, "no", why)


def of_group(group: Cgroup) -> Iterator[Capability]:
    name, kills = group.file("peak").name, group.file("oom").name
    with closing(group):
        now = group.counters()
        exact = f"exact for each phase: {name}, reset at the end of each"
        verdict: Verdict = "partly"
        why = f"exact for the whole cell, not for a phase: resetting {name} needs Linux 6.12"
        if now.peak_bytes is None:
            verdict, why = "no", f"missing: {name} needs Linux 5.19; only samples are available"
        resets = now.peak_bytes is not None and group.reset_peak()
        yield _row("cgroup peak", resets, exact, verdict, why)
    exact = f"exact: oom_kill in {kills}"
    why = f"missing: oom_kill in {kills} needs Linux 5.2 (v2) or 4.13 (v1)"
    yield _row("kills for lack of memory", now.oom_kills is not None, exact, "no", why)
    exact = "exact: workingset_refault_file in memory.stat"
    why = "missing: this counter needs Linux 5.9; only major page faults are available"
    yield _row("refaults", now.refaults is not None, exact, "partly", why)


def _machine() -> Iterator[Capability]:
    machine, hierarchy, tree = environment.machine(), memory_hierarchy(), pressure_hierarchy()
    if hierarchy is None:
        why = "no memory controller: boot with cgroup_enable=memory"
        yield Capability("cgroup version", "no", why)
    else:
        beside = f"beside a v2 tree at {tree}" if tree else "without a v2 tree"
        v1, v2 = f"v1 at {hierarchy[1]}, {beside}", f"v2 at {hierarchy[1]}"
        yield _row("cgroup version", hierarchy[0] == 2, v2, "partly", v1)
    total, free = cgroup.ram_bytes()
    limited = " (the limit of a cgroup around weighin)" if total < machine["ram_bytes"] else ""
    yield Capability("RAM", "yes", f"{format_bytes(free)} free of {format_bytes(total)}{limited}")
    disk = format_bytes(shutil.disk_usage(staging.folder()).free)
    yield Capability("disk for checkpoints", "yes", f"{disk} free at {staging.folder()}")

    def unswapped() -> tuple[Verdict, str]:
        if not (swap_bytes := machine["swap_bytes"]):
            return "yes", "none"
        with cgroup.temporary_group() as group:
            cgroup.limit(group, _PROBE_LIMIT_BYTES)
        return "yes", f"{format_bytes(swap_bytes)}, turned off for each limited cell"

    yield _tried("swap", unswapped)
    detail = f"{machine['thp']} (affects memory figures; part of each record)"
    yield Capability("transparent huge pages", "yes", detail)
    if not any(Path(file).exists() for file in _GPU_FILES):
        yield Capability("CUDA GPU", "partly", "none: cells load to the CPU only")
        return
    seen = gpu_memory.look()
    why = f"there is one, but {seen.why}: {seen.repair}"
    first = [f"{gpu.name}, {format_bytes(gpu.total_bytes)}" for gpu in seen.gpus[:1]]
    yield _row("CUDA GPU", bool(first), f"{''.join(first)}, peaks are exact", "no", why)
