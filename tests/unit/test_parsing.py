"""Records and plans from JSON: what is wrong with a text is said in one line."""

import json
from dataclasses import asdict, dataclass

import pytest
from factories import make_result

from weighin.errors import DamagedRecord, RecordError
from weighin.records.parsing import parse
from weighin.result import SCHEMA, Result


@dataclass(frozen=True, slots=True)
class Kind:
    """A small record."""

    name: str
    size_bytes: int = 0
    schema: int = SCHEMA


def complaint(text: str) -> str:
    with pytest.raises(DamagedRecord) as caught:
        parse(Kind, text.encode(), "line 3", "delete it")
    assert caught.value.repair == "delete it"
    return caught.value.message


def test_a_whole_record_comes_back() -> None:
    result = make_result()
    assert parse(Result, json.dumps(asdict(result)).encode(), "here") == result
    assert parse(Kind, b'{"name": "a", "later": 1}', "here") == Kind("a")


def test_control_characters_are_removed_whether_written_or_escaped() -> None:
    assert parse(Kind, b'{"name": "a\\u001bb"}', "here") == Kind("a?b")
    assert parse(Kind, b'{"name": "a\x7fb"}', "here") == Kind("a?b")
    assert parse(Kind, b'{"name": "a\\nb"}', "here") == Kind("a\nb")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{}", "line 3: name: missing"),
        ('{"name": 5}', "line 3: name: input should be a valid string, got 5"),
        ('{"name": "a", "size_bytes": 1.5}', "line 3: size_bytes: input should be a valid integer, got 1.5"),
        ('{"size_bytes": "x"}', "line 3: name: missing"),  # the first of two
        ('{"name": "a", "size_bytes": -1}', "line 3: size_bytes: impossible value -1"),
        ('{"name": "a", "schema": null}', "line 3: schema: input should be a valid integer, got None"),
    ],
)  # fmt: skip
def test_a_damaged_record_names_the_field(text: str, said: str) -> None:
    assert complaint(text) == said


def test_a_value_that_is_no_record_names_the_record() -> None:
    assert complaint("5").startswith("line 3: the record: ")
    assert complaint('{"name"').startswith("line 3: not JSON: ")


def test_a_long_value_is_cut() -> None:
    said = complaint(json.dumps({"name": ["x" * 200]}))
    assert len(said) < 120


def test_only_a_later_schema_is_too_new() -> None:
    text = '{{"name": "a", "schema": {}}}'
    assert parse(Kind, text.format(SCHEMA).encode(), "here").schema == SCHEMA
    with pytest.raises(RecordError) as caught:
        parse(Kind, text.format(SCHEMA + 1).encode(), "here")
    assert caught.value.message == (
        f"here: written by a newer weighin (schema {SCHEMA + 1}; this version reads up to {SCHEMA})"
    )
