"""All that the tests of this folder reach of weighin's inside; elsewhere they know its commands and files.

Commands run inside this process. A machine, predictions and a search for a floor stand in the place of
those that take minutes.
"""

import io
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, chdir, closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

import click
from factories import read_suite
from warm_children import Forks

from weighin import __version__, child_process, doctor
from weighin.cell import Cell, ModelSpec
from weighin.checkpoint import cache as checkpoints
from weighin.cli import app
from weighin.doctor import Capability
from weighin.plan import loads
from weighin.plan import start as plans
from weighin.plan.start import start
from weighin.plan.task import Node, Run
from weighin.predict import client
from weighin.predict.prediction import Prediction, from_json
from weighin.probes import environment
from weighin.recommend import answer
from weighin.records import run_folder
from weighin.records.series import name_of
from weighin.run import runner
from weighin.settings.definition import COMMANDS
from weighin.show import write
from weighin.suite import chosen_models, registry

ROOT: Final = Path(__file__).parents[2]
PUBLISHED: Final = ROOT / "results" / "published"
RUNS: Final = sorted(one.parent.name for one in PUBLISHED.glob("*/records.jsonl"))
SNAPSHOTS: Final = Path(__file__).with_name("snapshots")
_KEPT: Final = Path(__file__).with_name("predictions.json")
_ELSEWHERE_MISSING: Final = ("pressure", "limit_events", "watcher", "written", "ran", "stopped")
"""Parts of a record that a kernel or an isolation may not give."""
_FIXED: Final = {
    "COLUMNS": "100",
    "DOCKER_HOST": "unix:///nowhere/docker.sock",
    "LINES": "40",
    "NO_COLOR": "1",
    "TERM": "dumb",
    "WEIGHIN_DELEGATED": "1",  # else weighin could replace this process by one in a scope of systemd
}
_UNSET: Final = ("FORCE_COLOR", "GITHUB_STEP_SUMMARY", "WEIGHIN_PHASES", "XDG_CACHE_HOME")

_ANY: Final = Node("any", "any", 2**60, 2**60, {"docker": "", "cgroup": "", "process": ""})
"""A machine with all RAM and cgroups, on which commands are planned and not run."""


class Ended(NamedTuple):
    """The exit code of a command, and what it and its children wrote."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


def weighin(folder: Path, *arguments: str, **variables: str) -> Ended:
    """Type a command in ``folder``, in a terminal of 120 columns, as every machine and version answers it."""
    around = {"COLUMNS": "120", "WEIGHIN_CACHE": f"{folder}/cache"}
    with chdir(folder):
        code, out, err = typed(*arguments, **(around | variables))
    return Ended(code, plain(out, folder), plain(err, folder))


def plain(text: str, folder: Path) -> str:
    """Return a text without the places of this machine, and without this version of weighin."""
    places = {str(folder): "HERE", str(ROOT): "CHECKOUT", str(Path.home()): "HOME"}
    for place, name in sorted(places.items(), key=lambda one: -len(one[0])):
        text = re.sub(rf"(?<![\w/]){re.escape(place)}(?=/|\W|$)", name, text)
    return text.replace(f"weighin {__version__}", "weighin VERSION")


def typed(*arguments: str | Path, **variables: str) -> Ended:
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


def flat(data: Any) -> str:
    """Return JSON with one line for each entry of a list, so that a difference is short."""
    if isinstance(data, list):
        return "".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in data)
    parts = []
    for key, value in data.items():
        if value and isinstance(value, list):
            parts.append(f"{key}:\n" + "".join(f"  {line}\n" for line in flat(value).splitlines()))
        else:
            parts.append(f"{key}: {json.dumps(value, ensure_ascii=False)}\n")
    return "".join(parts)


def outline(data: Any, kept: Iterable[str], key: str = "") -> Any:
    """Return data with only the texts and numbers of the keys ``kept``: others differ between machines."""
    if isinstance(data, dict) and key not in _ELSEWHERE_MISSING:
        return {name: outline(one, kept, name) for name, one in data.items()}
    if isinstance(data, list) and data and isinstance(data[0], dict):
        return [outline(data[0], kept)]
    return data if key in kept and not isinstance(data, dict) else "..."


def published(name: str, folder: Path, copy: str = "") -> str:
    """Copy the records of a published run into ``folder``; return the name of the copy."""
    target = folder / (copy or name)
    target.mkdir()
    shutil.copy(PUBLISHED / name / "records.jsonl", target)
    return target.name


def changed(run: Path, change: Callable[[dict[str, Any]], dict[str, Any] | None]) -> None:
    """Write each record of a run as ``change`` returns it, or leave it out."""
    file = run / "records.jsonl"
    records = [change(json.loads(line)) for line in file.read_text().splitlines()]
    file.write_text("".join(f"{json.dumps(one)}\n" for one in records if one))


@contextmanager
def machine_of(run: str) -> Iterator[None]:
    """Let ``weighin recommend`` be on the machine of a published run, and predict as it did there."""
    first = (PUBLISHED / run / "records.jsonl").read_text().partition("\n")[0]
    there = json.loads(first)["environment"]
    with (
        patch.object(environment, "machine", lambda: there),
        patch.object(os, "cpu_count", lambda: there["cpus"]),
        patch.object(answer, "predict", _predict),
    ):
        yield


def predicting() -> AbstractContextManager[object]:
    """Let ``weighin predict`` assume a disk from which the kernel reads 8 MiB ahead."""
    return patch.object(client, "read_ahead_bytes", lambda _: 8 * 2**20)


def _predict(planned: Sequence[Any], **_: Any) -> list[Prediction]:
    """Return what ``weighin predict --json`` gave for each strategy: by model, dtype and device."""
    cells = [one.cell for one in planned]
    known = json.loads(_KEPT.read_text())[
        f"{cells[0].model.title} {cells[0].dtype} {cells[0].device}"
    ]
    return [from_json(cell, {**known[f"{cell.strategy} {cell.format}"]}) for cell in cells]


@contextmanager
def found_floors(run: str) -> Iterator[None]:
    """Let ``weighin floor`` find at once what a published search found, and draw no pictures of it."""

    def start_at_once(_: Any, folder: Path, *_nodes: Any) -> tuple[Any, str]:
        return Run(folder, [], None), ""  # type: ignore[arg-type]

    def search(task: Run, _: Any) -> Any:
        published(run, task.folder.parent, task.folder.name)
        return list(run_folder.read(task.folder).results)

    with (
        patch.object(plans, "start", start_at_once),
        patch.object(runner, "search", search),
        patch.object(write, "draw", lambda *_: ()),
    ):
        yield


def examined() -> AbstractContextManager[object]:
    """Let ``weighin doctor`` find one capability of each kind, whatever this machine has."""
    found = (
        Capability("isolation docker", "no", "no Docker engine answers"),
        Capability("isolation cgroup enforces a limit", "yes", "a probe was killed"),
        Capability("soft limit (ram_high)", "partly", "cgroup v1 has no memory.high"),
    )
    return patch.object(doctor, "examine", lambda: found)


class Identity(NamedTuple):
    """A cell: the name of its files and of its line in a baseline, without the repeat."""

    files: str
    series: str


def _identities(cells: Iterable[Cell]) -> list[Identity]:
    return list(dict.fromkeys(Identity(cell.series, name_of(cell)) for cell in cells))


def recorded(run: Path) -> list[Identity]:
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
        found = checkpoints.ensure(spec, fmt, progress=lambda text, _: said.append(text), **choices)
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
