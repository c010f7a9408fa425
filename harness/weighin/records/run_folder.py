"""Read and write the folder of a run: its plan, its records and its samples.

::

    RUN/plan.json         the cells of the run and its settings, written once at the start
    RUN/records.jsonl     one Result per line, synced to disk before the next cell starts
    RUN/samples/*.csv     one file per cell, and one per rank; written after the record that names them

results/README.md documents every field of these files.
"""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from io import FileIO
from pathlib import Path, PurePath
from reprlib import repr as short_repr
from shlex import quote
from typing import Any, Final, TypeVar

import msgspec

from weighin.cell import Cell
from weighin.errors import ConfigError, RecordError
from weighin.files import no_link, parse_json, read_bytes, sync, write_bytes
from weighin.records.floor import Aim, next_cell
from weighin.records.metrics import grouped
from weighin.result import SCHEMA, Outcome, Result, Sample
from weighin.text import few, masked, one_line, printable

RECORDS: Final = "records.jsonl"
PLAN: Final = "plan.json"
TEMPORARY: Final = "weighin-results-"
"""How the folder's name begins that is made for a run where no results can be written."""

_MOST_BYTES: Final = 1024**3  # of about 180,000 records, or of twelve days of samples, 5 ms apart
_ANY_RAM_BYTES: Final = 1 << 62  # stands for the machine's RAM if no record tells the size

_NAME_ANOTHER: Final = "free disk space, or name a writable folder: weighin bench ... --out FOLDER"
_FREE: Final = {"kwargs", "options", "environment", "command"}  # any value may be there
_LARGEST: Final = 2**63  # the range of a signed 64-bit counter of the kernel
_AMOUNTS: Final = ("_bytes", "_ns", "_faults")
_ORDERED: Final = (("end_ns", "start_ns", "earlier than"), ("ready_ns", "load_ns", "less than"))
_SAMPLED: Final = {each.name for each in fields(Sample)}
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Plan:
    schema: int
    cells: tuple[Cell, ...]
    settings: dict[str, Any] = field(default_factory=dict)


def in_shard(cells: Sequence[_T], shard: str) -> Sequence[_T]:
    """Return the cells of a shard: "2/8" has every eighth cell, beginning with the second; "" has all."""
    match = re.fullmatch(r"(\d+)/(\d+)", shard.strip())
    if shard and not (match and 1 <= int(match[1]) <= int(match[2])):
        why = f"cannot read {shard!r} as a shard"
        raise ConfigError(why, "write the shard's number, from 1, and the number of shards: 2/8")
    return cells[int(match[1]) - 1 :: int(match[2])] if match else cells


def verb_of(settings: Mapping[str, Any]) -> str:
    if settings.get("within") is not None:
        return "floor"
    return "run" if settings.get("commands") or settings.get("command") else "bench"


def resume_command(verb: str, run: Path) -> str:
    return f"weighin {verb} --resume {quote(str(run))}"


