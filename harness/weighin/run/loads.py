"""Prepare the checkpoints of a run of loads or saves, and measure each cell of it."""

import compileall
import ctypes
import math
import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from io import FileIO
from pathlib import Path
from typing import Any, Final

import weighin
from weighin import child_process, slow_disk
from weighin.cell import FORK, SAVE, Cell, Job, encode_job, is_of_use
from weighin.checkpoint import cache, temporary_folders
from weighin.checkpoint.child import Report
from weighin.errors import CheckpointError, ConfigError, FormatLimit, HarnessError
from weighin.isolation import visible
from weighin.isolation.base import Isolation, Running, Streams
from weighin.phase_reporter import JOB
from weighin.plan.task import Planned, Progress, Run, skipped
from weighin.probes import environment, page_cache
from weighin.probes.cgroup import grown
from weighin.records import run_folder
from weighin.records.metrics import largest
from weighin.result import UNTIL_READY, Faults, Memory, Outcome, Peaks, Rank, Sample, Use
from weighin.run import releases
from weighin.run.judge import Evidence
from weighin.run.measure import Measured, Spec, Watch, measure
from weighin.settings.definition import Settings
from weighin.slow_disk import LARGEST_READ_BYTES, Mount, Pace
from weighin.stream import formats
from weighin.stream import gguf_files as gguf
from weighin.stream.hugging_face_folder import files_of_adapter, folder_of
from weighin.stream.pretrained_library import TRANSFORMERS, library_of
from weighin.suite import registry, user_code
from weighin.suite.registry import data_folder
from weighin.text import few
from weighin.units import MIB, format_bytes, format_exact
from weighin.worker.phases import BEFORE_LOAD

SETTLED_S = 2.5  # no report of free pages is due if no memory was freed for this time
_SPARE_BYTES: Final = 64 * MIB  # of a save: headers, indexes, the rounding to file system blocks
_PROBE_TIMEOUT_S = 120.0
_SAVING: Final = "saving"  # in the cache's folder

_Key = tuple[str, str, str]
_Place = tuple[str, tuple[str, ...]]


