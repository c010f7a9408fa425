"""``weighin doctor``: test which limits this machine can enforce and which figures it can measure.

weighin tests each capability of the machine, and infers none from version numbers: what a cgroup can
measure is tested in a temporary cgroup.
"""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from math import isclose
from mmap import PAGESIZE, mmap
from pathlib import Path
from statistics import median
from time import monotonic
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from weighin.cell import Cell, Job
from weighin.checkpoint import cache, entries
from weighin.disk import mount
from weighin.disk.passthrough import Pace
from weighin.errors import HarnessError
from weighin.isolation import delegation, select, visible
from weighin.isolation.base import Isolation
from weighin.isolation.cgroup import limit, temporary_group
from weighin.probes import environment, gpu_check, page_cache
from weighin.probes.cgroup import MemoryCgroup, PeakMark, memory_hierarchy, pressure_hierarchy
from weighin.result import Outcome
from weighin.run.loads import LoadSpec
from weighin.run.measure import measure, remove_leftovers
from weighin.suite.registry import model, read_strategy
from weighin.units import MIB, format_bytes

_PROBE = Path(__file__).with_name("oom_probe.py")
_PROBE_LIMIT_BYTES = 384 * MIB
_INNER_BYTES = 64 * MIB
_GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/kfd")  # of NVIDIA, of WSL and of AMD
_PACE = Pace(100_000_000, 5_000_000)
_WORDS = {"good": "yes", "poor": "partly", "bad": "no"}
_STYLES = {"good": "green", "poor": "yellow", "bad": "red"}

Verdict = Literal["good", "poor", "bad"]


@dataclass(frozen=True, slots=True)
class Capability:
    """A row of the table that ``weighin doctor`` prints; "good" means yes, "poor" partly and "bad" no."""

    subject: str
    verdict: Verdict
    detail: str


@dataclass(frozen=True, slots=True)
class Examination:
    """The rows of the table; ``about`` says which node of a cluster was tested."""

    capabilities: tuple[Capability, ...]
    about: Mapping[str, Any] = field(default_factory=dict)

    @property
    def holds_a_limit(self) -> bool:
        """Whether at least one isolation enforces a RAM limit on this machine."""
        return any(
            "enforces a limit" in one.subject and one.verdict == "good" for one in self.capabilities
        )

    def as_json(self) -> dict[str, Any]:
        return {
            **self.about,
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
    folders = map(_removed, remove_leftovers())
    mounts = map(_removed, mount.remove_stale(entries.slow_disks()))
    return Examination((*folders, *mounts, *limits, _slow_disk(say), *figures(), *_machine()))


def table(examination: Examination) -> Table:
    title = f"node {examination.about['name']}" if examination.about else None
    shown = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for head in ("subject", "works", "detail"):
        shown.add_column(head)
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
            if isolation.name == "docker":
                seen = ", ".join(sorted(visible.binds(visible.of_machine())))
                detail = f"read-only: {seen}; beside them, the files of a load or command alone"
                yield Capability("files that a container sees", "good", detail)
        except HarnessError as error:
            yield Capability(subject, "bad", f"{error.message}. {error.repair}")


def _slow_disk(say: Callable[[str], None]) -> Capability:
    """Slow a disk down, and compare the time of direct reads (O_DIRECT) of a page with its latency."""
    subject = "slow disks (--disk, --disk-latency)"
    say(f"reading directly from a disk of {_PACE}")
    try:
        mount.check(in_container=False)
        cache.folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.folder()) as folder:
            (Path(folder) / "file").write_bytes(bytes(MIB))
            with closing(mount.Mount(Path(folder), _PACE, entries.slow_disks())) as disk:
                latency_s = _page_read_s(disk.folder / "file")
    except (HarnessError, OSError) as error:
        why = f"{error.message}. {error.repair}" if isinstance(error, HarnessError) else str(error)
        return Capability(subject, "poor", why)
    holds = isclose(latency_s, 0.005, rel_tol=0.1)
    detail = (
        f"asked for {_PACE}: a direct read of a page took {latency_s * 1e3:.2f} ms through FUSE"
    )
    if in_container := mount.obstacle(in_container=True):
        detail += f"; not for a load in docker: {in_container[0]}: {in_container[1]}"
        holds = False
    return Capability(subject, "good" if holds else "poor", detail)


