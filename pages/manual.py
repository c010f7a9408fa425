"""Write the manual page of ``weighin`` from what its verbs print as their help.

    python -m pages.manual > docs/weighin.1

The page has no date, so that the same verbs always give the same page. It uses the macros of
man(7).
"""

import re
import sys
from collections.abc import Iterator

import click
from click.testing import CliRunner

from weighin import __version__
from weighin.cli._verb import Verbs, summary
from weighin.cli.app import app
from weighin.errors import MEANINGS

_WIDTH = "72"
"""The columns of a help, which man indents by 7."""
_ENVIRONMENT = {
    "WEIGHIN_CACHE": "Folder for the checkpoints that weighin generates. Default: the user's cache"
    " folder.",
    "WEIGHIN_LOCK": "Name of a lock that a run of weighin holds while it measures, so that only one"
    " run at a time measures on a machine. A run with a lock of its own removes only what earlier"
    " runs with the same lock left when they were killed.",
    "TMPDIR": "Folder into which the measured processes of `weighin bench --set operation=save` write"
    " their checkpoints.",
    "NO_COLOR": "If set, the output has no colours.",
}


def manual() -> str:
    """Return the whole manual page as roff."""
    name, _, description = f"weighin - {summary(app)}".partition(" - ")
    lines = [
        f'.TH WEIGHIN 1 "" "weighin {__version__}" "User Commands"',
        ".nh",  # no hyphenation of words
        ".ad l",
        ".SH NAME",
        f"{name} \\- {_text(description[0].lower() + description[1:]).rstrip('.')}",
        ".SH SYNOPSIS",
        ".B weighin",
        r"\fIVERB\fR [\fIOPTIONS\fR] [\fIARGUMENTS\fR]",
    ]
    for heading, names in app.panels.items():
        lines.append(f'.SH "{heading.upper()}"')
        for each in names:
            lines += _verb(app.commands[each], each)
    lines += ['.SH "KEYS OF A SUITE"', *_printed("help", "suite")]
    for heading, terms in (("EXIT STATUS", MEANINGS), ("ENVIRONMENT", _ENVIRONMENT)):
        lines.append(f'.SH "{heading}"')
        for term, meaning in terms.items():
            lines += [".TP", f"\\fB{_text(str(term))}\\fR", _text(meaning)]
    return "\n".join(lines) + "\n"


def _verb(verb: click.Command, *names: str) -> Iterator[str]:
    """Yield the help of one verb, or of each verb of a group."""
    if isinstance(verb, Verbs):
        for name, inner in verb.commands.items():
            yield from _verb(inner, *names, name)
        return
    yield f'.SS "weighin {" ".join(names)}"'
    yield from _printed(*names, "--help")


def _printed(*words: str) -> list[str]:
    """Return what weighin prints, as lines that roff leaves as they are."""
    printed = CliRunner().invoke(app, words, env={"COLUMNS": _WIDTH}).output
    return [".nf", *map(_text, printed.rstrip().splitlines()), ".fi"]


def _text(text: str) -> str:
    """Return one line, escaped so that roff shows it unchanged."""
    line = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", line)


if __name__ == "__main__":
    sys.stdout.write(manual())