class LoadSpec(Spec):
    """A load, a save or a test's body. With ``only_baseline``, the worker is killed once it has reported its memory before the load."""

    only_baseline = False
    environment: releases.Environment | None = None

    def __init__(
        self,
        job: Job,
        files: Sequence[Path] = (),
        model_bytes: int | None = None,
        settings: Settings | None = None,
    ) -> None:
        super().__init__(job.cell, settings, files)
        self.pace = Pace(job.cell.disk_bytes_per_s, job.cell.disk_latency_ns)
        self.changed: list[Path] = []  # the checkpoint's files that changed meanwhile
        self._job, self._model_bytes = job, model_bytes
        self._states = {file: _state(file) for file in files}
        self._held = ExitStack()
        self._held_bytes: int | None = None
        self._sources_hash: str | None = None
        if not job.body:
            with suppress(OSError):  # the cell itself then fails
                own = [Path(name) for name in (job.strategy_path, job.use_path) if name]
                self._sources_hash = environment.code_digest(*own)

    def enter(self, opened: ExitStack) -> None:
        job, cell = self._job, self.cell
        printed, end = os.pipe()
        self._end = opened.enter_context(FileIO(end, "wb"))
        self.printed = child_process.Tail(printed)
        if self.pace:
            folder = folder_of(Path(job.checkpoint))
            self.disk = Mount(folder, self.pace, temporary_folders.slow_disks())
            opened.callback(self.disk.close)
            inside = self.disk.folder / Path(job.checkpoint).relative_to(folder)
            self._job = replace(job, checkpoint=str(inside))
            self.facts["disk"] = {"means": "fuse", "request_bytes": LARGEST_READ_BYTES}
        if self.settings.steady and self._model_bytes:
            # A strategy of weighin needs at most two copies of the model and its file in the page
            # cache. Leave memory for what the worker needs before its baseline: a save's model, a
            # warm load's file.
            size = self._model_bytes * cell.ranks
            spare = size if cell.operation == "save" or cell.cache == "warm" else 0
            opened.enter_context(self._held)
            self._held_bytes = self._held.enter_context(held(3 * size, spare))
        if self.files:
            self.facts["storage"] = {"file_system": environment.file_system_of(self.files[0])}
            self.facts["read_ahead_bytes"] = environment.read_ahead_bytes(
                Path(self._job.checkpoint)
            )

    def start(self, isolation: Isolation, folder: Path) -> Running:
        job = replace(self._job, parent=0 if isolation.name == "docker" else os.getpid())
        (folder / JOB).touch(0o600)  # the environment may have secrets
        (folder / JOB).write_text(encode_job(job))
        mounts = [*visible.of_job(job), *job.mounts, str(folder)]
        worker = child_process.module("weighin.worker", str(folder))
        if self.environment:
            worker = (self.environment.python, *worker[1:])
            mounts.append(str(self.environment.folder))
        with Path(os.devnull).open("rb") as nothing, self._end as end:
            streams = Streams(nothing.fileno(), end.fileno(), end.fileno())
            self._running = isolation.start(job.cell, worker, job.target, streams, mounts)
        return self._running

    def before_load(self) -> None:
        if self.only_baseline:
            self._running.kill()
        if self._held_bytes is not None:
            time.sleep(SETTLED_S)
            self._held.close()

    def finish(self, seen: Evidence) -> list[str]:
        seen.printed = self.printed.text
        self.changed = [file for file, state in self._states.items() if _state(file) != state]
        if self.changed:
            outcome, who = Outcome.STRATEGY_FAILED, "the strategy"
            if self.cell.isolation == "docker":  # mounts the files read-only
                outcome, who = Outcome.MEASUREMENT_FAILED, "another program"
            what = "changed the checkpoint's files during the measurement"
            seen.changed = outcome, f"{who} {what}: {few([file.name for file in self.changed])}"
        if target := self._job.target:  # else its pages could slow the next cell
            page_cache.drop(path for path in Path(target).rglob("*") if path.is_file())
        return []

    def figures(self, watch: Watch, outcome: Outcome) -> dict[str, Any]:
        ranks, told, seen = watch.ranks, watch.ranks[0].told, watch.seen
        is_whole = outcome is Outcome.OK or all(each.is_done for each in ranks)
        loads = [each.told.load_ns for each in ranks]
        slowest = max(ranks, key=lambda each: math.inf if each.ready_ns is None else each.ready_ns)
        times = ("import_ns", "load_ns", "touch_ns", "first_use_ns", "marks_ns")
        number, private_bytes = watch.sampler.others if watch.sampler else (0, 0)
        warnings = []
        if private_bytes >= 2 * MIB and self.cell.use != FORK:  # a shell takes less
            started, size = f"{number} process{'es' * (number > 1)}", format_bytes(private_bytes)
            warnings.append(
                "peak RSS and anonymous memory are those of the measured process alone; it started"
                f" {started}, with {size} of private memory in all (sampled)"
            )
        of_ranks = []
        for rank, each in enumerate(ranks if len(ranks) > 1 else ()):
            ended, has_samples = seen.exits.get(rank), watch.rank_samples.get(rank)
            of_ranks.append(
                Rank(
                    phase=each.current,
                    load_ns=each.told.load_ns,
                    ready_ns=each.ready_ns,
                    peak_rss_bytes=largest(phase.peak_rss_bytes for phase in each.load_phases),
                    pss_bytes=each.told.pss_bytes,
                    exit_code=0 if each.is_done else ended.shell_code if ended else None,
                    samples_path=run_folder.samples_path(self.cell, rank) if has_samples else None,
                )
            )
        return {
            "last_phase": None if is_whole else ranks[seen.culprit].current,
            "model_bytes": self._model_bytes,
            "baseline": told.baseline,
            "peaks": _peaks(watch),
            "phases": ranks[0].phases,
            "load_ns": None if None in loads else largest(loads),
            "ready_ns": slowest.ready_ns,
            "faults": _faults(watch),
            "touched_bytes_before": self._held_bytes,
            "written": told.written,
            "cost": {name: getattr(slowest.told, name) for name in times},
            "allocator_summary": told.summary,
            "sources_hash": self._sources_hash,
            "warnings": warnings,
            "processes": watch.processes,
            "ranks": tuple(of_ranks),
            "use": _use(watch),
        }


