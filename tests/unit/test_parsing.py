"""Every published record is read and written as it is."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from factories import make_result

from weighin.records import run_folder
from weighin.records.run_folder import parse
from weighin.result import Result

RECORDS = sorted((Path(__file__).parents[2] / "results" / "published").glob("*/records.jsonl"))


def test_a_whole_record_comes_back_without_what_a_later_weighin_wrote() -> None:
    result = make_result()
    assert parse(Result, json.dumps(asdict(result) | {"later": 1}).encode(), "here") == result


@pytest.mark.parametrize("file", RECORDS, ids=lambda file: file.parent.name)
def test_every_published_record_is_read_and_written_as_it_is(file: Path) -> None:
    for number, line in enumerate(file.read_bytes().splitlines(), start=1):
        result = parse(Result, line, f"line {number}")
        written = json.loads(run_folder._encode(result, "x"))
        assert _has_all_of(written, json.loads(line))
        assert parse(Result, json.dumps(written).encode(), "again") == result


def _has_all_of(written: Any, read: Any) -> bool:
    """Tell whether every value is as it was read; an older weighin did not write all keys."""
    if isinstance(read, dict):
        return all(key in written and _has_all_of(written[key], read[key]) for key in read)
    if isinstance(read, list):
        return len(written) == len(read) and all(map(_has_all_of, written, read))
    return type(written) is type(read) and bool(written == read)
