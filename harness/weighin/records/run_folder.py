"""The folder of one run: what was planned, what was measured, and nothing in between is lost.

::

    RUN/plan.json         the cells of the run and its settings, written once, at the start
    RUN/records.jsonl     one Result a line, on the disk before the next cell starts
    RUN/samples/*.csv     one file a cell, after its record; Result.samples_path names it
    RUN/.room             while a cell runs: the room on the disk that its record will take

results/README.md is the contract of every field.
"""

import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from io import FileIO
from pathlib import Path
from shlex import quote
from textwrap import shorten
from typing import Any, Final, TypeVar

from pydantic import TypeAdapter, ValidationError

from weighin import atomic
from weighin.cell import Cell
from weighin.errors import DamagedRecord, RecordError, SchemaTooNew
from weighin.record import SCHEMA, Result
from weighin.records.validate import impossible

RECORDS: Final = "records.jsonl"
PLAN: Final = "plan.json"

_ROOM: Final = ".room"
_ROOM_BYTES: Final = 256 * 1024  # the largest record that is known has 9 KiB

_T = TypeVar("_T")
_DAMAGES_TOLD: Final = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """What a run set out to measure. ``settings`` is free: whatever a resumed run must repeat."""

    schema: int
    cells: tuple[Cell, ...]
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Records:
    """The results of a run in the order of measurement, and what was odd about their file."""

    results: tuple[Result, ...]
    warnings: tuple[str, ...] = ()
    damage: RecordError | None = None
    """The first line that is no record, where what is whole was asked for all the same."""


_RESULT: Final = TypeAdapter(Result)
_PLAN: Final = TypeAdapter(Plan)


def append(run: Path, result: Result) -> None:
    """Add ``result`` to the run's records; on return it is on the disk.

    Makes the folder where there is none, and first cuts a torn last line. Takes the room that
    ``room`` kept.

    Raises:
        RecordError: the folder or the file cannot be written; it is as it was before.
    """
    line = _encode(asdict(result), result.cell.id) + b"\n"
    path = run / RECORDS
    with writing(path, f"; what was measured of {result.cell.id} is lost"):
        run.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        (run / _ROOM).unlink(missing_ok=True)
        path.touch()
        with path.open("r+b", buffering=0) as file:
            _mend_tail(file)
            _write_whole(file, line)
        if is_new:
            atomic.sync_folder(run)


@contextmanager
def room(run: Path) -> Iterator[None]:
    """Keep room for one record while its cell is measured, however full the disk becomes.

    Raises:
        RecordError: there is none; nothing is measured in vain.
    """
    kept = run / _ROOM
    try:
        with writing(run / RECORDS):
            run.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(bytes(_ROOM_BYTES))
        yield
    finally:
        with suppress(OSError):  # as on a disk that was taken away meanwhile
            kept.unlink(missing_ok=True)


def read(run: Path) -> Records:
    """Return all records of a run; none where it was planned but no cell has finished.

    A last line without its end, as a power cut leaves it, is a warning: its cell counts as not
    measured. Keys that this version does not know are ignored.

    Raises:
        RecordError: the folder is no run, or cannot be read.
        SchemaTooNew: a later version wrote a record.
        DamagedRecord: a line is no record; names the line and the field.
    """
    records = read_whole(run)
    if records.damage:
        raise records.damage
    return records


def read_whole(run: Path) -> Records:
    """Return the whole records of a run, and the damage, if there is any, beside them.

    For reports: what is whole is shown, and each line that is not is a warning.

    Raises:
        RecordError: the folder is no run, or cannot be read.
    """
    path = run / RECORDS
    if not path.exists() and (run / PLAN).exists():
        return Records(())
    lines = _read(path).split(b"\n")
    warnings = []
    if lines[-1].strip() and not _is_json(lines[-1]):
        warnings.append(
            f"{path}, line {len(lines)} is torn (the run was cut off while writing it): "
            f"its cell counts as not measured; weighin bench --resume {quote(str(run))} repeats it"
        )
        lines.pop()
    results: list[Result] = []
    damages: list[RecordError] = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                results.append(_parse_record(path, number, line))
            except RecordError as error:
                damages.append(error)
    warnings += [f"{error.message}: this line is left out" for error in damages[:_DAMAGES_TOLD]]
    if len(damages) > _DAMAGES_TOLD:
        warnings.append(f"{len(damages) - _DAMAGES_TOLD} more lines of {path} are left out")
    return Records(tuple(results), tuple(warnings), damages[0] if damages else None)


def write_plan(run: Path, cells: Iterable[Cell], settings: dict[str, Any] | None = None) -> None:
    """Write plan.json whole or not at all, making the folder where there is none.

    Raises:
        RecordError: the folder cannot be written.
    """
    plan = Plan(SCHEMA, tuple(cells), settings or {})
    path = run / PLAN
    text = _encode(asdict(plan), PLAN, indent=1) + b"\n"
    with writing(path):
        is_new = not run.exists()
        run.mkdir(parents=True, exist_ok=True)
        try:
            atomic.write_bytes(path, text)
        except OSError:
            if is_new:
                run.rmdir()
            raise


