"""Format and parse sizes, rates and durations. The parsers also read the formatted texts."""

import re
from collections.abc import Mapping
from typing import Final

from weighin.errors import ConfigError

KIB: Final = 1024
MIB: Final = 1024**2
GIB: Final = 1024**3
TIB: Final = 1024**4
LONGEST_S: Final = 24 * 24 * 3600  # the longest time-out: poll(2) waits for 2**31 - 1 ms at most
_SUFFIXES: Final = (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB))
_SIZES: Final = {"": 1, "b": 1} | {
    spelling: factor
    for name, factor in _SUFFIXES
    for spelling in (name.lower(), name[:2].lower(), name[0].lower())  # gib, gi, g
}
_DECIMAL: Final = {"kb": 1000, "mb": 1000**2, "gb": 1000**3, "tb": 1000**4}
_DURATIONS: Final = {"ms": 1_000_000, "s": 1_000_000_000, "min": 60_000_000_000}
_TEXT: Final = r"\s*(?P<number>\d{1,18}(?:\.\d{0,18})?|\.\d{1,18})\s*(?P<unit>[A-Za-z]*)\s*"


def _parse(
    text: str, factors: Mapping[str, int], kind: str, least: str, examples: str, suffix: str = ""
) -> int:
    match = re.fullmatch(_TEXT, text.rstrip().removesuffix(suffix))
    factor = factors.get(match["unit"].lower()) if match else None
    repair = f"write a {kind} such as {examples}"
    if match is None or factor is None:
        raise ConfigError(f"cannot read {text!r} as a {kind}", repair)
    whole, _, part = match["number"].partition(".")
    value: int = round(int(whole + part) * factor, -len(part)) // 10 ** len(part)  # exact
    if value < 1:
        raise ConfigError(f"{text!r} is less than one {least}", repair)
    return value


def parse_bytes(text: str, *, decimal: bool = False) -> int:
    """Return the size in ``text`` as bytes: "8g", "8GiB", "6500m", "1.5 GiB"; k, m, g and t are powers of 1024. "GB",
    which tools read in two ways, is an error, unless ``decimal`` (for shard sizes) says that it is 1000**3.
    """
    if decimal:
        return _parse(text, _SIZES | _DECIMAL, "size", "byte", "20MB, 5GB, 2GiB or 4096")
    match = re.fullmatch(_TEXT, text)
    if match and match["unit"].lower() in _DECIMAL:
        number, unit = match["number"], match["unit"].upper()
        what = f"{unit} is 1000-based for some tools and 1024-based for others"
        repair = f"write {number}{unit[0]}iB (1024-based), or the number of bytes"
        raise ConfigError(f"{text!r} is ambiguous: {what}", repair)
    return _parse(text, _SIZES, "size", "byte", "8GiB, 8g, 6500m or 4096")


def format_bytes(size: int, *, digits: int = 3) -> str:
    """Return ``size`` with ``digits`` decimals, in the largest unit not above it: "6.290 GiB"."""
    for suffix, factor in _SUFFIXES:
        if abs(size) >= factor:
            return f"{size / factor:.{digits}f} {suffix}"
    return f"{size} B"


def format_exact(size: int, space: str = "") -> str:
    """Return ``size`` as a whole number of the largest unit that divides it: "6500MiB"."""
    for suffix, factor in _SUFFIXES:
        if size and size % factor == 0:
            return f"{size // factor}{space}{suffix}"
    return f"{size}{space}B"


def format_seconds(nanoseconds: int) -> str:
    """Return a duration with three significant digits, in s or ms: "1.52 s", "12.3 ms"."""
    unit, factor = ("s", 1e9) if nanoseconds >= 999_500_000 else ("ms", 1e6)
    value = nanoseconds / factor
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"


def parse_seconds(text: str) -> int:
    """Return the duration in ``text`` as nanoseconds: "2.5 s", "150ms", "3 min"."""
    return _parse(text, _DURATIONS, "duration", "nanosecond", "2.5 s, 150 ms or 3 min")


def format_latency(nanoseconds: int) -> str:
    """Return a latency without rounding, in ms: "5ms", "0.25ms"."""
    return f"{nanoseconds / 1_000_000:.6f}".rstrip("0").rstrip(".") + "ms"


def parse_rate(text: str) -> int:
    """Return the rate in ``text`` in bytes per second: "200MB/s", "100MiB", where MB is 1000**2."""
    size, examples = text.strip().removesuffix("/s"), "200MB/s, 1.5GB/s or 100MiB/s"
    rate = _parse(text, _SIZES | _DECIMAL, "rate", "byte per second", examples, "/s")
    if rate < 100_000:  # a user who types less has usually forgotten the unit MB/s
        repair = f"did you mean {size}MB/s?" if size.isdigit() else "give at least 100KB/s"
        raise ConfigError(f"{text!r} is too slow: every disk reads faster", repair)
    return rate


def format_rate(bytes_per_s: int) -> str:
    """Return a rate without rounding, in MB/s if that is a whole number: "200MB/s", "100MiB/s"."""
    megabytes, rest = divmod(bytes_per_s, _DECIMAL["mb"])
    return f"{format_exact(bytes_per_s)}/s" if rest else f"{megabytes}MB/s"
