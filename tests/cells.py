"""All that the net of tests reaches of weighin's insides: its one file of adapters.

The net is ``instrument/``, ``commands/``, ``faults/``, ``checkpoints/``, ``conformance/`` and the files
beside this one. Everywhere else in it there are only weighin's commands, public names and records
(``unit/test_net.py``). When a mechanism of weighin is replaced, this file is what follows: what a test
says of weighin stays, and so do its figures.
"""

from __future__ import annotations

import csv
import os
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import leftovers
import pytest

from weighin import slow_disk
from weighin.cell import CacheState, Cell, Job, ModelSpec, Operation
from weighin.checkpoint import cache as checkpoints
from weighin.errors import CheckpointError, ConfigError, HarnessError, IsolationUnavailable
from weighin.isolation import select
from weighin.isolation.base import Isolation, Running
from weighin.isolation.cgroup import limit, temporary_group
from weighin.probes import cgroup, gpu_memory, kernel_log, page_cache
from weighin.probes.cgroup import Cgroup, memory_hierarchy
from weighin.records import run_folder
from weighin.records.explanation import Facts, answer
from weighin.records.run_folder import read_samples
from weighin.records.verdict import Reference, judge_result
from weighin.result import UNNAMED, Outcome, Phase, Result
from weighin.run import loads
from weighin.run.loads import LoadSpec
from weighin.run.measure import measure
from weighin.settings.definition import DEFAULT_SAVING, DEFAULT_STRATEGIES, Settings
from weighin.slow_disk import Mount, Pace, remove_stale
from weighin.stream import formats
from weighin.stream.gguf_files import UNDECODED
from weighin.stream.slices import TensorPlan
from weighin.suite.registry import data_folder, model, read_strategy
from weighin.suite.registry import strategies as all_strategies

if TYPE_CHECKING:
    import torch  # it takes a second to import, and tests of commands need none of it

__all__ = [
    "DEFAULT_SAVING", "DEFAULT_STRATEGIES", "UNDECODED", "CacheState", "CheckpointError", "ConfigError",
    "HarnessError", "Mount", "Outcome", "Pace", "Phase", "Reference", "Result",
    "kernel_log", "page_cache", "remove_stale",
]  # fmt: skip

KIB, MIB, GIB = 1024, 1024**2, 1024**3
FORMATS: tuple[str, ...] = tuple(formats.NAMES)
WORKER = "weighin.worker.__main__"
"""The module that a measured process runs, to load or save in it."""
MANIFEST = "weighin.checkpoint.manifest"
CACHE = "weighin.checkpoint.cache"
"""The module with which a measured process reads what it loads, before its baseline."""
_OF_COMMANDS = ("weighin.cli.app", "weighin.models.pretrained")

FILE_BYTES = 64 * MIB
"""Size of ``known.bin``: a file of known size to map."""

LARGE = ModelSpec(
    "tied-large",
    "weighin.models.tied:tied",
    {"vocab_size": 32768, "emb_dim": 768, "n_layers": 2, "n_heads": 4},
)
"""150 MiB: large beside all noise, small enough to be made in a second."""


# What this machine has ----------------------------------------------------------------------------


def isolation_missing(name: str) -> str:
    """Return why an isolation does not work here; empty if it does."""
    try:
        isolation = select.named(name)
        isolation.check()
        isolation.remove_stale()  # of a killed test run: else the next run's output mentions it
    except IsolationUnavailable as error:
        return str(error)
    return ""


def cuda_missing() -> str:
    return gpu_memory.look().why


def fuse_missing() -> str:
    try:
        slow_disk.check(in_container=False)
    except IsolationUnavailable as error:
        return f"{error.message}: {error.repair}"
    return ""


def import_commands() -> None:
    """Import what commands over checkpoints import, for a process whose forks run them."""
    for name in _OF_COMMANDS:
        import_module(name)


# Groups and the page cache ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Group:
    """A memory cgroup, and what the kernel itself says of it."""

    path: Path

    @property
    def version(self) -> int:
        return 1 if (self.path / "memory.usage_in_bytes").exists() else 2

    def read(self, v1: str, v2: str) -> str:
        """Return the text of the file that has these names in cgroup v1 and v2."""
        return (self.path / (v1 if self.version == 1 else v2)).read_text().strip()

    def stat(self) -> dict[str, int]:
        lines = (line.split() for line in self.read("memory.stat", "memory.stat").splitlines())
        return {name: int(value) for name, value in lines}

    def oom_kills(self) -> int:
        lines = self.read("memory.oom_control", "memory.events.local").splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])

    def peak_bytes(self) -> int:
        return int(self.read("memory.max_usage_in_bytes", "memory.peak"))

    def limit(self, limit_bytes: int) -> None:
        limit(self.path, limit_bytes)

    def start(self, command: Sequence[str], **how: Any) -> subprocess.Popen[Any]:
        """Start a command whose first process is in the group."""
        script = 'echo $$ > "$1" && shift && exec "$@"'
        enter = ("/bin/sh", "-c", script, "sh", str(self.path / "cgroup.procs"))
        return subprocess.Popen([*enter, *command], stdin=subprocess.DEVNULL, **how)

    def lift(self) -> None:
        """Lift the limit as weighin does, so that a process that it kills can end."""
        Cgroup(self.path).raise_limit()


