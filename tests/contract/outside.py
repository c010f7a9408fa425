"""Commands of weighin inside this process, their output without what differs between machines.

The tests of this folder know weighin by its commands and files. What they need of its inside is here:
a machine, predictions and a search for a floor in the place of those that take minutes.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

import command_line
import pytest

from weighin import __version__, doctor
from weighin.doctor import Capability
from weighin.plan import start as plans
from weighin.plan.task import Run
from weighin.predict import client
from weighin.predict.prediction import Prediction, from_json
from weighin.probes import environment
from weighin.recommend import answer
from weighin.records import run_folder
from weighin.run import runner
from weighin.show import write

ROOT: Final = Path(__file__).parents[2]
PUBLISHED: Final = ROOT / "results" / "published"
RUNS: Final = sorted(one.parent.name for one in PUBLISHED.glob("*/records.jsonl"))
SNAPSHOTS: Final = Path(__file__).with_name("snapshots")
_KEPT: Final = Path(__file__).with_name("predictions.json")
_ELSEWHERE_MISSING: Final = ("pressure", "limit_events", "watcher", "written", "ran", "stopped")
"""Parts of a record that a kernel or an isolation may not give."""


@dataclass(frozen=True, slots=True)
class Printed:
    """How a command ended, and what it printed."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


def weighin(folder: Path, *arguments: str, **variables: str) -> Printed:
    """Type a command in ``folder``, in a terminal of 120 columns without colours."""
    around = {"COLUMNS": "120", "WEIGHIN_CACHE": f"{folder}/cache"}
    with chdir(folder):
        ended = command_line.weighin(*arguments, **(around | variables))
    return Printed(ended.code, plain(ended.out, folder), plain(ended.err, folder))


def plain(text: str, folder: Path) -> str:
    """Return a text without the places of this machine, and without this version of weighin."""
    places = {str(folder): "HERE", str(ROOT): "CHECKOUT", str(Path.home()): "HOME"}
    for place, name in sorted(places.items(), key=lambda one: -len(one[0])):
        text = re.sub(rf"(?<![\w/]){re.escape(place)}(?=/|\W|$)", name, text)
    return text.replace(f"weighin {__version__}", "weighin VERSION")


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


def settled(kept: Any, now: Any, *, most_bytes: int, exact: Container[str], key: str = "") -> Any:
    """Return ``now``, but a size that differs from ``kept`` by at most ``most_bytes`` as it is there.

    What the keys ``exact`` hold is returned as it is.
    """
    if key in exact:
        return now
    if isinstance(now, dict) and isinstance(kept, dict):
        return {
            name: settled(kept.get(name), one, most_bytes=most_bytes, exact=exact, key=name)
            for name, one in now.items()
        }
    if isinstance(now, list) and isinstance(kept, list) and len(now) == len(kept):
        both = zip(kept, now, strict=True)
        return [settled(was, one, most_bytes=most_bytes, exact=exact, key=key) for was, one in both]
    if key.endswith("_bytes") and type(now) is type(kept) is int and abs(now - kept) <= most_bytes:
        return kept
    return now


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


def bare(cell: str) -> str:
    """Return the text of a table's cell without the sign before it, such as a tick or a coloured dot."""
    return re.sub(r"^(- (?=\w)|[^\w\s\-.≥+<(]+ )", "", " ".join(cell.split()))


class _Tables(HTMLParser):
    """The cells of each table of a page, as Markdown writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self._cell: list[str] | None = None
        self._is_hidden = False

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.tables.append([])
        elif tag == "tr" and self.tables:
            self.tables[-1].append([])
        elif tag in ("th", "td"):
            self._cell = []
        elif tag == "small" and self._cell is not None:
            self._cell.append(" (" if self.tables[-1][1:] else " ")
        elif tag == "span":
            self._is_hidden = ("aria-hidden", "true") in attrs

    def handle_endtag(self, tag: str) -> None:
        if tag in ("th", "td") and self._cell is not None:
            self.tables[-1][-1].append(bare("".join(self._cell)))
            self._cell = None
        elif tag == "small" and self._cell is not None and self.tables[-1][1:]:
            self._cell.append(")")
        elif tag == "span":
            self._is_hidden = False

    def handle_data(self, data: str) -> None:
        if self._cell is not None and not self._is_hidden:
            self._cell.append(data)


def html_tables(page: str) -> list[list[list[str]]]:
    """Return the cells of each table of a page, by row."""
    parser = _Tables()
    parser.feed(page)
    return parser.tables


def markdown_tables(text: str) -> list[list[list[str]]]:
    """Return the cells of each table of a text in Markdown, by row."""
    tables: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if not line.startswith("| "):
            tables.append([])
        elif not line.startswith("| ---"):
            cells = re.split(r"(?<!\\)\|", line)[1:-1]
            tables[-1].append([bare(re.sub(r"\\(.)", r"\1", cell)) for cell in cells])
    return [table for table in tables if table]


@contextmanager
def machine_of(run: str) -> Iterator[None]:
    """Let ``weighin recommend`` be on the machine of a published run, and predict as it did there."""
    first = (PUBLISHED / run / "records.jsonl").read_text().partition("\n")[0]
    there = json.loads(first)["environment"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "machine", lambda: there)
        patch.setattr(os, "cpu_count", lambda: there["cpus"])
        patch.setattr(answer, "predict", _predict)
        yield


@cache
def predictions() -> Mapping[str, Mapping[str, Any]]:
    """The predictions of each strategy that ``weighin predict --json`` gave, by model, dtype and device."""
    kept: dict[str, dict[str, Any]] = json.loads(_KEPT.read_text())
    return kept


@contextmanager
def predicting() -> Iterator[None]:
    """Let ``weighin predict`` assume a disk from which the kernel reads 8 MiB ahead."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "read_ahead_bytes", lambda _: 8 * 2**20)
        yield


def _predict(planned: Sequence[Any], **_: Any) -> list[Prediction]:
    cells = [one.cell for one in planned]
    known = predictions()[f"{cells[0].model.title} {cells[0].dtype} {cells[0].device}"]
    return [from_json(cell, {**known[f"{cell.strategy} {cell.format}"]}) for cell in cells]


@contextmanager
def found_floors(run: str) -> Iterator[None]:
    """Let ``weighin floor`` find at once what a published search found, and draw no pictures of it."""

    def start(_: Any, folder: Path, *_nodes: Any) -> tuple[Any, str]:
        return Run(folder, [], None), ""  # type: ignore[arg-type]

    def search(task: Run, _: Any) -> Any:
        published(run, task.folder.parent, task.folder.name)
        return list(run_folder.read(task.folder).results)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plans, "start", start)
        patch.setattr(runner, "search", search)
        patch.setattr(write, "draw", lambda *_: ())
        yield


@contextmanager
def examined() -> Iterator[None]:
    """Let ``weighin doctor`` find one capability of each kind, whatever this machine has."""
    found = (
        Capability("isolation docker", "no", "no Docker engine answers"),
        Capability("isolation cgroup enforces a limit", "yes", "a probe was killed"),
        Capability("soft limit (ram_high)", "partly", "cgroup v1 has no memory.high"),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "examine", lambda: doctor.Examination(found))
        yield
