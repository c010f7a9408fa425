"""Split a command's output into lines as it arrives, and search each line for regular expressions."""

import re
from dataclasses import dataclass
from typing import Final

_LONGEST_LINE: Final = 64 * 1024  # bytes; the rest of a longer line is not searched
_PATIENCE_S: Final = 0.1  # for one search
_ESCAPES: Final = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)")
_SEES_LINE_ENDS: Final = re.compile(r"\(\?|\\[AZ]|[*+?}]\+")
"""Finds lookarounds, \\A, \\Z and possessive quantifiers, which match differently in longer texts."""


class Pattern:
    """A regular expression, with a quick test whether any line of a long text can match."""

    def __init__(self, text: str) -> None:
        import regex  # takes 0.02 s; unlike re, it can stop a search that would take forever

        self._pattern = regex.compile(text)
        self._anywhere = regex.compile(text, regex.MULTILINE)
        self._sees_line_ends = bool(_SEES_LINE_ENDS.search(text))
        self.given_up = 0
        """How many lines were not searched to the end, because that took too long."""

    def search(self, line: str) -> bool:
        try:
            return self._pattern.search(line, timeout=_PATIENCE_S) is not None
        except TimeoutError:
            self.given_up += 1
            return False

    def may_be_in(self, lines: str) -> bool:
        """Return False only if no line matches; one search of the text is quicker than one a line."""
        if self._sees_line_ends:
            return True
        try:
            return self._anywhere.search(lines, timeout=_PATIENCE_S) is not None
        except TimeoutError:
            return True


@dataclass(frozen=True, slots=True)
class Ended:
    """Complete lines of output, separated by line feeds.

    ``first_ns`` is the time at which the last character of the first line arrived. ``t_ns`` is the
    time for all other lines.
    """

    text: str
    first_ns: int
    t_ns: int


class Lines:
    """Splits output into lines; a carriage return, as of a progress bar, also ends a line."""

    def __init__(self) -> None:
        self._begun = b""
        self._begun_ns = 0

    @property
    def begun(self) -> str:
        """The text after the last line end of the output: a line that is not complete yet."""
        return _plain(self._begun)

    def feed(self, data: bytes, t_ns: int) -> Ended | None:
        """Return the lines that ``data`` completes; None if ``data`` contains no line end."""
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
        """Return the text after the last line end; None if there is none."""
        return Ended(self.begun, self._begun_ns, self._begun_ns) if self._begun else None


def _plain(output: bytes) -> str:
    """Decode output, and remove the escape sequences of terminals, such as those for colours."""
    text = output.decode(errors="replace").replace("\r", "\n")
    return _ESCAPES.sub("", text) if "\x1b" in text else text
