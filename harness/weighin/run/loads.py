"""Prepare the checkpoints of a run of loads or saves, and measure each cell of it."""

import compileall
import ctypes
import mmap
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import weighin
from weighin import formats
from weighin.cell import Cell, Job, ModelSpec
from weighin.checkpoint import cache, entries, staging
from weighin.disk import mount
from weighin.disk.mount import Mount
from weighin.disk.passthrough import LARGEST_READ_BYTES, Pace
from weighin.errors import CheckpointError, ConfigError, FormatLimit, HarnessError
from weighin.formats import quantised
from weighin.formats.lora import files_of
from weighin.formats.pretrained_folder import folder_of
from weighin.isolation import select
from weighin.isolation.base import Isolation, Running
from weighin.loader.mapped_copy import ask_for_huge_pages
from weighin.plan.task import Planned, Progress, Run, skipped
from weighin.probes import environment, mounts, page_cache
from weighin.result import Memory, Outcome
from weighin.run.measure import Measured, measure
from weighin.run.spec import Spec
from weighin.suite import packages, user_code
from weighin.suite.registry import data_folder
from weighin.units import MIB, format_bytes, format_exact
from weighin.uses import SAVE
from weighin.worker.phases import BEFORE_LOAD

SETTLED_S = 2.5  # no report of free pages is due if no memory was freed for this time
_LARGEST_SHARE: Final = 0.8  # of the free memory, because more could evict pages of other programs
_SPARE_BYTES: Final = 64 * MIB  # of a save: headers, indexes, the rounding to file system blocks
_PROBE_TIMEOUT_S = 120.0

_Key = tuple[str, str]


@dataclass(slots=True)
class LoadSpec(Spec):
    """A load, a save or a test's body.

    If the cell's cache is "warm", the worker reads the files again before the load, so that the kernel
    charges their pages to the cell's own cgroup.

    Attributes:
        steady: whether weighin holds memory until the load begins (``held``).
        stall_from_bytes: the file offset behind which a slow disk never answers a read; None if the
            disk answers all reads.
        only_baseline: whether the worker is killed when it has reported its memory before the load.
    """

    steady: bool = False
    stall_from_bytes: int | None = None
    only_baseline: bool = False
    _held: ExitStack = field(default_factory=ExitStack)
    _running: Running | None = None

    @classmethod
    def of(
        cls, job: Job, files: Sequence[Path] = (), model_bytes: int | None = None, **options: Any
    ) -> "LoadSpec":
        """Return the spec of a job; ``files`` are the checkpoint's, by their paths on this machine."""
        spec = cls(
            job.cell, files, job, timeout_s=job.timeout_s, model_bytes=model_bytes, **options
        )
        if not job.body:
            with suppress(OSError):  # the cell itself then fails
                own = [Path(name) for name in (job.strategy_path, job.use_path) if name]
                spec.sources_hash = environment.code_digest(*own)
        return spec

    @property
    def _job(self) -> Job:
        assert self.job
        return self.job

    def enter(self, opened: ExitStack) -> None:
        job, cell = self._job, self.cell
        if pace := Pace(cell.disk_bytes_per_s, cell.disk_latency_ns, self.stall_from_bytes):
            folder = folder_of(Path(job.checkpoint))
            self.disk = Mount(folder, pace, entries.slow_disks())
            opened.callback(self.disk.close)
            inside = self.disk.folder / Path(job.checkpoint).relative_to(folder)
            self.job = job = replace(job, checkpoint=str(inside))
            self.facts["disk"] = {"means": "fuse", "request_bytes": LARGEST_READ_BYTES}
        if size := (self.model_bytes or 0) * cell.ranks if self.steady else 0:
            # Leave memory for what the worker needs before its baseline: a save's model, a warm
            # load's file. A strategy of weighin needs at most two copies of the model and its file
            # in the page cache.
            spare = size if cell.operation == "save" or cell.cache == "warm" else 0
            opened.enter_context(self._held)
            self.touched_bytes = self._held.enter_context(held(3 * size, spare))
        if self.files:
            self.facts["storage"] = mounts.describe(self.files[0])
            self.facts["read_ahead_bytes"] = mounts.read_ahead_bytes(Path(job.checkpoint))

    def start(self, isolation: Isolation, listener: Path) -> Running:
        job = self._job
        mounts = (*job.mounts, str(listener.parent))
        running = isolation.start(replace(job, listener=str(listener), mounts=mounts))
        self._running = running
        return running

    def before_load(self) -> None:
        if self.only_baseline and self._running:
            self._running.kill()
        if self.touched_bytes is not None:
            time.sleep(SETTLED_S)
            self._held.close()

    def finish(self, cached_bytes: int | None) -> list[str]:
        found = []
        if cached_bytes is None:
            found.append(
                "weighin cannot tell whether the checkpoint was dropped from the page cache: Linux"
                " reports cached pages only to a user who owns the files or may write them"
            )
        elif cached_bytes:
            left = format_bytes(cached_bytes)
            found.append(f"{left} of the checkpoint could not be dropped from the page cache")
        if target := self._job.target:
            written = (path for path in Path(target).rglob("*") if path.is_file())
            if kept := page_cache.drop(written):
                found.append(
                    f"{format_bytes(kept)} of the written files could not be dropped from the page"
                    " cache: on a tmpfs, files take up memory; put weighin's cache on a disk:"
                    " WEIGHIN_CACHE=/path"
                )
        return found


