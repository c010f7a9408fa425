"""Make text from other programs safe to print: one line, no control characters, Markdown escaped."""

import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Final

# Not compiled here: a worker imports this module before torch, and must stay small.
_LOG_COMMAND: Final = r"(?<!\S)::"
_ACCESS: Final = (
    r"(?<![A-Za-z0-9])(hf_|api_org_|gh[oprsu]_|github_pat_|glpat-|sk-|xox[abeprs]-|AKIA|AIza|ya29\.|nvapi-"
    r"|pypi-|dop_v1_|eyJ)[\w.-]{12,}"
)


def one_line(text: str, length: int = 300) -> str:
    """Return ``text`` as one line without control characters, cut to ``length`` characters."""
    line = printable(" ".join(text.split()))
    return line if len(line) <= length else line[: length - 3] + "..."


def printable(text: str, kept: str = "") -> str:
    """Replace what is unprintable and not in ``kept`` by "?", and "::", which may begin a command of GitHub's log."""
    if not text.isprintable():
        text = "".join(one if one.isprintable() or one in kept else "?" for one in text)
    return re.sub(_LOG_COMMAND, ": :", text) if "::" in text else text


def masked(text: str) -> str:
    """Hide all but the prefix of each access token whose kind has a known prefix."""
    return re.sub(_ACCESS, r"\1***", text)


def few(names: Sequence[str], most: int = 3) -> str:
    """Return the first ``most`` names, and how many names follow: "a, b, c and 5 more"."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def first_names(names: Iterable[str]) -> str:
    """Return the first three names, followed by "..." if there are more."""
    first = [*islice(names, 4)]
    return ", ".join([*first[:3], *["..."] * (len(first) > 3)])


def plain(name: str) -> str:
    """Return a tensor's name for a list in a message: without quotes, and cut if it is very long."""
    return name if len(name) <= 100 else f"{name[:100]}... ({len(name):,} characters)"


def shown(name: object) -> str:
    """Return a tensor's name for a message: in quotes, and cut if it is very long."""
    if isinstance(name, str | bytes) and len(name) > 100:
        return f"{name[:100]!r}... ({len(name):,} characters)"
    if isinstance(name, int) and name.bit_length() > 256:  # Python may refuse to print it
        return f"an integer of {name.bit_length():,} bits"
    return repr(name)


def short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}..."


def markdown(text: str) -> str:
    """Escape ``text`` so that Markdown shows it unchanged; a _ inside a word needs no escape."""
    text = re.sub(r"[\\`*\[\]|#~]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\\g<0>", text)
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
