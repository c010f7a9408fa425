"""``weighin doctor``: try which limits this machine enforces and what it measures, whatever its versions."""

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Literal

from weighin import slow_disk
from weighin.cell import Cell, Job
from weighin.checkpoint import cache, temporary_folders
from weighin.errors import HarnessError
from weighin.isolation import cgroup, select, visible
from weighin.isolation.base import Isolation
from weighin.probes import environment, gpu_memory, page_cache
from weighin.probes.cgroup import Cgroup, memory_hierarchy, pressure_hierarchy
from weighin.result import Outcome
from weighin.run.loads import LoadSpec, remove_leftovers
from weighin.run.measure import PREFIX, measure
from weighin.show.table import Column, Entry, Table
from weighin.suite.registry import model, read_strategy
from weighin.units import MIB, format_bytes

_PROBE_LIMIT_BYTES: Final = 384 * MIB
_KINDS: Final = {"yes": "ok", "partly": "changed", "no": "failed"}  # of an entry: its colour

Verdict = Literal["yes", "partly", "no"]


@dataclass(frozen=True, slots=True)
class Capability:
    subject: str
    verdict: Verdict
    detail: str


def examine() -> Sequence[Capability]:
    """Test this machine, and clean up after runs that were killed."""
    limits = [row for name in select.NAMES for row in _isolation(select.named(name))]
    # Of runs that were killed.
    folders = temporary_folders.remove_orphans(Path(tempfile.gettempdir()), PREFIX)
    left = [f"folder {folder}" for folder in folders] + remove_leftovers()
    return [*map(_removed, left), *limits, _slow_disk(), *_figures(), *_machine()]


def as_json(found: Sequence[Capability]) -> dict[str, Any]:
    limits = (one for one in found if "enforces a limit" in one.subject)
    holds = any(one.verdict == "yes" for one in limits)
    return {"holds_a_limit": holds, "capabilities": [asdict(one) for one in found]}


def table(found: Sequence[Capability]) -> Table:
    columns = [Column(head, is_name=True) for head in ("subject", "works", "detail")]
    rows: list[list[Entry | str]] = [
        [one.subject, Entry(one.verdict, kind=_KINDS[one.verdict]), one.detail] for one in found
    ]
    return Table("", columns, rows)


def _row(
    subject: str, works: bool, yes: str, no: str = "missing in this kernel", verdict: Verdict = "no"
) -> Capability:
    return Capability(subject, "yes", yes) if works else Capability(subject, verdict, no)


def _removed(line: str) -> Capability:
    return Capability("left behind by a killed run", "yes", f"removed: {line}")


def _isolation(isolation: Isolation) -> Iterator[Capability]:
    subject = f"isolation {isolation.name}"
    try:
        isolation.check()
        yield from map(_removed, isolation.remove_stale())
        if not isolation.limits:
            yield Capability(subject, "yes", "measures; enforces no limit")
            return
        yield Capability(f"{subject} enforces a limit", *_prove(isolation))
        if isolation.name == "docker":
            seen = ", ".join(sorted(visible.binds(visible.of_machine())))
            detail = f"read-only: {seen}; beside them, the files of a load or command alone"
            yield Capability("files that a container sees", "yes", detail)
    except HarnessError as error:
        yield Capability(subject, "no", f"{error.message}. {error.repair}")


def _prove(isolation: Isolation) -> tuple[Verdict, str]:
    spec, probe = model("gpt2-tiny"), read_strategy(Path(__file__).with_name("oom_probe.py"))
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


def _slow_disk() -> Capability:
    subject = "slow disks (--disk, disk_latency)"
    try:
        slow_disk.check(in_container=False)
        temporary_folders.folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=temporary_folders.folder()) as folder:
            slow_disk.Mount(Path(folder), slow_disk.Pace(), temporary_folders.slow_disks()).close()
        slow_disk.check(in_container=True)
    except HarnessError as error:
        return Capability(subject, "partly", f"{error.message}. {error.repair}")
    return Capability(subject, "yes", "FUSE has mounted a folder a second time")


def _figures() -> Iterator[Capability]:
    exact, why = "exact: VmHWM, reset through clear_refs", "/proc/self/clear_refs is read-only"
    yield _row("peak RSS of each phase", os.access("/proc/self/clear_refs", os.W_OK), exact, why)
    # The row of the isolation says why there is no group.
    with suppress(HarnessError), cgroup.temporary_group() as group:
        yield from of_group(Cgroup(group))
    stalls = pressure_hierarchy() is not None and Path("/proc/pressure/memory").exists()
    exact = "exact: memory.pressure of the cell's cgroup; not with docker on cgroup v1"
    why = "missing: it needs a cgroup v2 tree, and a kernel with PSI (boot with psi=1)"
    yield _row("memory pressure (PSI)", stalls, exact, why, "partly")
    (folder := temporary_folders.folder()).mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(bytes(MIB))
        file.flush()
        left = page_cache.drop([Path(file.name)])
    yes = f"files in {folder} are evicted, and checked"
    why = f"{folder} keeps its pages, as a tmpfs, or this kernel does not tell it"
    yield _row("cold page cache", left == 0, yes, why)


def of_group(group: Cgroup) -> Iterator[Capability]:
    name, kills = group.file("peak").name, group.file("oom").name
    with closing(group):
        now = group.counters()
        resets = now.peak_bytes is not None and group.reset_peak()
    exact = f"exact for each phase: {name}, reset at the end of each"
    why = f"exact for the whole cell, not for a phase: resetting {name} needs Linux 6.12"
    if now.peak_bytes is None:
        why = f"missing: {name} needs Linux 5.19; only samples are available"
    yield _row("cgroup peak", resets, exact, why, "no" if now.peak_bytes is None else "partly")
    exact = f"exact: oom_kill in {kills}"
    yield _row("kills for lack of memory", now.oom_kills is not None, exact)
    exact = "exact: workingset_refault_file in memory.stat"
    why = "missing: this counter needs Linux 5.9; only major page faults are available"
    yield _row("refaults", now.refaults is not None, exact, why, "partly")


def _machine() -> Iterator[Capability]:
    machine, hierarchy = environment.machine(), memory_hierarchy()
    if hierarchy:  # without one, the row of the isolation says so
        version, mount = hierarchy
        verdict: Verdict = "yes" if version == 2 else "partly"
        yield Capability("cgroup version", verdict, f"v{version} at {mount}")
    total, free = cgroup.ram_bytes()
    limited = " (the limit of a cgroup around weighin)" if total < machine["ram_bytes"] else ""
    yield Capability("RAM", "yes", f"{format_bytes(free)} free of {format_bytes(total)}{limited}")
    disk = format_bytes(shutil.disk_usage(temporary_folders.folder()).free)
    yield Capability("disk for checkpoints", "yes", f"{disk} free at {temporary_folders.folder()}")
    devices = ("nvidiactl", "dxg", "kfd")  # of NVIDIA, of WSL and of AMD
    if not any(Path("/dev", one).exists() for one in devices):
        yield Capability("CUDA GPU", "partly", "none: cells load to the CPU only")
        return
    seen = gpu_memory.look()
    why = f"there is one, but {seen.why}: {seen.repair}"
    first = [f"{gpu.name}, {format_bytes(gpu.total_bytes)}" for gpu in seen.gpus[:1]]
    yield _row("CUDA GPU", bool(first), f"{''.join(first)}, peaks are exact", why)