def _peaks(watch: Watch) -> Peaks:
    ranks, sampler = watch.ranks, watch.sampler
    phases = [phase for each in ranks for phase in each.load_phases]
    rss: list[int | None] = [phase.peak_rss_bytes for phase in phases]
    if sampler and not (watch.at_ready or ranks[0].told.outcome):
        # The worker died inside a phase, whose high-water mark only the last sample has.
        rss += sampler.last_peaks_rss_bytes
    # The memory of one rank is not the memory of the cell.
    seen: list[Memory | Sample] = [phase.end for phase in phases if len(ranks) == 1]
    if all(each.told.baseline for each in ranks):
        first_ns = max(each.told.baseline_ns for each in ranks)
        last_ns = max(each.told.ready_at_ns or math.inf for each in ranks)
        seen += [each for each in watch.samples if first_ns <= each.t_ns <= last_ns]
    of_driver = [each.cuda_driver_bytes for each in seen if isinstance(each, Sample)]
    number, private_bytes = sampler.others if sampler else (0, 0)
    pss = [each.told.pss_bytes for each in ranks]
    # The checksums themselves allocate GPU memory.
    on_gpu = [phase for phase in ranks[0].load_phases if phase.name not in UNTIL_READY]
    of_gpu = ("cuda_requested", "cuda_allocated", "cuda_reserved", "pinned")
    has_shared = any(each.shmem_bytes for each in seen)
    unreclaimable = [each.anon_bytes + each.shmem_bytes for each in seen if has_shared]
    return Peaks(
        rss_bytes=largest(rss),
        cgroup_bytes=watch.peak_bytes,
        anon_sampled_bytes=largest(each.anon_bytes for each in seen),
        file_sampled_bytes=largest(each.file_bytes for each in seen),
        unreclaimable_sampled_bytes=largest(unreclaimable),
        cuda_driver_sampled_bytes=largest(of_driver),
        pss_bytes=sum(each or 0 for each in pss) if None not in pss else None,
        others_private_sampled_bytes=private_bytes if number and len(ranks) == 1 else None,
        **{
            f"{one}_bytes": largest(getattr(phase, f"peak_{one}_bytes") for phase in on_gpu)
            for one in of_gpu
        },
    )


def _faults(watch: Watch) -> Faults | None:
    ranks, seen = watch.ranks, list[Sample]()
    phases = [phase for each in ranks for phase in each.load_phases]
    if ranks[0].told.baseline and not watch.at_ready and len(ranks) == 1:
        # The worker died inside a phase, whose page faults only the samples have.
        since_ns = phases[-1].end_ns if phases else ranks[0].told.baseline_ns
        seen = [each for each in watch.samples if each.t_ns >= since_ns]
    minor = sum(phase.minor_faults for phase in phases)
    major = sum(phase.major_faults for phase in phases)
    if seen:
        minor += seen[-1].minor_faults - seen[0].minor_faults
        major += seen[-1].major_faults - seen[0].major_faults
    refaults = grown(watch.at_baseline.refaults, (watch.at_ready or watch.at_end).refaults)
    return Faults(minor, major, refaults) if phases or seen else None


def _use(watch: Watch) -> Use | None:
    told = watch.ranks[0].told
    phases = [phase for phase in watch.ranks[0].phases if is_of_use(phase.name)]
    if not phases or len(watch.ranks) > 1:
        return None
    start_ns, end_ns = phases[0].start_ns, phases[-1].end_ns
    seen = [each.anon_bytes for each in watch.samples if start_ns <= each.t_ns <= end_ns]
    seen += [phase.end.anon_bytes for phase in phases]
    return Use(largest(seen), told.gradients, told.children_private_bytes)


