"""Sizes, rates and times as text: known answers, exact complaints, and that what is printed can be parsed."""

import re
from collections.abc import Callable

import pytest
from factories import refused
from hypothesis import given
from hypothesis import strategies as st

from weighin.units import GIB, KIB, MIB, TIB, format_bytes, parse_bytes, parse_rate, parse_seconds

Parser = Callable[[str], int]
SIZES = st.integers(min_value=1, max_value=2**63)
READ: dict[Parser, dict[str, int]] = {
    parse_bytes: {
        "4096": 4096, "1": 1, "7b": 7, "7 B": 7, "8k": 8 * KIB, "8KiB": 8 * KIB, "6500m": 6500 * MIB,
        "8g": 8 * GIB, "8G": 8 * GIB, "8gib": 8 * GIB, " 8 GiB ": 8 * GIB, "1.5 GiB": 3 * GIB // 2,
        "8Gi": 8 * GIB, "512Mi": 512 * MIB,  # as Kubernetes writes them
        ".5g": GIB // 2, "2.g": 2 * GIB, "2t": 2 * TIB, "1.5": 2,
    },
    parse_seconds: {
        "2.5 s": 2_500_000_000, "150ms": 150_000_000, "3 min": 180_000_000_000, ".1s": 10**8,
        "123456789.123456789s": 123_456_789_123_456_789,
        "1.0000000005 s": 10**9,  # half to even
        "999999999999999999.999999999999999999 min": 60_000_000_000 * 10**18,
    },
    parse_rate: {"200MB/s": 200_000_000, "1.5 GB/s": 1_500_000_000, "100MiB/s": 100 * MIB, "50MB": 50_000_000},
}  # fmt: skip
WRONG: dict[Parser, tuple[list[str], str]] = {
    parse_bytes: (
        ["", "g", "eight", "-1g", "8x", "8 g b", "1e9", "1,5g", "0x10"],
        "cannot read {!r} as a size\nwrite a size such as 8GiB, 8g, 6500m or 4096"),
    parse_seconds: (
        ["", "s", "2", "2 h", "-1 s", "1e3 s", "two s", f"{'9' * 309}.0 s"],
        "cannot read {!r} as a duration\nwrite a duration such as 2.5 s, 150 ms or 3 min"),
    parse_rate: (["fast", "xx/s", "/s"], "cannot read {!r} as a rate\nwrite a rate such as 200MB/s, 1.5GB/s or 100MiB/s"),
}  # fmt: skip


@pytest.mark.parametrize("parse", READ, ids=lambda parse: parse.__name__)
def test_what_a_text_means(parse: Parser) -> None:
    assert {text: parse(text) for text in READ[parse]} == READ[parse]


@pytest.mark.parametrize("parse", WRONG, ids=lambda parse: parse.__name__)
def test_a_text_that_cannot_be_read_gets_examples(parse: Parser) -> None:
    texts, said = WRONG[parse]
    assert [refused(parse, text) for text in texts] == [said.format(text) for text in texts]


@pytest.mark.parametrize(
    ("text", "unit", "clear"), [("8GB", "GB", "8GiB"), ("1.5 mb", "MB", "1.5MiB")]
)
def test_a_unit_that_means_two_things(text: str, unit: str, clear: str) -> None:
    assert refused(parse_bytes, text) == (
        f"{text!r} is ambiguous: {unit} is 1000-based for some tools and 1024-based for others\n"
        f"write {clear} (1024-based), or the number of bytes"
    )
    parse_bytes(clear)


@pytest.mark.parametrize(
    ("size", "digits", "text"),
    [
        (0, 3, "0 B"), (1023, 3, "1023 B"), (1024, 3, "1.000 KiB"), (6_753_634_304, 3, "6.290 GiB"),
        (6_753_634_304, 1, "6.3 GiB"), (3 * TIB, 0, "3 TiB"), (-2 * MIB, 3, "-2.000 MiB"),
    ],
)  # fmt: skip
def test_a_size_for_people(size: int, digits: int, text: str) -> None:
    assert format_bytes(size, digits=digits) == text


@given(SIZES, st.integers(min_value=0, max_value=6))
def test_a_rounded_size_is_parsed_back_within_its_rounding(size: int, digits: int) -> None:
    text = format_bytes(size, digits=digits)
    unit = parse_bytes(f"1{re.sub('[^A-Za-z]', '', text)}")
    # Half of the last digit, half a byte for the parser's own rounding, and that of a double.
    allowed = unit / 10**digits / 2 + 0.5 + size * 2**-50
    assert abs(parse_bytes(text) - size) <= allowed