def _page_read_s(file: Path) -> float:
    """Return the median time of a direct read of one page, in s."""
    descriptor, page, times_s = os.open(file, os.O_RDONLY | os.O_DIRECT), mmap(-1, PAGESIZE), []
    for number in range(30):
        start_s = monotonic()
        os.preadv(descriptor, [page], number * PAGESIZE)
        times_s.append(monotonic() - start_s)
    os.close(descriptor)
    return median(times_s)


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
        measured = measure(isolation, LoadSpec.of(job, [checkpoint.path]))
        measured.finish(Path(folder))
        result = measured.result
    peak = result.peaks.cgroup_bytes
    subject = f"isolation {isolation.name} enforces a limit"
    if result.outcome is Outcome.OOM_KILLED and result.last_phase == "overrun":
        charged = f"cgroup peak {format_bytes(peak)}" if peak else "cgroup peak not measured"
        killed = f"a probe that allocated more than {format_bytes(_PROBE_LIMIT_BYTES)} was killed"
        return Capability(subject, "good", "; ".join([f"{killed}, {charged}", *result.warnings]))
    survived = f"a probe above its limit was not killed: {result.outcome} {result.message}"
    return Capability(subject, "bad", survived.rstrip())


def figures() -> Iterator[Capability]:
    """Yield a row for each kind of memory figure in records, and a row for the cold page cache."""
    yield row(
        "peak RSS of each phase",
        os.access("/proc/self/clear_refs", os.W_OK),
        "exact: VmHWM, reset through clear_refs",
        "bad",
        "/proc/self/clear_refs cannot be written, as in a sandbox that is not Linux itself",
    )
    yield Capability(
        "anonymous, file, shared memory",
        "good",
        "sampled, and exact at the end of each phase, because the kernel keeps no peak of them",
    )
    try:
        with temporary_group() as group:
            yield from of_group(MemoryCgroup(group))
    except HarnessError as error:
        why = f"{error.message}: not measured with --isolation cgroup; docker has its own cgroups"
        verdict: Verdict = "bad" if memory_hierarchy() is None else "poor"
        yield Capability("figures of the cell's cgroup", verdict, why)
    yield pressure()
    folder = cache.folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(bytes(MIB))
        file.flush()
        left = page_cache.drop([Path(file.name)])
    why = f"{folder} keeps its pages: is it a tmpfs?"
    if left is None:
        why = f"{folder}: this kernel does not tell which pages are cached"
    yes = f"files in {folder} are evicted, and checked"
    yield row("cold page cache", left == 0, yes, "bad", why)


def of_group(cgroup: MemoryCgroup) -> Iterator[Capability]:
    """Yield a row each for the peak, OOM kills, refaults and the soft limit of a cgroup."""
    name, kills = cgroup.peak_path.name, cgroup.oom_path.name
    with closing(PeakMark(cgroup)) as mark:
        if mark.read() is None:
            why = f"missing: {name} needs Linux 5.19; only samples are available"
            yield Capability("cgroup peak", "bad", why)
        else:
            exact = f"exact for each phase: {name}, reset at the end of each"
            why = f"exact for the whole cell, not for a phase: resetting {name} needs Linux 6.12"
            yield row("cgroup peak", mark.reset(), exact, "poor", why)
    yield row(
        "kills for lack of memory",
        cgroup.read_oom_kills() is not None,
        f"exact: oom_kill in {kills}",
        "bad",
        f"missing: oom_kill in {kills} needs Linux 5.2 (v2) or 4.13 (v1)",
    )
    yield row(
        "refaults",
        cgroup.read_refaults() is not None,
        "exact: workingset_refault_file in memory.stat",
        "poor",
        "missing: this counter needs Linux 5.9; only major page faults are available",
    )
    yield row(
        "soft limit (--ram-high)",
        cgroup.soft_limit_path is not None,
        "memory.high, with --isolation cgroup",
        "poor",
        "cgroup v1 has no memory.high",
    )


