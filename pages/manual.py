"""Write the manual page of ``weighin`` from the definitions of its verbs.

    python -m pages.manual > docs/weighin.1

The page has no date, so that the same verbs always give the same page. It uses the macros of
man(7).
"""

import re
import sys
from collections.abc import Iterable, Iterator
from inspect import cleandoc

import click

from weighin import __version__
from weighin.cli._verb import Verb, Verbs, summary
from weighin.cli.app import app, keys_of_a_suite
from weighin.errors import MEANINGS

_SETTINGS = """\
[tool.weighin]
isolation = "docker"
strategies = ["baseline", "streaming", "./mine.py"]

[tool.weighin.bench]
ram = ["8g", "4g"]
"""

_COMPLETION = (
    'eval "$(_WEIGHIN_COMPLETE=bash_source weighin)"',
    'eval "$(_WEIGHIN_COMPLETE=zsh_source weighin)"',
    "_WEIGHIN_COMPLETE=fish_source weighin | source",
)

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
        ".PP",
        _text("weighin help VERB, or weighin VERB -h, shows the help of one verb."),
    ]
    # click creates the help option of a verb in its first context, so the context is as in the shell.
    with click.Context(app, info_name="weighin", **app.context_settings) as context:
        for heading, names in app.panels.items():
            lines.append(f'.SH "{heading.upper()}"')
            for name in names:
                lines += _verb(app.commands[name], context)
    return "\n".join([*lines, *_sections()]) + "\n"


def _verb(verb: click.Command, parent: click.Context) -> Iterator[str]:
    """Yield the lines of the manual page on one verb, or on each verb of a group."""
    settings = verb.context_settings
    with click.Context(verb, parent=parent, info_name=verb.name, **settings) as context:
        if isinstance(verb, Verbs):
            for inner in verb.commands.values():
                yield from _verb(inner, context)
            return
        assert isinstance(verb, Verb)
        usage = " ".join([context.command_path, *verb.collect_usage_pieces(context)])
        yield f'.SS "{_text(usage)}"'
        for paragraph in cleandoc(verb.help or "").split("\n\n"):
            yield from (".PP", _text(paragraph))
        for param in verb.get_params(context):
            record = param.get_help_record(context)
            if record and "--help" not in param.opts:
                yield from (".TP", f"\\fB{_text(record[0])}\\fR", _text(record[1]))
        if verb.examples:
            yield from (".PP", "Examples:")
            for meaning, command in verb.examples.items():
                yield from _literal(f"{meaning}:", [command])


def _sections() -> Iterator[str]:
    """Yield the sections for all verbs: settings, exit codes, environment, shell completion."""
    yield '.SH "SETTINGS"'
    yield _text(
        "The nearest pyproject.toml with a table [tool.weighin], in the current folder or above"
        " it, holds defaults of options. weighin ignores a pyproject.toml that belongs neither to"
        " this user, nor to root, nor to the owner of the current folder. The keys in these"
        " tables are the long names of options. [tool.weighin] applies to bench, floor, predict"
        " and recommend; [tool.weighin.VERB] applies to one verb and overrides [tool.weighin]."
        " The command line overrides both tables. A relative path in pyproject.toml starts at the"
        " folder of that file. Options that allow or confirm something (--trust, --update,"
        " --yes) are accepted only on the command line."
    )
    yield from _literal("", _SETTINGS.splitlines())
    yield '.SH "KEYS OF A SUITE"'
    yield _text(
        "A suite is a YAML file with these keys; --set KEY=VALUE sets them on the command line."
        " Options and --set override a suite, which overrides pyproject.toml."
    )
    for key, meaning in keys_of_a_suite():
        yield from (".TP", f"\\fB{_text(key)}\\fR", _text(meaning))
    yield '.SH "EXIT STATUS"'
    for code, meaning in MEANINGS.items():
        yield from (".TP", f"\\fB{code}\\fR", _text(meaning))
    yield '.SH "ENVIRONMENT"'
    for name, meaning in _ENVIRONMENT.items():
        yield from (".TP", f"\\fB{_text(name)}\\fR", _text(meaning))
    yield '.SH "SHELL COMPLETION"'
    yield _text("In ~/.bashrc, ~/.zshrc or ~/.config/fish/config.fish:")
    yield from _literal("", _COMPLETION)


def _literal(heading: str, lines: Iterable[str]) -> Iterator[str]:
    yield ".PP"
    if heading:
        yield from (_text(heading), ".PP")
    yield from (".RS 4", ".nf", *map(_text, lines), ".fi", ".RE")


def _text(text: str) -> str:
    """Return a text as one line, escaped so that roff shows it unchanged."""
    line = text if text.startswith(" ") else " ".join(text.split())
    line = line.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"^([.'])", r"\\&\1", line)


if __name__ == "__main__":
    sys.stdout.write(manual())