def pending(cells: Iterable[Cell], results: Iterable[Result]) -> list[Cell]:
    measured = {result.cell.id for result in results}
    return [cell for cell in cells if cell.id not in measured]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of a run, or of its shard, was measured."""

    planned: int
    pending: tuple[Cell, ...]  # without a record, or a search for a RAM floor that has ended
    again: str  # the command that measures these
    is_search: bool = False

    def __str__(self) -> str:
        what = "searches for a floor finished" if self.is_search else "cells measured"
        return f"{self.planned - len(self.pending)} of {self.planned} {what}"


def _coverage(run: Path, plan: Plan, results: Sequence[Result]) -> Coverage:
    settings, cells = plan.settings, plan.cells
    again = resume_command(verb_of(settings), run)
    within, aim = settings.get("within"), settings.get("aim", Aim.ENDS)
    # Somebody may have edited the plan: an impossible setting counts as none.
    if isinstance(within, float) and 0 < within < 1 and aim in [*Aim]:
        rams = [one.environment.get("ram_bytes") for one in results]
        highest = max((ram for ram in rams if isinstance(ram, int)), default=0) or _ANY_RAM_BYTES
        left = (one for one in cells if next_cell(one, results, within, highest, Aim(aim)))
        return Coverage(len(cells), tuple(left), again, is_search=True)
    with suppress(ConfigError):
        cells = tuple(in_shard(cells, str(settings.get("shard", ""))))
    return Coverage(len(cells), tuple(pending(cells, results)), again)


@dataclass(frozen=True, slots=True)
class Records:
    results: Sequence[Result]
    warnings: tuple[str, ...] = ()
    coverage: Coverage | None = None  # without a readable plan, None
    damage: RecordError | None = None  # of the plan, or else of the first line that is not a record

    @property
    def missing(self) -> int | None:
        return None if self.coverage is None else len(self.coverage.pending)


def append(run: Path, result: Result) -> Result:
    """Append ``result`` to the run's records, sync the file, and return the appended result: a failed
    measurement if ``read`` would refuse it. If it cannot be written, raise RecordError, and add no line.
    """
    cell, path = result.cell, run / RECORDS
    try:
        line, result = _line(result)
    except RecordError as error:
        figure = error.message.removeprefix(f"{cell.id}: ")
        why = f"the measured process reported an impossible figure: {figure}"
        failed = Result(SCHEMA, cell, Outcome.MEASUREMENT_FAILED, why, started_at=result.started_at)
        line, result = _line(failed)
    with writing(path, f"; the measurement of {cell.id} is lost"):
        run.mkdir(parents=True, exist_ok=True)
        no_link(path, run)
        with path.open("a+b", buffering=0) as file:
            _mend_tail(file)
            start = file.tell()
            try:
                while line:
                    line = line[file.write(line) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(start)
                raise
        sync(run)  # of a new file
    return result


def _line(result: Result) -> tuple[bytes, Result]:
    """Return a result as a line of JSON, and as a reader gets it, but with the cell that was planned."""
    cell, texts = result.cell, (result.message, *result.warnings)
    if all(isinstance(text, str) for text in texts):  # what a process sent is checked below
        message, *warnings = map(masked, texts)
        result = replace(result, message=message, warnings=tuple(warnings))
    line = _encode(result, cell.id) + b"\n"
    return line, replace(parse(Result, line, cell.id), cell=cell)


def _mend_tail(file: FileIO) -> None:
    """Go to the end of ``file``; cut off an incomplete last line, or add a missing newline."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 1, 0))
    if file.read(1) in (b"", b"\n"):
        return
    file.seek(0)
    text = file.read()
    start = text.rfind(b"\n") + 1
    if _is_json(text[start:]):
        file.write(b"\n")
    else:
        file.truncate(file.seek(start))


def _is_json(text: bytes) -> bool:
    with suppress(ValueError):
        parse_json(text)
        return True
    return False


def read(run: Path, *, past_damage: bool = False) -> Records:
    """Return all records of a run. An incomplete last line, as after a power cut, causes a warning; a line
    that is no record, and a damaged plan, raise RecordError, or cause a warning (``past_damage``).
    """
    path, plan, damage, warnings, results = run / RECORDS, None, None, list[str](), list[Result]()
    has_plan = (run / PLAN).exists()
    try:
        plan = read_plan(run) if has_plan else None
    except RecordError as error:
        damage = error
        warnings.append(f"{error.message}: weighin cannot tell whether the run is complete")
    again = resume_command(verb_of(plan.settings) if plan else "bench", run)
    lines = [b""] if has_plan and not path.exists() else read_file(run, RECORDS).split(b"\n")
    if lines[-1].strip() and not _is_json(lines[-1]):
        warnings.append(
            f"{path}, line {len(lines)} is incomplete, because the run was killed while it wrote"
            f" the line: the measurement of this line counts as missing; {again} repeats it"
        )
        lines.pop()
    damaged = list[RecordError]()
    for number, line in enumerate(lines, start=1):
        repair = f"delete the line and repeat its measurement: sed -i {number}d {quote(str(path))} && {again}"
        try:
            if line.strip():
                results.append(parse(Result, line, f"{path}, line {number}", repair))
        except RecordError as error:
            damaged.append(error)
    if damaged:
        others = f", and {len(damaged) - 1} more" if damaged[1:] else ""
        warnings.append(f"{damaged[0].message}: this line is left out{others}")
        damage = damaged[0]
    if damage and not past_damage:
        raise damage

    coverage = _coverage(run, plan, results) if plan else None
    if coverage and coverage.pending:
        warnings.append(f"{run}: {coverage}; {again} measures the rest")
    numbers = Counter((one.cell.id, str(one.environment.get("node"))) for one in results)
    if twice := [name for (name, _), number in numbers.items() if number > 1]:
        warnings.append(
            f"{few(twice)}: several records of one cell, as when two runs write into one folder; the"
            " runs may have disturbed each other"
        )
    for repeats in grouped(results, lambda one: one.cell.series).values():
        if len({one.sources_hash for one in repeats} - {None}) > 1:
            mixes = "one row of the tables mixes repeats of different code"
            warnings.append(f"{repeats[0].cell.strategy}: {mixes}")
    return Records(tuple(results), tuple(warnings), coverage, damage)


