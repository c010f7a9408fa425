"""Test which figures this machine can measure, and how exactly.

What a cgroup can measure is tested in a temporary cgroup, not inferred from the kernel's version.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from weighin.checkpoint import cache
from weighin.errors import HarnessError
from weighin.isolation.cgroup import limit, temporary_group
from weighin.probes import page_cache
from weighin.probes.cgroup import MemoryCgroup, PeakMark, memory_hierarchy, pressure_hierarchy
from weighin.units import MIB

_INNER_BYTES: Final = 64 * MIB
Verdict = Literal["good", "poor", "bad"]


@dataclass(frozen=True, slots=True)
class Capability:
    """A row of the table that ``weighin doctor`` prints; "good" means yes, "poor" partly and "bad" no."""

    subject: str
    verdict: Verdict
    detail: str


def figures() -> Iterator[Capability]:
    """Yield a row for each kind of memory figure in records, and a row for the cold page cache."""
    clear = os.access("/proc/self/clear_refs", os.W_OK)
    yield Capability(
        "peak RSS of each phase",
        "good" if clear else "bad",
        "exact: VmHWM, reset through clear_refs"
        if clear
        else "/proc/self/clear_refs cannot be written, as in a sandbox that is not Linux itself",
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
        yield Capability(
            "figures of the cell's cgroup",
            "bad" if memory_hierarchy() is None else "poor",
            f"{error.message}: not measured with --isolation cgroup; docker has its own cgroups",
        )
    yield pressure()
    yield cold_cache()


def of_group(cgroup: MemoryCgroup) -> Iterator[Capability]:
    """Test a temporary cgroup; yield a row each for peak, OOM kills, refaults and soft limit."""
    subject, name = "cgroup peak", cgroup.peak_path.name
    with closing(PeakMark(cgroup)) as mark:
        if mark.read() is None:
            yield Capability(
                subject, "bad", f"missing: {name} needs Linux 5.19; only samples are available"
            )
        elif mark.reset():
            yield Capability(
                subject, "good", f"exact for each phase: {name}, reset at the end of each"
            )
        else:
            why = f"resetting {name} needs Linux 6.12"
            yield Capability(subject, "poor", f"exact for the whole cell, not for a phase: {why}")
    kills = cgroup.read_oom_kills()
    detail = f"exact: oom_kill in {cgroup.oom_path.name}"
    if kills is None:
        needed = "Linux 5.2 (v2) or 4.13 (v1)"
        detail = f"missing: oom_kill in {cgroup.oom_path.name} needs {needed}"
    yield Capability("kills for lack of memory", "bad" if kills is None else "good", detail)
    refaults = cgroup.read_refaults()
    detail = "exact: workingset_refault_file in memory.stat"
    if refaults is None:
        detail = "missing: this counter needs Linux 5.9; only major page faults are available"
    yield Capability("refaults", "poor" if refaults is None else "good", detail)
    soft = cgroup.soft_limit_path is not None
    detail = "memory.high, with --isolation cgroup" if soft else "cgroup v1 has no memory.high"
    yield Capability("soft limit (--ram-high)", "good" if soft else "poor", detail)


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
    if not is_limited:
        return Capability(
            subject, "bad", f"{outer.limit_path.name} of an inner group has no effect"
        )
    return Capability(subject, "good", f"{outer.limit_path.name} of a group inside a limited group")


def pressure() -> Capability:
    """Test whether memory pressure can be measured: PSI needs a cgroup v2 tree."""
    subject = "memory pressure (PSI)"
    if not Path("/proc/pressure/memory").exists():
        return Capability(subject, "poor", "missing: disabled in this kernel; boot with psi=1")
    tree, hierarchy = pressure_hierarchy(), memory_hierarchy()
    if tree is None:
        return Capability(
            subject, "poor", "missing: it needs a cgroup v2 tree, and none is mounted"
        )
    if hierarchy and hierarchy[0] == 1:
        detail = f"exact with --isolation cgroup, through {tree}; not with docker on cgroup v1"
        return Capability(subject, "good", detail)
    return Capability(subject, "good", "exact: memory.pressure of the cell's cgroup")


def cold_cache() -> Capability:
    """Test whether a file in weighin's folder of checkpoints can be evicted from the page cache."""
    folder = cache.folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(bytes(MIB))
        file.flush()
        left = page_cache.drop([Path(file.name)])
    if left is None:
        return Capability(
            "cold page cache", "bad", f"{folder}: this kernel does not tell which pages are cached"
        )
    if left:
        return Capability("cold page cache", "bad", f"{folder} keeps its pages: is it a tmpfs?")
    return Capability("cold page cache", "good", f"files in {folder} are evicted, and checked")
