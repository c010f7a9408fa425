"""``weighin doctor``: what this machine can limit and measure, tried out rather than looked up."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.markup import escape
from rich.table import Table

from harness import environment, page_cache
from harness.cell import Cell, Job
from harness.checkpoint import cache
from harness.counters import MemoryCgroup, PeakMark, memory_hierarchy
from harness.errors import HarnessError
from harness.isolation import Isolation, choice
from harness.measuring import Setting, measure
from harness.record import Outcome
from harness.registry import model, read_strategy
from harness.units import MIB, format_bytes

_PROBE = Path(__file__).with_name("doctor_probe.py")
_PROBE_LIMIT_BYTES = 384 * MIB
_MARKS = {"good": "[green]yes[/]", "poor": "[yellow]so-so[/]", "bad": "[red]no[/]"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the doctor's table."""

    subject: str
    verdict: Literal["good", "poor", "bad"]
    detail: str


def examine(say: Callable[[str], None]) -> tuple[Table, bool]:
    """Try this machine out; returns the table, and whether some isolation holds a limit.

    Removes what dead runs left behind, and says so.
    """
    isolations = [choice.named(name) for name in choice.NAMES]
    limits = [finding for one in isolations for finding in _isolation(one, say)]
    table = Table("what", "works", "detail", title="what this machine can limit and measure")
    for finding in [*limits, *_figures(), *_machine()]:
        table.add_row(escape(finding.subject), _MARKS[finding.verdict], escape(finding.detail))
    return table, any("limit" in one.subject and one.verdict == "good" for one in limits)


def _isolation(isolation: Isolation, say: Callable[[str], None]) -> Iterator[Finding]:
    subject = f"isolation {isolation.name}"
    try:
        isolation.check()
    except HarnessError as error:
        yield Finding(subject, "bad", f"{error.message}. {error.repair}")
        return
    for line in isolation.remove_stale():
        yield Finding("left behind by a dead run", "good", f"removed: {line}")
    if not isolation.limits:
        yield Finding(subject, "good", "measures; holds no limit")
        return
    say(f"running into a limit of {format_bytes(_PROBE_LIMIT_BYTES)} with {isolation.name}")
    try:
        yield _prove(isolation)
    except HarnessError as error:
        yield Finding(subject, "bad", f"{error.message}. {error.repair}")


def _prove(isolation: Isolation) -> Finding:
    """Run a worker into a limit and see the kernel kill it in the phase that overruns."""
    isolation.prepare()
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
    found = f"{result.outcome} in phase {result.last_phase!r}" + (
        f", cgroup peak {format_bytes(peak)}" if peak else ", cgroup peak unseen"
    )
    holds = result.outcome is Outcome.OOM_KILLED and result.last_phase == "overrun"
    subject = f"isolation {isolation.name} holds a limit"
    return Finding(subject, "good" if holds else "bad", f"{found}. {result.message}".rstrip(". "))


def _figures() -> Iterator[Finding]:
    clear = os.access("/proc/self/clear_refs", os.W_OK)
    yield Finding(
        "peak RSS of each phase",
        "good" if clear else "bad",
        "exact: VmHWM, reset through clear_refs" if clear else "clear_refs cannot be written",
    )
    yield _cgroup_peak()
    yield _cold_cache()
    psi = Path("/proc/pressure/memory").exists()
    yield Finding(
        "memory pressure (PSI)", "good" if psi else "poor", "on" if psi else "boot with psi=1"
    )


def _cgroup_peak() -> Finding:
    subject = "cgroup peak of each phase"
    hierarchy = memory_hierarchy()
    if hierarchy is None:
        return Finding(subject, "bad", "no memory controller")
    cgroup = MemoryCgroup(hierarchy[1])
    try:
        from harness.isolation.cgroup import temporary_group

        with temporary_group() as group, closing(PeakMark(MemoryCgroup(group))) as mark:
            exact = mark.reset()
    except HarnessError as error:
        return Finding(subject, "poor", f"{error.message}: whole-cell peaks with docker only")
    how = f"exact: {cgroup.peak_path.name}, cgroup v{hierarchy[0]}"
    if exact:
        return Finding(subject, "good", how)
    return Finding(subject, "poor", "whole-cell peaks only: the mark resets since Linux 6.12")


def _cold_cache() -> Finding:
    folder = cache.folder()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        file.write(bytes(MIB))
        file.flush()
        left = page_cache.drop([Path(file.name)])
    if left:
        return Finding("cold page cache", "bad", f"{folder} keeps its pages: is it a tmpfs?")
    return Finding("cold page cache", "good", f"dropped and proven for files in {folder}")


def _machine() -> Iterator[Finding]:
    found = environment.machine()
    free, total = environment.free_ram_bytes(), found["ram_bytes"]
    yield Finding("RAM", "good", f"{format_bytes(free)} free of {format_bytes(total)}")
    disk = shutil.disk_usage(cache.folder()).free
    yield Finding("disk for checkpoints", "good", f"{format_bytes(disk)} free at {cache.folder()}")
    swap = found["swap_bytes"]
    detail = "none" if not swap else f"{format_bytes(swap)}, turned off for each limited cell"
    yield Finding("swap", "good", detail)
    yield Finding("transparent huge pages", "good", f"{found['thp']} (recorded: changes times)")
    gpu = Path("/dev/nvidiactl").exists()
    yield Finding("CUDA GPU", "good" if gpu else "poor", "present" if gpu else "none: CPU only")