def samples_path(cell: Cell, rank: int | None = None) -> str:
    return f"samples/{cell.id}.csv" if rank is None else f"samples/{cell.id}-rank{rank}.csv"


def write_plan(
    run: Path,
    cells: Iterable[Cell],
    settings: dict[str, Any] | None = None,
    *,
    is_new: bool = False,
) -> bytes:
    """Write plan.json atomically, in a new folder if need be, and return its content; with ``is_new``,
    raise RecordError if the folder has a plan or records already.
    """
    plan, path = Plan(SCHEMA, tuple(cells), settings or {}), run / PLAN
    text = _encode(plan, PLAN, indent=1) + b"\n"
    again = resume_command(verb_of(plan.settings), run)
    already_there = RecordError(
        f"{run} already contains a run",
        f"to resume that run: {again}; for a new run, name another folder with --out",
    )
    if is_new and (run / RECORDS).exists():
        raise already_there
    with writing(path):
        run.mkdir(parents=True, exist_ok=True)
        try:
            write_bytes(path, text, is_new=is_new)
        except FileExistsError:
            raise already_there from None
    return text


def discard_unmeasured(run: Path) -> None:
    """Remove the plan of a run without records, and the folders made for it that are then empty."""
    if (run / RECORDS).exists():
        return
    with suppress(OSError):  # a folder stays if it holds other files or cannot be removed
        (run / PLAN).unlink()
        for folder in (run / "samples", run):
            if folder.exists():
                folder.rmdir()
        if run.parent.name.startswith(TEMPORARY):
            run.parent.rmdir()


def read_plan(run: Path) -> Plan:
    return parse_plan(run, read_file(run, PLAN))


def parse_plan(run: Path, text: bytes) -> Plan:
    return parse(Plan, text, str(run / PLAN), "start a new run: weighin cannot resume this run")


def _encode(value: Result | Plan, name: str, indent: int | None = None) -> bytes:
    def as_json(inner: Any) -> Any:
        if is_dataclass(inner) and not isinstance(inner, type):
            return {each.name: getattr(inner, each.name) for each in fields(inner)}
        return str(inner)

    # By json, which refuses NaN, where msgspec would write null.
    try:
        text = json.dumps(
            value, default=as_json, allow_nan=False, ensure_ascii=False, indent=indent
        )
    except ValueError as error:
        raise RecordError(
            f"{name} cannot be written as JSON: {error}",
            "use finite numbers in the options of models and strategies",
        ) from error
    return text.encode("utf-8", "replace")  # file names may contain bytes that are not UTF-8


def read_file(run: Path, name: str) -> bytes:
    path = run / name
    try:
        return read_bytes(path, _MOST_BYTES, within=run)
    except FileNotFoundError as error:
        raise RecordError(
            f"{path.parent} contains no {path.name}, so it is not the folder of a run",
            "name the folder that weighin bench printed at its end, such as results/RUN",
        ) from error
    except OSError as error:
        is_denied = isinstance(error, PermissionError)
        repair = "change its permissions" if is_denied else "put a regular file there"
        repair += f"; to see what it is: ls -ld {quote(str(path))}"
        raise RecordError(f"cannot read {path}: {error.strerror}", repair) from error


