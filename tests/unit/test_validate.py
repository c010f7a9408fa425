"""Which values of a record no measurement can have, and what is removed from its texts."""

import re
from typing import Any

import pytest

from weighin.records.run_folder import checked


@pytest.mark.parametrize(
    "record",
    [
        {},
        {"rss_bytes": 0, "load_ns": 2**63 - 1, "minor_faults": 5},
        {"rss_bytes": None, "major_faults": "text"},
        {"repeat": -1, "code": 2**64},  # no amounts
        {"options": {"gap_ns": -1}, "kwargs": {"a_bytes": -1}, "environment": {"b_ns": -1}},
        {"phases": [{"start_ns": 5, "end_ns": 5}], "load_ns": 3, "ready_ns": 3},
        {"start_ns": 5, "end_ns": None, "load_ns": None, "ready_ns": 1},
        {"ranks": [1, None, "x", [{"rss_bytes": 1}]]},
    ],
)
def test_a_record_that_a_measurement_can_have(record: dict[str, Any]) -> None:
    checked(record)


@pytest.mark.parametrize(
    ("record", "complaint"),
    [
        ({"rss_bytes": -1}, "rss_bytes: impossible value -1"),
        ({"load_ns": 2**63}, f"load_ns: impossible value {2**63}"),
        ({"minor_faults": -5}, "minor_faults: impossible value -5"),
        ({"a": {"b": {"c_ns": -2}}}, "a.b.c_ns: impossible value -2"),
        (
            {"ranks": [{"rss_bytes": 1}, {"rss_bytes": -1}]},
            "ranks.1.rss_bytes: impossible value -1",
        ),
        ({"phases": [{"start_ns": 5, "end_ns": 4}]}, "phases.0.end_ns: earlier than start_ns"),
        ({"load_ns": 4, "ready_ns": 3}, "ready_ns: less than load_ns"),
        ({"options": {"a_ns": -1}, "b_ns": -1}, "b_ns: impossible value -1"),
        ({"storage": {"settings": {"a_ns": -1}}}, "storage.settings.a_ns: impossible value -1"),
        ({"first": {"a_ns": 1}, "then": {"a_ns": -1}}, "then.a_ns: impossible value -1"),
    ],
)
def test_an_impossible_value_is_named_with_its_place(
    record: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)):
        checked(record)


def test_texts_keep_their_lines_and_lose_their_control_characters() -> None:
    record = {
        "message": "a\x1b[31m\n\tb",
        "warnings": ["x\x00", 5, None, True],
        "cell": {"strategy": "s\x07", "options": {"text": "o\x07"}, "settings": "s\x07"},
    }
    assert checked(record) == {
        "message": "a?[31m\n\tb",
        "warnings": ["x?", 5, None, True],
        "cell": {"strategy": "s?", "options": {"text": "o\x07"}, "settings": "s?"},
    }
