"""Which figures this machine gives exactly, and which it cannot give and why, for ``weighin doctor``.

The cgroup's figures are asked of a group that is made for it, never looked up by version.
"""

import os
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from weighin.checkpoint import cache
from weighin.errors import HarnessError
from weighin.isolation.cgroup import temporary_group
from weighin.probes import page_cache
from weighin.probes.cgroup import MemoryCgroup, PeakMark, memory_hierarchy, pressure_hierarchy
from weighin.units import MIB

Verdict = Literal["good", "poor", "bad"]


@dataclass(frozen=True, slots=True)
class Capability:
    """One line of the doctor's table."""

    subject: str
    verdict: Verdict
    detail: str


def figures() -> Iterator[Capability]:
    """Yield a finding for each figure of a record, in the order in which a report has them."""
    clear = os.access("/proc/self/clear_refs", os.W_OK)
    yield Capability(
        "peak RSS of each phase",
        "good" if clear else "bad",
        "exact: VmHWM, reset through clear_refs"
        if clear
        else "/proc/self/clear_refs cannot be written: is this a sandbox of another kernel?",
    )
    yield Capability(
        "anonymous, file, shared memory",
        "good",
        "sampled from outside, exact at the ends of phases: the kernel keeps no mark of them",
    )
    try:
        with temporary_group() as group:
            yield from of_group(MemoryCgroup(group))
    except HarnessError as error:
        yield Capability(
            "figures of the cell's cgroup",
            "bad" if memory_hierarchy() is None else "poor",
            f"{error.message}: none with --isolation cgroup; docker has groups of its own",
        )
    yield pressure()
    yield cold_cache()


def of_group(cgroup: MemoryCgroup) -> Iterator[Capability]:
    """Yield what a group of one's own tells: its peak, the kernel's kills, refaults, limits."""
    subject, name = "cgroup peak", cgroup.peak_path.name
    with closing(PeakMark(cgroup)) as mark:
        if mark.read() is None:
            yield Capability(
                subject, "bad", f"missing: {name} came with Linux 5.19; samples remain"
            )
        elif mark.reset():
            yield Capability(subject, "good", f"exact for each phase: {name}, reset at every mark")
        else:
            why = f"{name} can be reset since Linux 6.12"
            yield Capability(subject, "poor", f"exact for the whole cell, not for a phase: {why}")
    kills = cgroup.read_oom_kills()
    detail = f"exact: oom_kill in {cgroup.oom_path.name}"
    if kills is None:
        detail = f"missing: {cgroup.oom_path.name} has no oom_kill before Linux 5.2 (v2), 4.13 (v1)"
    yield Capability("kills for lack of memory", "bad" if kills is None else "good", detail)
    refaults = cgroup.read_refaults()
    detail = "exact: workingset_refault_file in memory.stat"
    if refaults is None:
        detail = "missing: this kernel does not count them apart (Linux 5.9); major faults remain"
    yield Capability("pages read again", "poor" if refaults is None else "good", detail)
    soft = cgroup.soft_limit_path is not None
    detail = "memory.high, with --isolation cgroup" if soft else "cgroup v1 has none that throttles"
    yield Capability("soft limit (--ram-high)", "good" if soft else "poor", detail)


def pressure() -> Capability:
    """Return whether a cell's memory pressure can be had: PSI needs a group in a v2 tree."""
    subject = "memory pressure (PSI)"
    if not Path("/proc/pressure/memory").exists():
        return Capability(subject, "poor", "missing: off in this kernel; boot with psi=1")
    tree, hierarchy = pressure_hierarchy(), memory_hierarchy()
    if tree is None:
        return Capability(
            subject, "poor", "missing: only a cgroup v2 tree has it, and none is mounted"
        )
    if hierarchy and hierarchy[0] == 1:
        detail = f"exact with --isolation cgroup, through {tree}; docker on cgroup v1 has none"
        return Capability(subject, "good", detail)
    return Capability(subject, "good", "exact: memory.pressure of the cell's cgroup")


def cold_cache() -> Capability:
    """Return whether the checkpoints' pages can be dropped, and proven gone."""
    folder = cache.folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(bytes(MIB))
        file.flush()
        left = page_cache.drop([Path(file.name)])
    if left is None:
        return Capability(
            "cold page cache", "bad", f"{folder}: this kernel does not tell what it caches"
        )
    if left:
        return Capability("cold page cache", "bad", f"{folder} keeps its pages: is it a tmpfs?")
    return Capability("cold page cache", "good", f"dropped and proven for files in {folder}")
