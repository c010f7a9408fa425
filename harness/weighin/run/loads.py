"""Prepare the checkpoints of a run of loads or saves, and measure each cell of it."""

import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from weighin import formats
from weighin.cell import Cell, Job, ModelSpec
from weighin.checkpoint import cache, entries
from weighin.checkpoint.entries import discard
from weighin.child_process import last_line
from weighin.disk import mount
from weighin.disk.mount import Mount
from weighin.disk.passthrough import LARGEST_READ_BYTES, Pace
from weighin.errors import CheckpointError, ConfigError, FormatLimit, HarnessError
from weighin.formats import quantised
from weighin.formats.lora import files_of
from weighin.formats.pretrained_folder import folder_of
from weighin.isolation import select
from weighin.isolation.base import Isolation, Running
from weighin.plan.task import Planned, Progress, Run, skipped
from weighin.probes import mounts
from weighin.probes.cgroup import Counters
from weighin.probes.environment import code_digest
from weighin.result import Memory
from weighin.run import interrupts, page_preconditioning, save_target
from weighin.run.bytecode import compile_code
from weighin.run.listener import Listener, Track
from weighin.run.measure import Measured, measure, own_folder
from weighin.run.messages import Baseline, End, Failed, Message
from weighin.run.spec import Spec
from weighin.suite import packages, user_code
from weighin.text import one_line
from weighin.units import format_bytes, format_exact
from weighin.uses import SAVE

_PROBE_TIMEOUT_S = 120.0
_PAUSE_S = 0.02


@dataclass(slots=True)
class LoadSpec(Spec):
    """A load, a save or a test's body.

    If the cell's cache is "warm", the worker reads the files again before the load, so that the kernel
    charges their pages to the cell's own cgroup.

    Attributes:
        steady: whether weighin writes to free memory before the load (``page_preconditioning``).
        stall_from_bytes: the file offset behind which a slow disk never answers a read; None if the
            disk answers all reads.
    """

    steady: bool = False
    stall_from_bytes: int | None = None
    _held: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def of(
        cls, job: Job, files: Sequence[Path] = (), model_bytes: int | None = None, **options: Any
    ) -> "LoadSpec":
        """Return the spec of a job; ``files`` are the checkpoint's, by their paths on this machine."""
        return cls(
            job.cell,
            files,
            job,
            timeout_s=job.timeout_s,
            model_bytes=model_bytes,
            **options,
        )

    @property
    def _job(self) -> Job:
        assert self.job
        return self.job

    def sources_hash(self) -> str | None:
        job = self._job
        if not job.body:
            with suppress(OSError):  # the cell itself then fails
                own = [Path(name) for name in (job.strategy_path, job.use_path) if name]
                return code_digest(*own)
        return None

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
            held = page_preconditioning.held(3 * size, spare)
            self.touched_bytes = self._held.enter_context(held)
        if self.files:
            self.facts["storage"] = asdict(mounts.describe(self.files[0]))
            self.facts["read_ahead_bytes"] = mounts.read_ahead_bytes(Path(job.checkpoint))

    def start(self, isolation: Isolation, listener: Path) -> Running:
        job = self._job
        mounts = (*job.mounts, str(listener.parent))
        return isolation.start(replace(job, listener=str(listener), mounts=mounts))

    def finish(self) -> list[str]:
        return save_target.doubts(Path(self._job.target)) if self._job.target else []

    def before_load(self) -> None:
        if self.touched_bytes is not None:
            page_preconditioning.give_back(self._held)

    def doubts_of_cache(self, cached_bytes: int | None) -> list[str]:
        if cached_bytes is None:
            return [
                "weighin cannot tell whether the checkpoint was dropped from the page cache: Linux"
                " reports cached pages only to a user who owns the files or may write them"
            ]
        if cached_bytes:
            left = format_bytes(cached_bytes)
            return [f"{left} of the checkpoint could not be dropped from the page cache"]
        return []


