"""``weighin doctor``: test which limits this machine can enforce and which figures it can measure.

weighin tests each capability of the machine, and infers none from version numbers.
"""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from weighin.cell import Cell, Job
from weighin.checkpoint import cache
from weighin.disk import mount
from weighin.disk.pace import Pace
from weighin.doctor.capabilities import Capability, figures
from weighin.errors import HarnessError
from weighin.isolation import delegation, select
from weighin.isolation.base import Isolation
from weighin.isolation.cgroup import limit, temporary_group
from weighin.probes import environment
from weighin.probes.cgroup import memory_hierarchy, pressure_hierarchy
from weighin.result import Outcome
from weighin.run import command_runner, disk_proof, slow_disk
from weighin.run.cell_runner import Setting, measure
from weighin.suite.registry import model, read_strategy
from weighin.units import MIB, format_bytes

_PROBE = Path(__file__).with_name("oom_probe.py")
_PROBE_LIMIT_BYTES = 384 * MIB
_DISKS = (
    ("rate of a disk (--disk)", Pace(100_000_000)),
    ("latency of a disk (--disk-latency)", Pace(100_000_000, 5_000_000)),
)
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


def examine(say: Callable[[str], None], *, clean: bool = False) -> Examination:
    """Test this machine; ``say`` is called with a line of text before each slow step.

    ``examine`` removes, and reports, the containers, cgroups, processes, mounts and folders that
    killed runs left behind. With ``clean``, it also removes those of runs with a lock file
    other than this process's.
    """
    isolations = [select.named(name) for name in select.NAMES]
    limits = [finding for one in isolations for finding in _isolation(one, say, clean)]
    folders = map(_removed, command_runner.remove_leftovers())
    mounts = map(_removed, mount.remove_stale(slow_disk.root(), any_lock=clean))
    return Examination((*folders, *mounts, *limits, *figures(), *_machine()))


def table(examination: Examination) -> Table:
    shown = Table("subject", "works", "detail", box=SIMPLE_HEAD, pad_edge=False)
    for one in examination.capabilities:
        works = f"[{_STYLES[one.verdict]}]{_WORDS[one.verdict]}[/]"
        shown.add_row(escape(one.subject), works, escape(one.detail))
    return shown


def _isolation(
    isolation: Isolation, say: Callable[[str], None], any_lock: bool
) -> Iterator[Capability]:
    subject = f"isolation {isolation.name}"
    try:
        isolation.check()
    except HarnessError as error:
        yield Capability(subject, "bad", f"{error.message}. {error.repair}")
        return
    yield from map(_removed, isolation.remove_stale(any_lock=any_lock))
    if not isolation.limits:
        yield Capability(subject, "good", "measures; enforces no limit")
    else:
        limit_size = format_bytes(_PROBE_LIMIT_BYTES)
        say(f"running a probe into a limit of {limit_size} with {isolation.name}")
        try:
            yield _prove(isolation, say)
        except HarnessError as error:
            yield Capability(subject, "bad", f"{error.message}. {error.repair}")
            return
    yield from _disks(isolation, say)


def _disks(isolation: Isolation, say: Callable[[str], None]) -> Iterator[Capability]:
    """Test, by a direct read, whether the isolation can give a measurement a slow disk."""
    spec = model("gpt2-tiny")
    for name, pace in _DISKS:
        subject = f"isolation {isolation.name}: {name}"
        say(f"reading directly from a disk of {pace} with {isolation.name}")
        job = disk_proof.job_of(isolation, spec, pace)
        try:
            proof = disk_proof.prove(isolation, job)
        except HarnessError as error:
            yield Capability(subject, "poor", f"{error.message}. {error.repair}")
            continue
        detail = f"asked for {pace}: a direct read got {proof}"
        yield Capability(subject, "good" if proof.holds else "poor", detail)


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
    version, mount = hierarchy
    tree = pressure_hierarchy()
    if version == 2:
        return Capability(subject, "good", f"v2 at {mount}")
    beside = f"beside a v2 tree at {tree}" if tree else "without a v2 tree"
    return Capability(subject, "poor", f"v1 at {mount}, {beside}")


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
