"""Foreign text made fit for one line of ours: error messages, and what a strategy printed."""

import re
from typing import Final

LINE_LENGTH: Final = 300
"""Enough for the first few names of a long list, little enough for a table and a terminal."""


def one_line(text: str, length: int = LINE_LENGTH) -> str:
    """Return ``text`` in one line without control characters, cut to ``length`` characters."""
    squeezed = " ".join(text.split())
    line = "".join(letter if letter.isprintable() else "?" for letter in squeezed)
    return line if len(line) <= length else line[: length - 3] + "..."


def markdown(text: str) -> str:
    """Return Markdown that shows ``text`` as it is, in one line; a _ within a word needs no escape."""
    text = re.sub(r"[\\`*\[\]|#~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