@dataclass(frozen=True, slots=True)
class Loads:
    """The checkpoints and settings that all loads and saves of a run share.

    ``prepared`` has the checkpoints, and ``refused`` the reasons why other checkpoints cannot be
    written. The keys of both are results of ``_checkpoint_key``.
    """

    task: Run
    environment: dict[str, Any]
    progress: Progress
    prepared: dict[tuple[str, str], cache.Prepared]
    refused: dict[tuple[str, str], str]

    def take(self, planned: Planned) -> Measured:
        """Measure one cell."""
        key = _checkpoint_key(self.task, planned)
        if why := self.refused.get(key) or self._unmet_keys(planned, key):
            return Measured(skipped(replace(planned, skip=why), self.environment))
        job, cell = _job(self.task, planned, self.prepared), planned.cell
        model_bytes = self.prepared[key].manifest().model_bytes(cell.dtype)
        environment, needed = self.environment, planned.strategy.packages
        if needed:  # their versions are the same in a container as here
            environment = environment | {"packages": packages.versions(needed)}
        with ExitStack() as opened:
            if cell.operation == "save" or cell.use == SAVE:
                folder = opened.enter_context(save_target.target(model_bytes))
                job = replace(job, target=str(folder))
            spec = LoadSpec.of(
                job,
                [*formats.files(Path(job.checkpoint)), *files_of(cell.model)],
                model_bytes,
                on_phase=self.progress.phase,
                steady=self.task.settings.steady,
            )
            reference = self.task.reference_for(cell)
            measured = measure(self.task.isolation, spec, environment, reference)
        return self._restored(measured, planned, key) if measured.changed else measured

    def _unmet_keys(self, planned: Planned, key: tuple[str, str]) -> str:
        """Return why the keys of a user's checkpoint do not fit the strategy; empty if they fit."""
        checkpoint = self.prepared[key]
        if not checkpoint.in_place or planned.strategy.maps_keys:
            return ""
        if not (keys := checkpoint.manifest().keys):
            return ""
        return (
            f"needs {keys}, as from_pretrained does, but {planned.strategy.name} expects the"
            " model's own keys: give another --format, or write a checkpoint with those keys:"
            " weighin convert FOLDER TARGET --keys model"
        )

    def _restored(self, measured: Measured, planned: Planned, key: tuple[str, str]) -> Measured:
        """Generate anew the checkpoint that a cell has changed; if it is the user's own checkpoint,
        add an error that stops the run.
        """
        checkpoint = self.prepared[key]
        if checkpoint.in_place:
            cell = measured.result.cell
            trouble = CheckpointError(
                f"{checkpoint.path} changed while {cell.strategy} was measured",
                "restore the checkpoint from a copy, and keep the strategy from writing to it",
            )
            return replace(measured, trouble=measured.trouble or trouble)
        discard(checkpoint.manifest_path.parent, checkpoint.format)
        self.prepared[key] = _ensure(self.task, planned, key[1])
        return measured


def set_up(task: Run, needed: Sequence[Planned], progress: Progress) -> Loads:
    compile_code()
    select.check_limits_around(task.isolation, [each.cell for each in needed])
    if any(each.cell.disk and not each.skip for each in needed):
        mount.check(in_container=task.isolation.name == "docker")
    prepared, refused = _prepare_checkpoints(task, needed, progress)
    needed = [each for each in needed if _checkpoint_key(task, each) not in refused]
    progress.preparing(f"preparing {task.isolation.name}", None)
    task.prepare(progress)
    needed = [each for each in needed if not each.skip]
    if not task.is_probed:
        progress.preparing("importing torch, to measure the memory that the import needs", None)
        limits = {(each.cell.ram_limit_bytes, each.cell.ranks) for each in needed}
        _check_limits(limits.union(task.more_limits), _probe(task, _job(task, needed[0], prepared)))
    return Loads(task, task.environment(), progress, prepared, refused)


def _prepare_checkpoints(
    task: Run, planned: Sequence[Planned], progress: Progress
) -> tuple[dict[tuple[str, str], cache.Prepared], dict[tuple[str, str], str]]:
    """Find or generate the checkpoint of every cell that is not skipped.

    Returns:
        the checkpoints, and the reasons why others cannot be written, both by ``_checkpoint_key``.

    Raises:
        FormatLimit: none of the checkpoints can be written.
    """
    prepared: dict[tuple[str, str], cache.Prepared] = {}
    refused: dict[tuple[str, str], FormatLimit] = {}
    for each in planned:
        key = _checkpoint_key(task, each)
        if each.skip or key in prepared or key in refused:
            continue
        try:
            prepared[key] = _ensure(task, each, key[1], progress.preparing)
        except FormatLimit as error:
            refused[key] = error
            continue
        for warning in prepared[key].warnings:
            progress.preparing(warning, None)
    if refused and not prepared:
        raise next(iter(refused.values()))
    return prepared, {key: error.message for key, error in refused.items()}


def _ensure(
    task: Run, planned: Planned, fmt: str, progress: cache.Report | None = None
) -> cache.Prepared:
    return cache.ensure(
        _loaded_model(planned),
        fmt,
        seed=task.settings.seed,
        checkpoint=task.settings.checkpoint_of(planned.cell.model),
        selection=task.settings.selection,
        progress=progress,
        python_path=_python_path(task, planned.cell),
    )


