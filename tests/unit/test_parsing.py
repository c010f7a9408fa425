"""Records and plans from JSON: what is wrong with a text is said in one line."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from factories import make_result

from weighin.errors import RecordError
from weighin.records import run_folder
from weighin.records.run_folder import parse
from weighin.result import SCHEMA, Result

RECORDS = sorted((Path(__file__).parents[2] / "results" / "published").glob("*/records.jsonl"))


@dataclass(frozen=True, slots=True)
class Kind:
    """A small record."""

    name: str
    size_bytes: int = 0
    schema: int = SCHEMA


def complaint(text: str) -> str:
    with pytest.raises(RecordError) as caught:
        parse(Kind, text.encode(), "line 3", "delete it")
    assert caught.value.repair == "delete it"
    return caught.value.message


def test_a_whole_record_comes_back() -> None:
    result = make_result()
    assert parse(Result, json.dumps(asdict(result)).encode(), "here") == result
    assert parse(Kind, b'{"name": "a", "later": 1}', "here") == Kind("a")


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


def test_control_characters_are_removed_whether_written_or_escaped() -> None:
    assert parse(Kind, b'{"name": "a\\u001bb"}', "here") == Kind("a?b")
    assert parse(Kind, b'{"name": "a\x7fb"}', "here") == Kind("a?b")
    assert parse(Kind, b'{"name": "a\\nb"}', "here") == Kind("a\nb")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "line 3: Object missing required field `name`"),
        ('{"name": 5}', "line 3: Expected `str`, got `int` - at `$.name`"),
        ('{"name": "a", "size_bytes": -1}', "line 3: size_bytes: impossible value -1"),
    ],
)  # fmt: skip
def test_a_damaged_record_names_the_field(text: str, said: str) -> None:
    assert complaint(text) == said
