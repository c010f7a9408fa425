"""Start a new run: plan its cells and write its folder; or restore a run from its folder.

A plan may name any code, which a restored run would execute with the user's rights. weighin's cache
therefore has the digest of each plan that this user's weighin wrote. Any other plan of commands, or that names
code which is neither part of weighin nor installed, needs --trust.
"""

import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from io import FileIO
from pathlib import Path
from shlex import join
from typing import Final, Literal

from weighin.cell import LATEST, Cell
from weighin.checkpoint import temporary_folders
from weighin.errors import ConfigError, RecordError
from weighin.isolation import select
from weighin.isolation.base import Isolation
from weighin.plan.task import Node, Planned, Run, choose
from weighin.records import run_folder
from weighin.records.run_folder import resume_command, verb_of
from weighin.settings.definition import Settings, read_plan
from weighin.text import one_line, printable
from weighin.units import format_exact

_VALUE_LENGTH: Final = 120
_INTERPRETERS: Final = re.compile(r"(python|pypy|perl|ruby|node|bash|sh)[\d.]*")
_CODE: Final = re.compile(r"-[A-Za-z]*[ceEp]|-|--eval|--print")
"""After one of these options of an interpreter, or in standard input, there is code and no script."""
_WITH_VALUE: Final = re.compile(r"-[A-Za-z]*[WXoOrI]")


def start(
    settings: Settings, folder: Path | None = None, nodes: Sequence[Node] = ()
) -> tuple[Run, str]:
    """Plan a new run, write its plan, and return the run and notes; ``nodes`` measure it, if not this machine."""
    if settings.commands:
        planned, isolation, note = _plan_commands(settings, nodes)
        labels = ["-".join(dict.fromkeys(each.cell.strategy for each in planned))[:60]]
    else:
        from weighin.plan import loads  # imports formats and strategies, which take 0.2 s

        planned, isolation, settings, note = loads.plan(settings, nodes)
        models = {each.cell.model.title: each.cell.model for each in planned}
        labels = [replace(model, kwargs={}).title for model in models.values()]
        labels += ["saving"] * (settings.operation == "save")
    limits = [format_exact(limit) for limit in settings.ram if limit is not None]
    labels += limits if settings.within is None else ["floor"]
    folder = folder or new_folder(labels)
    if not (ours := run_folder.in_shard(planned, settings.shard)):
        why = f"shard {settings.shard}: the plan has only {len(planned)} cells"
        raise ConfigError(why, f"divide the plan into {len(planned)} shards at most")
    cells = [each.cell for each in planned]
    remember(run_folder.write_plan(folder, cells, settings.as_json(), is_new=True))
    return Run(folder, ours, isolation, settings, is_new=True), note


def resume(folder: Path, *, trusted: bool = False, search: bool = False) -> Run:
    """Restore a run, or a search for floors, from its plan, to measure its cells without a record."""
    text, place = run_folder.read_file(folder, run_folder.PLAN), folder / run_folder.PLAN
    found = run_folder.parse_plan(folder, text)
    settings = read_plan(found.settings, found.cells, place)
    commands = {each.name for each in settings.commands}
    for cell in found.cells:
        is_known = cell.strategy in (commands or settings.strategy_paths)
        if not is_known or (cell.operation == "command") != bool(commands):
            what = f"the strategy or command {cell.strategy!r}"
            raise RecordError(f"{place} lacks {what}", "start a new run")
    if not found.cells:
        raise RecordError(f"{place} has no cells", "start a new run")
    again = resume_command(verb_of(vars(settings)), folder)
    if not (trusted or is_ours(text)) and (listed := "; ".join(foreign(found.cells, settings))):
        why = f"{place} names code that is not part of weighin and would run here: {listed}"
        repair = f"read that code; if you trust it: {again} --trust; or start a new run"
        raise ConfigError(why, repair)
    if (settings.within is not None) != search:
        kind = "run that measures no floors" if search else "run of weighin floor"
        raise RecordError(f"{folder} contains a {kind}", f"to resume it: {again}")
    if settings.commands:
        planned = [Planned(cell) for cell in found.cells]
    else:
        from weighin.plan import loads

        planned = loads.restore(found.cells, settings)
    ours = run_folder.in_shard(planned, settings.shard)
    return Run(folder, ours, select.named(found.cells[0].isolation, settings.image), settings)


def _plan_commands(
    settings: Settings, nodes: Sequence[Node]
) -> tuple[list[Planned], Isolation, str]:
    if settings.image and settings.isolation not in ("auto", "docker"):
        raise ConfigError("--image needs --isolation docker", "leave out --isolation or --image")
    if settings.image and any(settings.releases):
        raise ConfigError("--with has no effect in an image", "install the release in the image")
    if LATEST in settings.releases:
        why = "--with latest: weighin cannot tell which package of the command is meant"
        raise ConfigError(why, "name the package, without a release: --with transformers")
    # Else the program is in the image or on another node.
    is_here = not (settings.isolation == "docker" or settings.image or nodes)
    for command in settings.commands:
        program, variables = command.command[0], os.environ | command.environment
        if is_here and shutil.which(program, path=variables.get("PATH")) is None:
            raise ConfigError(
                f"there is no program {program!r}",
                "give a program in PATH, or the path of a program; for a shell's command line: sh -c 'LINE'",
            )
        if not nodes:
            files_in(command.cold)
    isolation, note = choose(settings, nodes)
    cells = (
        Cell.of_command(
            command.name,
            tuple(command.command),
            isolation.name,
            ram_limit_bytes=limit,
            repeat=repeat,
            environment=dict(command.environment),
            cache="cold" if command.cold else "as found",
            releases=choice,
        )
        for repeat in range(settings.repeats)
        for limit in dict.fromkeys(settings.ram)
        for choice in settings.releases
        for command in settings.commands
    )
    return list(map(Planned, cells)), isolation, note


