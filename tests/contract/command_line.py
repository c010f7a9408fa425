"""weighin as tests of this folder reach it: here, and only here, they name what lies inside of it."""

import io
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import click
from warm_children import Forks

from weighin import child_process
from weighin.cell import Cell, ModelSpec
from weighin.checkpoint import cache
from weighin.cli import app
from weighin.plan import loads
from weighin.plan.start import start
from weighin.plan.task import Node
from weighin.records import run_folder
from weighin.records.series import name_of
from weighin.settings.definition import COMMANDS, read_suite
from weighin.suite import chosen_models, registry

_FIXED: Final = {
    "COLUMNS": "100",
    "DOCKER_HOST": "unix:///nowhere/docker.sock",
    "LINES": "40",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "WEIGHIN_DELEGATED": "1",  # else weighin could replace this process by one in a scope of systemd
}
_UNSET: Final = (
    "FORCE_COLOR", "GITHUB_STEP_SUMMARY", "WEIGHIN_PHASES", "XDG_CACHE_HOME",
)  # fmt: skip


_ANY: Final = Node("any", "any", 2**60, 2**60, {"docker": "", "cgroup": "", "process": ""})
"""A machine with all RAM and cgroups, on which commands are planned and not run."""


class Ended(NamedTuple):
    """The exit code of a command, and what it and its children wrote."""

    code: int
    out: str
    err: str


def weighin(*arguments: str | Path, **variables: str) -> Ended:
    """Run ``weighin ARGUMENTS`` in this process, in the current folder, with an empty standard input."""
    words = ["weighin", *map(str, arguments)]
    with _environment(variables), _captured() as texts, patch.object(sys, "argv", words):
        try:
            app.main()
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int)
    return Ended(code, *texts)


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    with patch.dict(os.environ, _FIXED | variables):
        for name in {*_UNSET} - {*variables}:
            os.environ.pop(name, None)
        yield


@contextmanager
def _captured() -> Iterator[list[str]]:
    """Yield a list that has the texts of both outputs, of children too, when the context has ended."""
    texts: list[str] = []
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile()) for _ in range(2)]
        given = stack.enter_context(Path(os.devnull).open(encoding="utf-8"))
        for number, file in enumerate((given, *files)):
            stack.callback(os.close, kept := os.dup(number))
            stack.callback(os.dup2, kept, number)
            os.dup2(file.fileno(), number)
        streams = [io.TextIOWrapper(io.FileIO(n, "w", closefd=False), "utf-8", write_through=True) for n in (1, 2)]  # fmt: skip
        for name, stream in zip(("stdin", "stdout", "stderr"), (given, *streams), strict=True):
            stack.enter_context(patch.object(sys, name, stream))
        yield texts
        for file, stream in zip(files, streams, strict=True):
            stream.flush()
            file.seek(0)
            texts.append(file.read().decode())


def verbs() -> dict[str, click.Command]:
    """Return the command ``weighin`` and its verbs, by what is typed: "weighin", "weighin bench"."""
    found: dict[str, click.Command] = {"weighin": app.app}
    for name, verb in app.app.commands.items():
        found[f"weighin {name}"] = verb
        if isinstance(verb, click.Group):
            found |= {f"weighin {name} {inner}": each for inner, each in verb.commands.items()}
    return found


class Identity(NamedTuple):
    """A cell: the name of its files and of its line in a baseline, without the repeat."""

    files: str
    series: str


def _identities(cells: Iterable[Cell]) -> list[Identity]:
    return list(dict.fromkeys(Identity(cell.series, name_of(cell)) for cell in cells))


def recorded(run: Path) -> list[Identity]:
    """Return the cells that a run's records have."""
    return _identities(result.cell for result in run_folder.read(run).results)


def planned(suite: Path, folder: Path) -> list[Identity]:
    """Return the cells of a suite, in containers unless the suite names an isolation."""
    if "commands:" in suite.read_text():
        start(read_suite(suite, COMMANDS), folder, [_ANY])
        return _identities(run_folder.read_plan(folder).cells)
    content = read_suite(suite)
    chosen = chosen_models.choose(content)
    cells = loads.cells_of(
        content,
        chosen.specs,
        registry.chosen(content, chosen.own_format),
        "docker" if content.isolation == "auto" else content.isolation,
        dtypes=chosen.dtypes,
        own_formats=chosen.own_formats,
    )
    return _identities(each.cell for each in cells)


class Checkpoint(NamedTuple):
    """A checkpoint in the cache, whether it was made anew, and what weighin said about that."""

    path: Path
    made: bool
    said: list[str]


def checkpoint(
    builder: str, kwargs: dict[str, Any], fmt: str, folder: Path, **choices: Any
) -> Checkpoint:
    """Return what a load of this model would read, with ``folder`` as the cache."""
    said: list[str] = []
    spec = ModelSpec(builder.rpartition(":")[2], builder, kwargs)
    with _environment({"WEIGHIN_CACHE": str(folder)}):
        found = cache.ensure(spec, fmt, progress=lambda text, _: said.append(text), **choices)
    return Checkpoint(found.path, found.made, [*dict.fromkeys(said), *found.warnings])


@contextmanager
def warm_children() -> Iterator[None]:
    """Let processes that prepare checkpoints start with torch imported, which saves seconds each."""
    preloaded = [f"weighin.checkpoint.{name}" for name in ("convert", "generate", "index")]
    with (
        closing(Forks("weighin.checkpoint", preloaded=["torch", *preloaded])) as forks,
        patch.object(child_process, "module", forks.command),
    ):
        yield