class Loads:
    """Measures the loads and saves of a run; prepares the checkpoints of ``needed``, and tests a worker first."""

    def __init__(self, task: Run, needed: Sequence[Planned], progress: Progress) -> None:
        """FormatLimit: no checkpoint can be written. ConfigError: a limit is too small to import torch."""
        self._task, self._progress = task, progress
        self._checkpoints: dict[_Key, cache.Prepared | FormatLimit] = {}
        self._environments: dict[_Place, releases.Environment | ConfigError] = {}
        compile_code()
        needed = [each for each in needed if not each.skip]
        if any(each.cell.disk for each in needed):
            slow_disk.check(in_container=task.isolation.name == "docker")
        for each in needed:
            if (key := self._key(each)) not in self._checkpoints:
                try:
                    self._checkpoints[key] = prepared = self._ensure(each, progress.preparing)
                    for warning in prepared.warnings:
                        progress.preparing(warning, None)
                except FormatLimit as error:
                    self._checkpoints[key] = error
            if each.cell.releases and (place := self._place(each)) not in self._environments:
                try:
                    self._environments[place] = releases.ensure(*place, progress.preparing)
                except ConfigError as error:
                    self._environments[place] = error
        refused = {k: it for k, it in self._checkpoints.items() if isinstance(it, FormatLimit)}
        if refused and len(refused) == len(self._checkpoints):
            raise next(iter(refused.values()))
        task.prepare()
        if not task.is_probed:
            progress.preparing("importing torch, to measure the memory that the import needs", None)
            self._check_limits([each for each in needed if self._key(each) not in refused])

    def take(self, planned: Planned, known: dict[str, Any]) -> Measured:
        key, cell, task = self._key(planned), planned.cell, self._task
        self._progress.starting(cell)
        if isinstance(checkpoint := self._checkpoints[key], FormatLimit):
            return Measured(skipped(replace(planned, skip=checkpoint.message), known))
        if isinstance(environment := self._environments.get(self._place(planned)), ConfigError):
            return Measured(skipped(replace(planned, skip=environment.message), known))
        manifest = checkpoint.manifest()
        if checkpoint.in_place and manifest.keys and not planned.strategy.maps_keys:
            why = (
                f"needs {manifest.keys}, as from_pretrained does, but {planned.strategy.name} expects"
                " the model's own keys: give another --format, or write a checkpoint with those"
                " keys: weighin convert FOLDER TARGET --keys model"
            )
            return Measured(skipped(replace(planned, skip=why), known))
        job, model_bytes = self._job(planned, checkpoint), manifest.model_bytes(cell.dtype)
        if environment:
            known = known | {"releases": environment.chosen}
            with suppress(HarnessError):  # of quantised weights, whose names no release changes
                own = Path(job.checkpoint)
                stored = registry.model(f"from:{own}")
                found = cache.ensure(stored, cell.format, checkpoint=own, dtype=cell.dtype)
                job = replace(job, files_manifest=str(found.manifest_path))
        elif needed := planned.strategy.packages:  # versions are the same in a container as here
            known = known | {"packages": registry.versions(needed)}
        with ExitStack() as opened:
            if cell.operation == "save" or cell.use == SAVE:
                job = replace(job, target=str(opened.enter_context(save_folder(model_bytes))))
            files = [*formats.files(Path(job.checkpoint)), *files_of_adapter(cell.model)]
            spec = LoadSpec(job, files, model_bytes, task.settings)
            spec.on_phase, spec.environment = self._progress.phase, environment
            measured = measure(task.isolation, spec, known, task.reference_for(cell))
        if spec.changed and checkpoint.in_place:
            trouble = CheckpointError(
                f"{checkpoint.path} changed while {cell.strategy} was measured",
                "restore the checkpoint from a copy, and keep the strategy from writing to it",
            )
            return replace(measured, trouble=measured.trouble or trouble)
        if spec.changed:  # it is generated, so it can be made again
            cache.discard(checkpoint.manifest_path.parent, checkpoint.format)
            self._checkpoints[key] = self._ensure(planned)
        return measured

    def _place(self, planned: Planned) -> _Place:
        """Return the choice of a cell's releases, and the packages that the load needs beside it."""
        cell, needed = planned.cell, planned.strategy.packages
        if library_of(cell.model.builder) is TRANSFORMERS:  # which imports these for some folders
            needed += ("accelerate", *["gguf"] * (cell.format == gguf.NAME))
        return cell.releases, needed

    def _key(self, planned: Planned) -> _Key:
        """Return the model, format and dtype of a cell's checkpoint: of a save, the user's, or a generated pt."""
        cell = planned.cell
        if cell.operation == "load":
            fmt = "pt" if planned.selection and cell.format == "pt_legacy" else cell.format
            return cell.model.title, fmt, cell.dtype
        own = self._task.settings.checkpoint_of(cell.model)
        return cell.model.title, formats.detect(own) if own else "pt", cell.dtype

    def _ensure(self, planned: Planned, progress: Report | None = None) -> cache.Prepared:
        settings = self._task.settings
        return cache.ensure(
            planned.cell.model,
            self._key(planned)[1],
            dtype=planned.cell.dtype,
            seed=settings.seed,
            checkpoint=settings.checkpoint_of(planned.cell.model),
            selection=settings.selection,
            progress=progress,
            python_path=self._python_path(planned.cell),
        )

    def _python_path(self, cell: Cell) -> tuple[str, ...]:
        # None for a builder of weighin, so that no module of a user can hide one of weighin.
        return () if user_code.is_ours(cell.model.builder) else self._task.settings.python_path

    def _job(self, planned: Planned, checkpoint: cache.Prepared) -> Job:
        settings = self._task.settings
        own = settings.checkpoint_of(planned.cell.model)
        selects = planned.selection and own  # such a strategy reads the user's file, not a copy
        return Job(
            cell=planned.cell,
            checkpoint=str(own if selects else checkpoint.path),
            manifest=str(checkpoint.manifest_path),
            strategy_path=str(planned.strategy.path),
            python_path=self._python_path(planned.cell),
            mounts=settings.mounts,
            use_path=settings.use_paths.get(planned.cell.use, ""),
        )

    def _check_limits(self, able: Sequence[Planned]) -> None:
        """Refuse a limit below what all ranks take before a load, as a worker without a limit shows."""
        # Its import also reads torch's libraries into the page cache, which the first cell would be charged for.
        checkpoint, isolation = self._checkpoints[self._key(able[0])], self._task.isolation
        assert isinstance(checkpoint, cache.Prepared)
        job = self._job(able[0], checkpoint)
        changes: dict[str, Any] = {"ram_limit_bytes": None, "cache": "cold", "operation": "load"}
        changes |= {"ranks": 1, "disk_bytes_per_s": None, "disk_latency_ns": None}
        job = replace(job, cell=replace(job.cell, **changes))
        settings = Settings().model_copy(update={"timeout_s": _PROBE_TIMEOUT_S})
        spec = LoadSpec(job, settings=settings)
        spec.only_baseline = True
        measured = measure(isolation, spec)
        if measured.trouble:
            raise measured.trouble
        result = measured.result
        if not (baseline := result.baseline):
            if result.message.startswith(BEFORE_LOAD):
                raise ConfigError(f"nothing can be measured: {result.message}")
            raise HarnessError(
                f"nothing can be measured under --isolation {isolation.name}: {result.message}",
                "weighin doctor tests which isolations work on this machine",
            )
        limits = {(each.cell.ram_limit_bytes, each.cell.ranks) for each in able}
        for limit, ranks in limits.union(self._task.more_limits):
            # File-backed memory does not count, because the kernel can evict it.
            need = (baseline.anon_bytes + baseline.shmem_bytes) * ranks
            if limit is not None and limit < need:
                least, given = format_bytes(need), format_exact(limit)
                raise ConfigError(
                    f"--ram {given} is less than `import torch` alone needs here ({least})",
                    f"give at least {format_bytes(2 * need)} plus the size of the weights",
                )