def files_in(paths: Sequence[str]) -> list[Path]:
    """Return each file of ``paths``, and every file below each folder of ``paths``."""
    files: list[Path] = []
    for path in map(Path, paths):
        if not path.exists():
            raise ConfigError(f"--cold {path}: there is no such file or folder", "correct the path")
        found = [path] if path.is_file() else path.rglob("*")
        files += [each for each in found if each.is_file()]
    return files


def label_of(command: Sequence[str]) -> str:
    """Return a short name of a command: "train.py" for ("python", "train.py", "--epochs", "3")."""
    label = Path(command[0]).name
    words = iter(command[1:] if _INTERPRETERS.fullmatch(label) else ())
    for word in words:
        if word == "-m":
            label = next(words, label)
        elif _WITH_VALUE.fullmatch(word):
            next(words, "")
            continue
        elif not word.startswith("-"):
            label = Path(word).name
        elif not _CODE.fullmatch(word):
            continue
        break
    return label


def foreign(cells: Sequence[Cell], settings: Settings) -> list[str]:
    """Return what a plan names that is neither part of weighin nor installed: of a plan of commands, each."""
    address = settings.engine.get("address")  # Ray unpickles, and so runs, what a cluster sends
    found = [("Ray cluster", "" if address == "auto" else address), ("image", settings.image)]
    found += [("packages from the index", cell.releases) for cell in cells]
    if settings.commands:
        found += [("command", join(cell.command)) for cell in cells]
    else:
        # These import formats and strategies, which takes 0.2 s.
        from weighin.stream.hugging_face_folder import code_of
        from weighin.suite import registry

        ours = registry.builders()
        for cell in cells:
            if (builder := cell.model.builder) not in ours:
                kwargs = one_line(json.dumps(cell.model.kwargs, default=str), _VALUE_LENGTH)
                found += [("builder", f"{builder} with {kwargs}")]
                found += [("folder of modules", path) for path in settings.python_path]
            if code := code_of(cell.model):
                found += [("code of the Hugging Face folder", code["folder"])]
            variables = (f"{name}={value}" for name, value in cell.environment.items())
            found += [("environment", one_line(text, _VALUE_LENGTH)) for text in variables]
        verbs = {cell.operation for cell in cells}
        known = {info.path for verb in verbs for info in registry.strategies(verb).values()}
        paths = settings.strategy_paths.values()
        found += [("strategy", path) for path in paths if Path(path).resolve() not in known]
        found += [("use", path) for path in settings.use_paths.values()]
        found += [("mount", path) for path in settings.mounts]
    return list(dict.fromkeys(printable(f"{kind} {what}") for kind, what in found if what))


def remember(plan: bytes) -> None:
    # Without a cache, also of a user without a home, the run can be resumed with --trust.
    with suppress(OSError, ConfigError):
        temporary_folders.folder().mkdir(parents=True, exist_ok=True)
        with _own_plans("a") as file:
            file.write(_digest(plan))


def is_ours(plan: bytes) -> bool:
    """Tell whether this user's weighin wrote the plan, which nobody has changed since."""
    with suppress(OSError, ConfigError), _own_plans("r") as file:
        known = file.read()
        # Only digests, because another user with access to the cache's folder could put a file of
        # ours in the place of this one.
        return _digest(plan) in known and bool(re.fullmatch(rb"[0-9a-f\n]*", known))
    return False


def _digest(plan: bytes) -> bytes:
    return f"{hashlib.sha256(plan).hexdigest()}\n".encode()


def _own_plans(mode: Literal["r", "a"]) -> FileIO:
    """Open the cache's file of digests; raise OSError if others may have written it."""
    careful = os.O_NOFOLLOW | os.O_NONBLOCK
    path = temporary_folders.folder() / "plans.sha256"
    file = FileIO(path, mode, opener=lambda path, flags: os.open(path, flags | careful, 0o600))
    state = os.fstat(file.fileno())
    is_file = stat.S_ISREG(state.st_mode) and state.st_nlink == 1
    if is_file and state.st_uid == os.geteuid() and not state.st_mode & 0o022:
        return file
    file.close()
    raise PermissionError


def new_folder(labels: Sequence[str]) -> Path:
    """Return ``results/TIME-LABELS``, or a folder below a new temporary one if none can be made here."""
    words = [datetime.now().astimezone().strftime("%Y%m%dT%H%M%S")]
    words += [re.sub(r"[^\w.+-]+", "_", label).strip("._-") or "unnamed" for label in labels]
    results, can_write = Path("results"), False
    with suppress(FileNotFoundError):  # the current folder was deleted
        can_write = os.access(results if results.exists() else Path.cwd(), os.W_OK | os.X_OK)
    if not can_write:
        results = Path(tempfile.mkdtemp(prefix=run_folder.TEMPORARY))
    name, number = "-".join(words), 1
    while (folder := results / (f"{name}-{number}" if number > 1 else name)).exists():
        number += 1  # of another run in the same second
    return folder