def _loaded_model(planned: Planned) -> ModelSpec:
    """Return the cell's model; if the load keeps the weights quantised, return the quantised model."""
    model = planned.cell.model
    if not planned.strategy.pretrained or not (found := quantised.of_model(model)) or not found.own:
        return model
    kept = replace(found, dequantises=False, own="")
    return replace(model, kwargs={**model.kwargs, "quantised": kept.as_argument()})


def _job(task: Run, planned: Planned, prepared: dict[tuple[str, str], cache.Prepared]) -> Job:
    checkpoint = prepared[_checkpoint_key(task, planned)]
    own = task.settings.checkpoint_of(planned.cell.model)
    selects = planned.selection and own  # such a strategy reads the user's file, not a cached copy
    return Job(
        cell=planned.cell,
        checkpoint=str(own if selects else checkpoint.path),
        manifest=str(checkpoint.manifest_path),
        strategy_path=str(planned.strategy.path),
        python_path=_python_path(task, planned.cell),
        mounts=task.settings.mounts,
        timeout_s=task.settings.timeout_s,
        trace=task.settings.trace,
        use_path=task.settings.use_paths.get(planned.cell.use, ""),
    )


def _python_path(task: Run, cell: Cell) -> tuple[str, ...]:
    """Return the folders from which a worker imports a cell's builder (the model's function).

    For a builder of weighin, return no folder, so that no module of a user can hide a module of
    weighin.
    """
    return () if user_code.is_ours(cell.model.builder) else task.settings.python_path


def _probe(task: Run, job: Job) -> Memory:
    """Run a worker without a limit, and return its memory after the imports and before the load.

    The worker also reads torch's libraries into the page cache, so that the first cell's cgroup is
    not charged for them. If the worker fails, the error stops the run before its first record.
    """
    cell = replace(job.cell, ram_limit_bytes=None, cache="cold", operation="load", ranks=1)
    spec = LoadSpec.of(replace(job, cell=cell))
    found, is_over = list[Memory](), threading.Event()
    failures: list[str] = []

    def take(_track: Track, message: Message | End) -> None:
        if isinstance(message, Baseline):
            found.append(message.memory)
        if isinstance(message, Failed):
            failures.append(message.message)
        if found or failures:
            is_over.set()

    deadline = time.monotonic() + _PROBE_TIMEOUT_S
    with (
        own_folder() as folder,
        closing(Listener(folder)) as listener,
        interrupts.put_off(),
        closing(spec.start(task.isolation, listener.path)) as running,
    ):
        listener.watch(take, Counters)
        while not is_over.is_set():
            if time.monotonic() >= deadline:
                raise HarnessError(
                    f"`import torch` took longer than {_PROBE_TIMEOUT_S:.0f} s",
                    "end other programs on this machine, and run the command again",
                )
            with interrupts.allowed():
                if running.wait(_PAUSE_S):
                    running.reap()  # reads the rest of what it printed
                    listener.close()  # takes the last messages
                    break
        if found:
            return found[0]
        if failures:
            raise ConfigError(f"nothing can be measured: {failures[0]}")
        said = last_line(running.channel.stderr_tail) if running.channel else ""
    raise HarnessError(
        f"a process under --isolation {task.isolation.name} ended before it had imported torch"
        + (f": {one_line(said)}" if said else ""),
        "weighin doctor tests which isolations work on this machine",
    )


def _check_limits(limits: Iterable[tuple[int | None, int]], baseline: Memory) -> None:
    """Raise ConfigError if a limit is below ``baseline`` (a rank's memory before loading) x ranks."""
    for limit, ranks in limits:
        # File-backed memory does not count, because the kernel can evict it.
        need = (baseline.anon_bytes + baseline.shmem_bytes) * ranks
        if limit is not None and limit < need:
            of_ranks = f" in {ranks} ranks" if ranks > 1 else ""
            raise ConfigError(
                f"--ram {format_exact(limit)} is less than `import torch` alone needs here{of_ranks}"
                f" ({format_bytes(need)})",
                f"give at least {format_bytes(2 * need)} plus the size of the weights",
            )


def _checkpoint_key(task: Run, planned: Planned) -> tuple[str, str]:
    """Return the title and the format of the checkpoint that a cell reads.

    If the load keeps the weights quantised, "with its codes" follows the title. A save reads the
    user's checkpoint in the format that it has, or else a generated checkpoint in the format pt.
    """
    cell = planned.cell
    if cell.operation == "load":
        kept = "" if _loaded_model(planned) is cell.model else " with its codes"
        return f"{cell.model.title}{kept}", cell.format
    own = task.settings.checkpoint_of(cell.model)
    return cell.model.title, formats.detect(own).NAME if own else "pt"