@contextmanager
def writing(path: Path, and_so: str = "", repair: str = _NAME_ANOTHER) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise RecordError(f"cannot write {path}: {error.strerror}{and_so}", repair) from error


def parse(kind: type[_T], text: bytes, place: str, repair: str = "") -> _T:
    """Parse a text of JSON as the dataclass ``kind``; ``place`` names the text in errors. A text of a
    newer weighin, and one that is not a valid ``kind``, raise RecordError.
    """
    try:
        value = parse_json(text.decode())  # json itself would accept UTF-16 and lone surrogates
    except ValueError as error:  # a UnicodeDecodeError too
        raise RecordError(f"{place}: not JSON: {one_line(str(error))}", repair) from None
    refuse_newer(value, SCHEMA, place)
    try:
        # The run goes on with its plan's settings as they are; no report has them.
        return msgspec.convert(checked(value, is_cell=kind is Plan), kind)
    except ValueError as error:  # of msgspec too: a wrong type, and where
        raise RecordError(f"{place}: {one_line(str(error))}", repair) from None


def refuse_newer(value: object, newest: int, place: object) -> None:
    """Raise RecordError if a later weighin, of a schema above ``newest``, has written the JSON ``value``."""
    schema = value.get("schema") if isinstance(value, dict) else None
    if isinstance(schema, int) and schema > newest:
        from weighin import install

        known = f"schema {short_repr(schema)}; this version reads up to {newest}"
        raise RecordError(f"{place}: written by a newer weighin ({known})", install.upgrade())


def checked(value: Any, place: str = "", *, is_cell: bool = False, is_free: bool = False) -> Any:
    """Return a record's JSON value, with "?" for each unprintable character in its texts and keys, except in
    what a user chooses in a cell, such as options: its name follows from it. An amount in bytes, ns or
    faults below 0 or above 2**63 - 1 raises ValueError, and so do times in the wrong order.
    """
    if isinstance(value, str):
        return printable(value, "\n\t")
    if isinstance(value, list):
        named = ((f"{place}{at}.", each) for at, each in enumerate(value))
        return [checked(each, inner, is_cell=is_cell, is_free=is_free) for inner, each in named]
    if not isinstance(value, dict):
        return value
    cleaned, is_checked = {}, not is_free
    for key, each in value.items():
        if isinstance(each, int):
            if is_checked and key.endswith(_AMOUNTS) and not 0 <= each < _LARGEST:
                raise ValueError(f"{place}{key}: impossible value {short_repr(each)}")
            cleaned[printable(key)] = each
            continue
        is_kept = is_cell and key in (_FREE if place else {"settings"})
        inside = {"is_cell": key in ("cell", "cells", "model"), "is_free": is_free or key in _FREE}
        cleaned[printable(key)] = each if is_kept else checked(each, f"{place}{key}.", **inside)
    for later, earlier, what in _ORDERED if is_checked else ():
        end, start = value.get(later), value.get(earlier)
        if isinstance(end, int) and isinstance(start, int) and end < start:
            raise ValueError(f"{place}{later}: {what} {earlier}")
    return cleaned


def read_samples(run: Path, path: str | None) -> list[Sample]:
    """Return the whole samples in a file of a run, the oldest first. A file that is missing, unreadable or
    outside of the run's folder has none: a stranger may have written the record.
    """
    if path is None or PurePath(path).is_absolute() or ".." in PurePath(path).parts:
        return []
    try:
        text = read_bytes(run / path, _MOST_BYTES, within=run).decode()
    except (OSError, ValueError):
        return []
    head, *lines = text[: text.rfind("\n") + 1].splitlines() or [""]
    names, samples = head.split(","), list[Sample]()
    for line in lines:
        with suppress(ValueError):  # of a row that is longer or shorter, or lacks a value
            row = zip(names, line.split(","), strict=True)
            known = {name: int(value) for name, value in row if value and name in _SAMPLED}
            if all(0 <= value < _LARGEST for value in known.values()):
                samples.append(msgspec.convert(known, Sample))
    return sorted(samples, key=lambda one: one.t_ns)