def pressure() -> Capability:
    """Test whether memory pressure can be measured: PSI needs a cgroup v2 tree."""
    tree, hierarchy = pressure_hierarchy(), memory_hierarchy()
    verdict: Verdict = "poor"
    if not Path("/proc/pressure/memory").exists():
        detail = "missing: disabled in this kernel; boot with psi=1"
    elif tree is None:
        detail = "missing: it needs a cgroup v2 tree, and none is mounted"
    elif hierarchy and hierarchy[0] == 1:
        verdict = "good"
        detail = f"exact with --isolation cgroup, through {tree}; not with docker on cgroup v1"
    else:
        verdict, detail = "good", "exact: memory.pressure of the cell's cgroup"
    return Capability("memory pressure (PSI)", verdict, detail)


def nested() -> Capability:
    """Test whether a cgroup with a limit can have child cgroups with smaller limits."""
    subject = "nested memory limits"
    try:
        with temporary_group() as group:
            limit(group, 2 * _INNER_BYTES)
            if (outer := MemoryCgroup(group)).version == 2:
                (group / "cgroup.subtree_control").write_text("+memory")
            (group / "inner").mkdir()
            inner = MemoryCgroup(group / "inner")
            try:
                limit(inner.path, _INNER_BYTES)
                is_limited = int(inner.limit_path.read_text()) == _INNER_BYTES
            finally:
                inner.path.rmdir()
    except (HarnessError, OSError) as error:
        reason = error.message if isinstance(error, HarnessError) else str(error)
        return Capability(subject, "bad", f"cells cannot have limits of their own here: {reason}")
    name = outer.limit_path.name
    yes, no = f"{name} of a group inside a limited group", f"{name} of an inner group has no effect"
    return row(subject, is_limited, yes, "bad", no)


def _machine() -> Iterator[Capability]:
    machine, hierarchy = environment.machine(), memory_hierarchy()
    if hierarchy is None:
        why = "no memory controller: boot with cgroup_enable=memory"
        yield Capability("cgroup version", "bad", why)
    elif hierarchy[0] == 2:
        yield Capability("cgroup version", "good", f"v2 at {hierarchy[1]}")
    else:
        tree = pressure_hierarchy()
        beside = f"beside a v2 tree at {tree}" if tree else "without a v2 tree"
        yield Capability("cgroup version", "poor", f"v1 at {hierarchy[1]}, {beside}")
    total, free = delegation.ram_bytes()
    limited = " (the limit of a cgroup around weighin)" if total < machine["ram_bytes"] else ""
    yield Capability("RAM", "good", f"{format_bytes(free)} free of {format_bytes(total)}{limited}")
    disk = shutil.disk_usage(cache.folder()).free
    detail = f"{format_bytes(disk)} free at {cache.folder()}"
    yield Capability("disk for checkpoints", "good", detail)
    yield _swap(machine["swap_bytes"])
    detail = f"{machine['thp']} (affects memory figures; part of each record)"
    yield Capability("transparent huge pages", "good", detail)
    yield gpu()


def _swap(swap_bytes: int) -> Capability:
    size = format_bytes(swap_bytes)
    if not swap_bytes:
        return Capability("swap", "good", "none")
    try:
        with temporary_group() as group:
            limit(group, _PROBE_LIMIT_BYTES)
    except HarnessError as error:
        return Capability("swap", "poor", f"{size}; {error.message}")
    return Capability("swap", "good", f"{size}, turned off for each limited cell")


def gpu() -> Capability:
    """Test, in a subprocess, whether torch can use a GPU."""
    if not any(Path(file).exists() for file in _GPU_FILES):
        return Capability("CUDA GPU", "poor", "none: cells load to the CPU only")
    seen = gpu_check.look()
    if not seen.gpus:
        return Capability("CUDA GPU", "bad", f"there is one, but {seen.why}: {seen.repair}")
    first = seen.gpus[0]
    detail = f"{first.name}, {format_bytes(first.total_bytes)}, peaks are exact"
    return Capability("CUDA GPU", "good", detail)


def row(subject: str, works: bool, yes: str, verdict: Verdict, no: str) -> Capability:
    """Return the row of a capability that works (good: ``yes``), or else ``verdict``: ``no``."""
    return Capability(subject, "good", yes) if works else Capability(subject, verdict, no)