@contextmanager
def new_group() -> Iterator[Group]:
    with temporary_group() as path:
        yield Group(path)


def cgroup_version() -> int:
    """Return the version of the hierarchy that counts memory here; 0 without one."""
    return (memory_hierarchy() or (0,))[0]


def cgroup_root() -> Path:
    """Return where the hierarchy that counts memory is mounted; a path that is not there without one."""
    return (memory_hierarchy() or (0, Path("/no-cgroups")))[1]


@cache
def keeps_marks_of_phases() -> bool:
    """Tell whether this kernel puts a cgroup's mark back: v1 does, v2 since Linux 6.12."""
    with new_group() as group:
        if group.version == 1:
            return True
        try:
            (group.path / "memory.peak").write_text("reset\n")
        except OSError:
            return False
        return True


# Checkpoints and formats --------------------------------------------------------------------------


def checkpoint_of(spec: ModelSpec, fmt: str = "pt") -> Path:
    """Make a model's checkpoint in the cache, if it is not there, and return its path."""
    return checkpoints.ensure(spec, fmt).path


def suffix_of(fmt: str) -> str:
    return ".pth" if fmt == "pt_legacy" else str(formats.suffix_of(fmt))


def format_of(path: Path) -> str:
    return str(formats.detect(path))


def files_of(path: Path) -> list[Path]:
    return [*formats.files(path)]


def write_state(path: Path, fmt: str, state: Mapping[str, torch.Tensor]) -> None:
    """Write tensors with weighin's own writer of a format; equal views of one memory are shared."""
    import torch

    from weighin.checkpoint.checksum import pieces_of
    from weighin.stream.write import write

    firsts: dict[tuple[Any, ...], str] = {}
    plans = []
    for name, tensor in state.items():
        place = tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
        first = firsts.setdefault(place, name) if tensor.numel() else name
        plan = TensorPlan(name, tuple(tensor.shape), tensor.dtype)
        plans.append(plan if first == name else replace(plan, shared_with=first))
    contiguous = torch.contiguous_format
    write(fmt, path, plans, lambda name: pieces_of(state[name].clone(memory_format=contiguous)))


def read_state(path: Path) -> dict[str, torch.Tensor]:
    """Read all tensors with weighin's own reader, piece by piece."""
    import torch

    from weighin.checkpoint.reader import read_pieces

    state = {}
    for one in formats.read(path):
        pieces = [piece.reshape(-1) for piece in read_pieces(one)]
        state[one.name] = torch.cat([torch.empty(0, dtype=one.dtype), *pieces]).view(one.shape)
    return state


def arguments_to_dequantise(path: Path) -> dict[str, Any]:
    """Return the arguments with which ``from_pretrained`` dequantises a checkpoint as weighin does."""
    from weighin.models.pretrained import arguments_to_dequantise as arguments

    return dict(arguments(path))


# Records ------------------------------------------------------------------------------------------


def write_merged(base: Path, adapter: Path, target: Path, dtype: torch.dtype) -> None:
    """Write a folder's model with an adapter in it, by the names of the model's state dict."""
    from weighin.checkpoint.convert import Conversion
    from weighin.stream.pretrained_library import FolderChoice

    choice = FolderChoice(adapter=str(adapter))
    name = str(dtype).removeprefix("torch.")
    Conversion(base, target, "pt", name, model_keys=True, choice=choice).write()


def known(figure: int | None) -> int:
    """Return a figure that a record must have."""
    assert figure is not None
    return figure


def charged_above_import(result: Result) -> int:
    """Return by how much the peak charge of a load is above that of its imports."""
    assert result.baseline
    return known(result.peaks.cgroup_bytes) - known(result.baseline.cgroup_bytes)


def names_of(result: Result) -> list[str]:
    """Return the names of a result's phases, without what lay between two of them on a busy machine."""
    return [phase.name for phase in result.phases if phase.name != UNNAMED]


def phases_of(result: Result) -> dict[str, Phase]:
    """Return a result's phases by name, where each name is there once."""
    return {phase.name: phase for phase in result.phases}


def explained(run: Path) -> tuple[Result, str | None, str]:
    """Return the one record of a run, the name of the cause that it proves, and what weighin says."""
    (result,) = run_folder.read(run).results
    assert result.ran
    cause = Facts(result, result.ran, read_samples(run, result.samples_path)).cause
    return result, cause.name if cause else None, "\n".join(answer(run, result))


