"""Start a new run: plan its cells and write its folder; or restore a run from its folder.

A plan may name any code, which a restored run would execute. weighin's cache therefore has the digest
of each plan that this user's weighin wrote. Any other plan that names foreign code needs --trust.
"""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Final

from weighin.checkpoint import entries
from weighin.errors import ConfigError, RecordError
from weighin.isolation import select
from weighin.plan import commands
from weighin.plan.nodes import Node
from weighin.plan.task import Planned, Run
from weighin.records import run_folder
from weighin.records.coverage import resume_command
from weighin.settings import reading
from weighin.settings.definition import Settings
from weighin.units import format_exact

_LABEL_LENGTH: Final = 60  # characters of all commands in the name of a run's folder
_PLANS: Final = "plans"  # the folder of the digests in weighin's cache
_MOST_PLANS: Final = 1_000


def start(
    settings: Settings, folder: Path | None = None, nodes: Sequence[Node] = ()
) -> tuple[Run, str]:
    """Plan a new run, write its plan, and return the run, and notes on models and isolation.

    Without ``folder``, the run's folder is ``results/TIME-LABELS-LIMITS``. ``nodes`` are the machines
    that will measure; without them, this machine measures. If the run cannot start, it raises
    ConfigError, UnknownName, IsolationUnavailable or RecordError.
    """
    if settings.commands:
        planned, isolation, note = commands.plan(settings, nodes)
        names = dict.fromkeys(each.cell.strategy for each in planned)
        labels = ["-".join(names)[:_LABEL_LENGTH]]
    else:
        from weighin.plan import loads  # imports formats and strategies, which take 0.2 s

        planned, isolation, settings, note = loads.plan(settings, nodes)
        models = {each.cell.model.title: each.cell.model for each in planned}
        labels = [replace(model, kwargs={}).title for model in models.values()]
        labels += ["saving"] if settings.operation == "save" else []
    labels += (
        [format_exact(limit) for limit in settings.ram if limit is not None]
        if settings.within is None
        else ["floor"]
    )
    folder = folder or _new_folder(labels)
    if (folder / run_folder.RECORDS).exists():
        raise run_folder.already_there(folder, settings.verb)
    ours = settings.shard.of(planned) if settings.shard else planned
    if not ours:
        raise ConfigError(
            f"--shard {settings.shard}: the plan has only {len(planned)} cells",
            f"divide the plan into {len(planned)} shards at most",
        )
    cells = [each.cell for each in planned]
    remember(run_folder.write_plan(folder, cells, settings.as_json(), is_new=True))
    return Run(folder, ours, isolation, settings, is_new=True), note


def resume(folder: Path, *, trusted: bool = False) -> Run:
    """Restore a run of ``weighin bench`` or ``weighin run``, to measure its cells without a record.

    Raises:
        RecordError: the folder has no run that can be resumed, or a search of ``weighin floor``.
        ConfigError: a file is missing, every cell is skipped, or the plan is not ours and names
            foreign code without ``trusted``.
    """
    run = restore(folder, trusted=trusted)
    if run.settings.within is not None:
        raise RecordError(
            f"{folder} contains a search for floors (weighin floor)",
            f"to resume the search: {resume_command('floor', folder)}",
        )
    return run


def restore(folder: Path, *, trusted: bool = False) -> Run:
    """Restore any run, also a search of ``weighin floor``, from its plan; see ``resume`` for errors."""
    text = run_folder.plan_bytes(folder)
    found = run_folder.parse_plan(folder, text)
    if not found.cells:
        raise RecordError(f"the run in {folder} plans no measurement", "start a new run")
    place = folder / run_folder.PLAN
    settings = reading.read_plan(found.settings, found.cells, place)
    if not (trusted or is_ours(text)):
        from weighin.plan import trust  # imports formats and strategies

        trust.check(
            trust.foreign(found.cells, settings),
            place=place,
            again=resume_command(settings.verb, folder),
        )
    known = {each.name for each in settings.commands} or settings.strategy_paths.keys()
    if lacking := [each.strategy for each in found.cells if each.strategy not in known]:
        what, of = ("command", "") if settings.commands else ("path", " of the strategy")
        raise RecordError(
            f"{place} lacks the {what}{of} {lacking[0]!r}",
            f"start a new run, because this run cannot be resumed without the {what}",
        )
    if settings.commands:
        planned = [Planned(cell) for cell in found.cells]
        commands.check(settings)
    else:
        from weighin.plan import loads

        planned = loads.restore(found.cells, settings)
    name = found.cells[0].isolation
    isolation = select.named(name, settings.image)
    ours = settings.shard.of(planned) if settings.shard else planned
    return Run(folder, ours, isolation, settings)


def remember(plan: bytes) -> None:
    """Note in the cache that this user's weighin wrote the plan; keep the newest notes only."""
    name = hashlib.sha256(plan).hexdigest()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
    # Without a cache, also of a user without a home, the run can be resumed with --trust.
    with suppress(OSError, ConfigError):
        (entries.folder() / _PLANS).mkdir(mode=0o700, parents=True, exist_ok=True)
        with _own_plans() as folder:
            with os.fdopen(os.open(name, flags, 0o600, dir_fd=folder), "w") as file:
                file.write(name)
            with os.scandir(folder) as found:
                by_age = sorted(found, key=lambda entry: entry.stat(follow_symlinks=False).st_mtime)
            for entry in by_age[:-_MOST_PLANS]:
                os.unlink(entry.name, dir_fd=folder)


def is_ours(plan: bytes) -> bool:
    """Tell whether this user's weighin wrote the plan, which nobody has changed since."""
    name = hashlib.sha256(plan).hexdigest()
    with suppress(OSError, ConfigError), _own_plans() as folder:
        place = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
        with os.fdopen(place, "rb") as file:
            # The content, because another user with access to the cache's folder could put a
            # folder of ours in the place of this one.
            return _is_only_ours(place) and file.read(len(name) + 1) == name.encode()
    return False


@contextmanager
def _own_plans() -> Iterator[int]:
    """Yield a descriptor of the cache's folder of digests; raise OSError if others may write there."""
    folder = os.open(entries.folder() / _PLANS, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if not _is_only_ours(folder):
            raise PermissionError
        yield folder
    finally:
        os.close(folder)


def _is_only_ours(place: int) -> bool:
    """Tell whether an open file or folder is this user's, and nobody else may write it."""
    state = os.fstat(place)
    return state.st_uid == os.geteuid() and not state.st_mode & 0o022


def _new_folder(labels: Sequence[str]) -> Path:
    """Return the path of a new run's folder: ``results/TIME-LABELS``, or, where no folder can be made
    here, below a new temporary folder.
    """
    words = [datetime.now().astimezone().strftime("%Y%m%dT%H%M%S")]
    words += [re.sub(r"[^\w.+-]+", "_", label).strip("._-") or "unnamed" for label in labels]
    results = Path("results")
    can_write = False
    with suppress(FileNotFoundError):
        here = results if results.exists() else Path.cwd()  # which may have been deleted
        can_write = os.access(here, os.W_OK | os.X_OK)
    if not can_write:
        results = Path(tempfile.mkdtemp(prefix="weighin-results-"))
    name, number = "-".join(words), 1
    while (folder := results / (f"{name}-{number}" if number > 1 else name)).exists():
        number += 1  # of another run in the same second
    return folder