class Loads:
    """Measures the loads and saves of a run, whose checkpoints it prepares first.

    ``prepared`` has the checkpoints, and ``refused`` the reasons why other checkpoints cannot be
    written, both by the title and the format of the checkpoint that a cell reads.
    """

    def __init__(self, task: Run, needed: Sequence[Planned], progress: Progress) -> None:
        """Prepare the checkpoints of the cells in ``needed``, the isolation, and the test of a worker.

        Raises:
            FormatLimit: none of the checkpoints can be written.
            ConfigError: a cell's limit is too small for the import of torch, or above a limit around.
        """
        self._task, self._progress = task, progress
        self.prepared: dict[_Key, cache.Prepared] = {}
        self.refused: dict[_Key, FormatLimit] = {}
        compile_code()
        select.check_limits_around(task.isolation, [each.cell for each in needed])
        needed = [each for each in needed if not each.skip]
        if any(each.cell.disk for each in needed):
            mount.check(in_container=task.isolation.name == "docker")
        for each in needed:
            if (key := self._key(each)) in self.prepared or key in self.refused:
                continue
            try:
                self.prepared[key] = self._ensure(each, progress.preparing)
            except FormatLimit as error:
                self.refused[key] = error
                continue
            for warning in self.prepared[key].warnings:
                progress.preparing(warning, None)
        if self.refused and not self.prepared:
            raise next(iter(self.refused.values()))
        progress.preparing(f"preparing {task.isolation.name}", None)
        task.prepare(progress)
        if not task.is_probed:
            progress.preparing("importing torch, to measure the memory that the import needs", None)
            able = [each for each in needed if self._key(each) in self.prepared]
            self._check_limits(able, self._probe(self._job(able[0])))
        self.environment = task.environment()

    def take(self, planned: Planned) -> Measured:
        key, cell, task = self._key(planned), planned.cell, self._task
        if refused := self.refused.get(key):
            planned = replace(planned, skip=refused.message)
            return Measured(skipped(planned, self.environment))
        checkpoint, job = self.prepared[key], self._job(planned)
        is_plain = checkpoint.in_place and not planned.strategy.maps_keys
        if is_plain and (keys := checkpoint.manifest().keys):
            why = (
                f"needs {keys}, as from_pretrained does, but {planned.strategy.name} expects the"
                " model's own keys: give another --format, or write a checkpoint with those"
                " keys: weighin convert FOLDER TARGET --keys model"
            )
            return Measured(skipped(replace(planned, skip=why), self.environment))
        model_bytes = checkpoint.manifest().model_bytes(cell.dtype)
        known = self.environment
        if needed := planned.strategy.packages:  # versions are the same in a container as here
            known = known | {"packages": packages.versions(needed)}
        with ExitStack() as opened:
            if cell.operation == "save" or cell.use == SAVE:
                job = replace(job, target=str(opened.enter_context(save_folder(model_bytes))))
            spec = LoadSpec.of(
                job,
                [*formats.files(Path(job.checkpoint)), *files_of(cell.model)],
                model_bytes,
                on_phase=self._progress.phase,
                steady=task.settings.steady,
            )
            measured = measure(task.isolation, spec, known, task.reference_for(cell))
        if measured.changed and checkpoint.in_place:
            trouble = CheckpointError(
                f"{checkpoint.path} changed while {cell.strategy} was measured",
                "restore the checkpoint from a copy, and keep the strategy from writing to it",
            )
            return replace(measured, trouble=measured.trouble or trouble)
        if measured.changed:  # it is generated, so it can be made again
            entries.discard(checkpoint.manifest_path.parent, checkpoint.format)
            self.prepared[key] = self._ensure(planned)
        return measured

    def _key(self, planned: Planned) -> _Key:
        """Return the title and the format of the checkpoint that a cell reads.

        If the load keeps the weights quantised, "with its codes" follows the title. A save reads the
        user's checkpoint in the format that it has, or else a generated checkpoint in the format pt.
        """
        cell = planned.cell
        if cell.operation == "load":
            kept = "" if _loaded_model(planned) is cell.model else " with its codes"
            return f"{cell.model.title}{kept}", cell.format
        own = self._task.settings.checkpoint_of(cell.model)
        return cell.model.title, formats.detect(own).NAME if own else "pt"

    def _ensure(self, planned: Planned, progress: cache.Report | None = None) -> cache.Prepared:
        settings = self._task.settings
        return cache.ensure(
            _loaded_model(planned),
            self._key(planned)[1],
            seed=settings.seed,
            checkpoint=settings.checkpoint_of(planned.cell.model),
            selection=settings.selection,
            progress=progress,
            python_path=self._python_path(planned.cell),
        )

    def _python_path(self, cell: Cell) -> tuple[str, ...]:
        """Return the folders from which a worker imports a cell's builder (the model's function).

        For a builder of weighin, return no folder, so that no module of a user can hide a module of
        weighin.
        """
        is_ours = user_code.is_ours(cell.model.builder)
        return () if is_ours else self._task.settings.python_path

    def _job(self, planned: Planned) -> Job:
        checkpoint, settings = self.prepared[self._key(planned)], self._task.settings
        own = settings.checkpoint_of(planned.cell.model)
        selects = planned.selection and own  # such a strategy reads the user's file, not a copy
        return Job(
            cell=planned.cell,
            checkpoint=str(own if selects else checkpoint.path),
            manifest=str(checkpoint.manifest_path),
            strategy_path=str(planned.strategy.path),
            python_path=self._python_path(planned.cell),
            mounts=settings.mounts,
            timeout_s=settings.timeout_s,
            trace=settings.trace,
            use_path=settings.use_paths.get(planned.cell.use, ""),
        )

    def _probe(self, job: Job) -> Memory:
        """Run a worker without a limit, and return its memory after the imports and before the load.

        The worker also reads torch's libraries into the page cache, so that the first cell's cgroup is
        not charged for them. If the worker fails, the error stops the run before its first record.
        """
        changes: dict[str, Any] = {"ram_limit_bytes": None, "cache": "cold", "operation": "load"}
        changes |= {"ranks": 1, "disk_bytes_per_s": None, "disk_latency_ns": None}
        job = replace(job, cell=replace(job.cell, **changes), timeout_s=_PROBE_TIMEOUT_S)
        isolation = self._task.isolation
        measured = measure(isolation, LoadSpec.of(job, only_baseline=True))
        if measured.trouble:
            raise measured.trouble
        result = measured.result
        if result.baseline:
            return result.baseline
        if result.outcome is Outcome.TIMEOUT:
            raise HarnessError(
                f"`import torch` took longer than {_PROBE_TIMEOUT_S:.0f} s",
                "end other programs on this machine, and run the command again",
            )
        if result.message.startswith(BEFORE_LOAD):
            raise ConfigError(f"nothing can be measured: {result.message}")
        raise HarnessError(
            f"nothing can be measured under --isolation {isolation.name}: {result.message}",
            "weighin doctor tests which isolations work on this machine",
        )

    def _check_limits(self, able: Sequence[Planned], baseline: Memory) -> None:
        """Raise ConfigError if a limit is below ``baseline`` (a rank's memory before loading) x ranks."""
        limits = {(each.cell.ram_limit_bytes, each.cell.ranks) for each in able}
        for limit, ranks in limits.union(self._task.more_limits):
            # File-backed memory does not count, because the kernel can evict it.
            need = (baseline.anon_bytes + baseline.shmem_bytes) * ranks
            if limit is not None and limit < need:
                of_ranks = f" in {ranks} ranks" if ranks > 1 else ""
                raise ConfigError(
                    f"--ram {format_exact(limit)} is less than `import torch` alone needs"
                    f" here{of_ranks} ({format_bytes(need)})",
                    f"give at least {format_bytes(2 * need)} plus the size of the weights",
                )