def discard_unmeasured(run: Path) -> None:
    """Remove the plan of a run that has no record, and its folder where nothing else is in it."""
    if (run / RECORDS).exists():
        return
    with suppress(OSError):  # what cannot be removed, or holds more than ours, stays
        (run / PLAN).unlink()
        for folder in (run / "samples", run):
            if folder.exists():
                folder.rmdir()


def read_plan(run: Path) -> Plan:
    """Return what the run set out to measure.

    Raises:
        RecordError: there is no plan, or it cannot be read.
        SchemaTooNew: a later version wrote it.
        DamagedRecord: it is no plan; names the field.
    """
    path = run / PLAN
    return _parse(_PLAN, _read(path), str(path), "start a new run: this one cannot be resumed")


def pending(cells: Iterable[Cell], results: Iterable[Result]) -> list[Cell]:
    """Return the cells that have no record yet, in their order; whole cells are compared."""
    # As JSON, because a cell holds dicts, and a tuple in them comes back from disk as a list.
    measured = {_identity(result.cell) for result in results}
    return [cell for cell in cells if _identity(cell) not in measured]


def _identity(cell: Cell) -> str:
    return json.dumps(asdict(cell), sort_keys=True, default=str)


def _encode(value: dict[str, Any], name: str, indent: int | None = None) -> bytes:
    try:
        text = json.dumps(value, default=str, allow_nan=False, ensure_ascii=False, indent=indent)
    except ValueError as error:
        raise RecordError(
            f"{name} cannot be written as JSON: {error}",
            "use finite numbers in the options of models and strategies",
        ) from error
    return text.encode("utf-8", "replace")  # file names may hold bytes that are no UTF-8


def _write_whole(file: FileIO, line: bytes) -> None:
    """Write a line at the file's end and sync it; where that fails, nothing of it stays."""
    start = file.tell()
    try:
        while line:
            line = line[file.write(line) :]
        os.fsync(file.fileno())
    except OSError:
        file.truncate(start)
        raise


def _mend_tail(file: FileIO) -> None:
    """Leave ``file`` at its end, behind a newline: a torn line is cut, a bare one is ended."""
    if file.seek(0, os.SEEK_END) == 0:
        return
    file.seek(-1, os.SEEK_END)
    if file.read(1) == b"\n":
        return
    file.seek(0)
    text = file.read()
    start = text.rfind(b"\n") + 1
    if _is_json(text[start:]):
        file.write(b"\n")
    else:
        file.truncate(file.seek(start))


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _parse_record(path: Path, number: int, line: bytes) -> Result:
    repair = (
        f"delete the line and measure its cell again: sed -i {number}d {quote(str(path))} "
        f"&& weighin bench --resume {quote(str(path.parent))}"
    )
    place = f"{path}, line {number}"
    result = _parse(_RESULT, line, place, repair)
    if complaint := impossible(asdict(result)):
        raise DamagedRecord(f"{place}: {complaint}", repair)
    return result


def _parse(adapter: TypeAdapter[_T], text: bytes, place: str, repair: str) -> _T:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise DamagedRecord(f"{place}: not JSON: {error}", repair) from error
    schema = value.get("schema") if isinstance(value, dict) else None
    if isinstance(schema, int) and schema > SCHEMA:
        raise SchemaTooNew(
            f"{place}: written by a later weighin (schema {schema}; this one knows {SCHEMA})",
            "pip install --upgrade weighin",
        )
    try:
        return adapter.validate_json(text, strict=True)
    except ValidationError as error:
        raise DamagedRecord(f"{place}: {_first_complaint(error)}", repair) from error


def _first_complaint(error: ValidationError) -> str:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"]) or "the record"
    if first["type"] == "missing":
        return f"{where}: missing"
    return f"{where}: {first['msg'].lower()}, got {shorten(repr(first['input']), 60)}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise RecordError(
            f"{path.parent} holds no {path.name}: it is not the folder of a run",
            "name the folder that weighin bench printed at its end, such as results/RUN",
        ) from error
    except OSError as error:
        raise RecordError(
            f"cannot read {path}: {error.strerror}", f"ls -ld {quote(str(path))} shows whose it is"
        ) from error


@contextmanager
def writing(path: Path, and_so: str = "") -> Iterator[None]:
    """Turn what the disk refuses inside into a RecordError; ``and_so`` ends its message."""
    try:
        yield
    except OSError as error:
        raise RecordError(
            f"cannot write {path}: {error.strerror}{and_so}",
            "free some space, or name a folder that you may write: weighin bench ... --out FOLDER",
        ) from error