def verdict_on(result: Result) -> tuple[str, str]:
    """Return the verdict on a cell under its limit, and the reason."""
    judgement = judge_result(result)
    assert judgement
    return judgement.verdict, judgement.reason


def sharing_strategies() -> list[str]:
    """Return the names of weighin's strategies in which ranks divide a load of any model."""
    return sorted(
        info.name
        for info in all_strategies().values()
        if info.shares_load and not info.pretrained and not info.missing
    )


# One cell in one call -----------------------------------------------------------------------------


def known_file(strategies: Path) -> Path:
    """Return where ``known.bin`` lies: in a folder that every worker finds on its ``sys.path``."""
    return strategies.parent / "data" / "known.bin"


def hide_kills_elsewhere(patch: pytest.MonkeyPatch) -> None:
    """Hide the kernel's kills of cells in other test processes, which a plain process cannot tell."""
    patch.setattr(cgroup, "read_machine_oom_kills", lambda: 0)


@dataclass(slots=True)
class Watched:
    """An isolation that remembers its last worker, so that a test can look at it from outside."""

    inner: Isolation
    name: str
    limits: bool
    running: Running | None = None

    @property
    def group(self) -> Group:
        """The memory cgroup of the cell that runs."""
        assert self.running and self.running.cgroup
        return Group(self.running.cgroup)

    def start(self, *arguments: Any, **options: Any) -> Running:
        self.running = self.inner.start(*arguments, **options)
        return self.running

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@cache
def prepared_isolation(name: str) -> Watched:
    isolation = select.named(name)
    isolation.check()
    return Watched(isolation, isolation.name, isolation.limits)


@dataclass(frozen=True, slots=True)
class Bench:
    """Measures one cell and returns its Result; its run's folder is ``run``.

    ``mark`` is in the environment of all processes that it starts.
    """

    run: Path
    strategies: Path
    mark: str
    _numbers: Iterator[int] = field(default_factory=count)

    def __call__(
        self,
        strategy: str,
        isolation: Watched,
        *,
        model_name: str = "tied-tiny",
        spec: ModelSpec | None = None,
        limit_bytes: int | None = None,
        cache_state: CacheState = "cold",
        passes: int = 1,
        timeout_s: float = 120.0,
        files: Sequence[Path] = (),
        on_phase: Callable[[str], object] = str,
        operation: Operation = "load",
        environment: dict[str, str] | None = None,
        ranks: int = 1,
        dtype: str = "float32",
        fmt: str = "",
        reference: Reference | None = None,
        use: str = "",
        use_path: str = "",
        disk: Pace | None = None,
        **options: Any,
    ) -> Result:
        """``options`` are the strategy's; ``files`` are made cold beside the checkpoint's."""
        spec, disk = spec or model(model_name), disk or Pace()
        ours = self.strategies / f"{strategy}.py"
        theirs = data_folder("strategies") / ("saving" if operation == "save" else "") / ours.name
        info = read_strategy(ours if ours.exists() else theirs, operation)
        fmt = fmt or info.formats[0]
        checkpoint = checkpoints.ensure(spec, fmt if operation == "load" else "pt")
        cell = Cell(
            spec,
            strategy,
            isolation.name,
            ram_limit_bytes=limit_bytes,
            dtype=dtype,
            format=fmt,
            cache=cache_state,
            options=options,
            passes=0 if use else passes,
            repeat=next(self._numbers),
            operation=operation,
            environment=environment or {},
            ranks=ranks,
            use=use,
            disk_bytes_per_s=disk.bytes_per_s,
            disk_latency_ns=disk.latency_ns,
        )
        job = Job(
            cell,
            str(checkpoint.path),
            str(checkpoint.manifest_path),
            str(info.path),
            use_path=use_path,
            python_path=(str(known_file(self.strategies).parent),),  # containers see it, too
        )
        paths = [checkpoint.path] if checkpoint.path.is_file() else [*checkpoint.path.iterdir()]
        model_bytes = checkpoint.manifest().model_bytes(dtype)
        writes = operation == "save" or use == "save"
        with loads.save_folder(model_bytes) if writes else nullcontext("") as target:
            job = replace(job, target=str(target))
            load = LoadSpec(
                job,
                [*paths, *files],
                model_bytes,
                Settings().model_copy(update={"timeout_s": timeout_s}),
            )
            load.on_phase, load.pace = on_phase, disk
            measured = measure(isolation, load, reference=reference)
            measured.finish(self.run)
            result = measured.result
        assert leftovers.all_of(os.getpid(), self.mark) == []
        return result

    def samples(self, result: Result) -> list[dict[str, int | None]]:
        assert result.samples_path
        with (self.run / result.samples_path).open() as file:
            return [
                {name: int(value) if value else None for name, value in row.items()}
                for row in csv.DictReader(file)
            ]