def compile_code() -> None:
    """Compile weighin and its strategies, else each load in a container would compile for 25 ms."""
    for folder in (Path(weighin.__file__).parent, data_folder("strategies")):
        compileall.compile_dir(folder, quiet=2)


@contextmanager
def held(wanted_bytes: int, spare_bytes: int = 0) -> Iterator[int]:
    """Hold fresh memory in the block: ``wanted_bytes``, or less, so that ``spare_bytes`` remain. It changes no figure
    of memory. Some virtual machines report to their host each page that was free for 2 s, and then take three
    times as long to provide it. Memory held until no report is due, and freed as the load begins, is not
    reported.
    """
    free_bytes = environment.free_ram_bytes() - spare_bytes
    size = min(wanted_bytes, int(free_bytes * 0.8))  # more could evict pages of others
    if size <= 0:
        yield 0
        return
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE) as area:
        # Only free huge pages are reported to the host, and ``streaming`` takes such.
        page_cache.ask_for_huge_pages(area, 0, size)
        # Keep no object that points into the memory: after Ctrl-C, Python would refuse to unmap it.
        ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(area)), 1, size)
        yield size


@contextmanager
def save_folder(model_bytes: int) -> Iterator[Path]:
    """Create an empty folder in weighin's cache for one save, and remove it after the block."""
    (root := temporary_folders.folder() / _SAVING).mkdir(parents=True, exist_ok=True)
    repair = "put the cache on another disk: WEIGHIN_CACHE=/path weighin ..."
    temporary_folders.check_space(root, "a save", model_bytes + _SPARE_BYTES, repair)
    with temporary_folders.own_folder(root) as folder:
        yield folder


def remove_leftovers() -> list[str]:
    saves = temporary_folders.remove_orphans(temporary_folders.folder() / _SAVING)
    disks = slow_disk.remove_stale(temporary_folders.slow_disks())
    return [f"files of a save in {folder}" for folder in saves] + disks


def _state(file: Path) -> tuple[int, int, int, int] | None:
    """Return a file's size, times and inode, which show any change; None for a missing file."""
    with suppress(OSError):
        state = file.stat()
        return state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino
    return None