def _loaded_model(planned: Planned) -> ModelSpec:
    """Return the cell's model; if the load keeps the weights quantised, return the quantised model."""
    model = planned.cell.model
    if not planned.strategy.pretrained or not (found := quantised.of_model(model)) or not found.own:
        return model
    kept = replace(found, dequantises=False, own="")
    return replace(model, kwargs={**model.kwargs, "quantised": kept.as_argument()})


def compile_code() -> None:
    """Compile the modules of weighin and its strategies that have no current bytecode.

    A strategy's imports are part of its load time, and a container cannot write bytecode: every load
    with ``streaming`` would compile for 25 ms.
    """
    for folder in (Path(weighin.__file__).parent, data_folder("strategies")):
        compileall.compile_dir(folder, quiet=2)


@contextmanager
def held(wanted_bytes: int, spare_bytes: int = 0) -> Iterator[int]:
    """Write to fresh memory, keep it until the end of the block, and yield its size in bytes.

    The size is at most ``wanted_bytes``. At least ``spare_bytes`` of memory remain free.

    Some virtual machines report a free page to their host after 2 s (free page reporting, balloons).
    The host must provide a reported page again, so that the page's allocation takes three times as
    long. weighin therefore holds memory until no report is due, and frees the memory as the load
    begins. For 2 s, the load then gets unreported pages. The held memory changes no memory figure of
    the load. To hold memory takes about 0.1 s per GiB, and several times as long for reported pages.
    """
    free = environment.free_ram_bytes() - spare_bytes
    size = min(wanted_bytes, int(free * _LARGEST_SHARE))
    if size <= 0:
        yield 0
        return
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE) as area:
        ask_for_huge_pages(area, 0, size)
        start = ctypes.c_char.from_buffer(area)
        try:
            ctypes.memset(ctypes.addressof(start), 1, size)
        finally:  # also after Ctrl-C: Python refuses to unmap memory that has a pointer into it
            del start
        yield size


@contextmanager
def save_folder(model_bytes: int) -> Iterator[Path]:
    """Create an empty folder in weighin's cache for one save, and remove the folder after the block.

    Raises:
        ConfigError: the disk has no room for the model.
    """
    (root := _saving()).mkdir(parents=True, exist_ok=True)
    needed, free = model_bytes + _SPARE_BYTES, shutil.disk_usage(root).free
    if free < needed:
        raise ConfigError(
            f"a save needs {format_bytes(needed)} in {root}, but only {format_bytes(free)} are free",
            "put the cache on another disk: WEIGHIN_CACHE=/path weighin ...",
        )
    with staging.own_folder(root) as folder:
        yield folder


def remove_leftovers() -> list[str]:
    """Remove what killed runs of loads left on this machine; return one line for each folder."""
    saves = [f"files of a save in {folder}" for folder in staging.remove_orphans(_saving())]
    return saves + mount.remove_stale(entries.slow_disks())


def _saving() -> Path:
    return cache.folder() / "saving"
