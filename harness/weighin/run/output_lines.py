"""Split a command's output into lines while it arrives, and find regular expressions in them."""

import re
from dataclasses import dataclass
from typing import Final

from weighin.errors import ConfigError

_LONGEST_LINE: Final = 64 * 1024  # of a longer line, only the beginning is searched
_ESCAPES: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_SEES_LINE_ENDS: Final = re.compile(r"\(\?|\\[AZ]|[*+?}]\+")
"""What may match at the end of a text, and not at the end of a line: it looks around, or is possessive."""


class Pattern:
    """A regular expression that is looked for in each line of a text."""

    def __init__(self, option: str, text: str) -> None:
        """Raise ConfigError, which names the option, if the text is not a regular expression."""
        try:
            self.search = re.compile(text).search
            self._anywhere = re.compile(text, re.MULTILINE).search
        except re.error as error:
            raise ConfigError(
                f"{option} {text!r} is not a regular expression: {error}",
                "write a backslash before a character that is meant literally: 'loss \\(train\\)'",
            ) from None
        self._sees_line_ends = bool(_SEES_LINE_ENDS.search(text))

    def may_be_in(self, lines: str) -> bool:
        """Tell whether a line may contain it: one search of many lines is quicker than many."""
        return self._sees_line_ends or self._anywhere(lines) is not None


@dataclass(frozen=True, slots=True)
class Ended:
    """Lines that ended, and the times of the last character of the first one and of all others."""

    text: str
    first_ns: int
    t_ns: int


class Lines:
    """Splits output into lines; a carriage return ends a line too, as in a progress bar."""

    def __init__(self) -> None:
        self._begun = b""
        self._begun_ns = 0

    @property
    def begun(self) -> str:
        """The beginning of the line that has not ended."""
        return _plain(self._begun)

    def feed(self, data: bytes, t_ns: int) -> Ended | None:
        """Return the lines that end in ``data``; None if none does."""
        end = max(data.rfind(b"\n"), data.rfind(b"\r"))
        if end < 0:
            self._begun = (self._begun + data)[:_LONGEST_LINE]
            self._begun_ns = t_ns
            return None
        first_ns = self._begun_ns if data[:1] in (b"\n", b"\r") else t_ns
        ended = Ended(_plain(self._begun + data[:end]), first_ns, t_ns)
        self._begun, self._begun_ns = data[end + 1 :], t_ns
        return ended

    def rest(self) -> Ended | None:
        """Return the last line if it did not end."""
        return Ended(self.begun, self._begun_ns, self._begun_ns) if self._begun else None


def _plain(output: bytes) -> str:
    """Return output as text without the sequences that set colours and titles in a terminal."""
    text = output.decode(errors="replace").replace("\r", "\n")
    return _ESCAPES.sub("", text) if "\x1b" in text else text
