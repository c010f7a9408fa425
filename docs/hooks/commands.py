"""The page of all commands, written from the command line's own definitions at each build."""

from collections.abc import Iterator
from inspect import cleandoc
from typing import Final

import click
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from weighin.cli._verb import Verb, Verbs
from weighin.cli.app import app
from weighin.errors import EXPLAINED

PAGE: Final = "commands.md"
_HEAD: Final = """# Commands

`weighin VERB --help` shows the same in a terminal.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    files.append(File.generated(config, PAGE, content=text()))
    return files


def text() -> str:
    """Return the page: for each verb its purpose, usage, arguments, options and examples."""
    with click.Context(app, info_name="weighin") as context:
        return "\n".join([_HEAD, *_verbs(app, context), f"{EXPLAINED}\n"])


def _verbs(group: Verbs, context: click.Context) -> Iterator[str]:
    for name, verb in group.commands.items():
        settings = verb.context_settings
        with click.Context(verb, info_name=name, parent=context, **settings) as inner:
            yield from _verbs(verb, inner) if isinstance(verb, Verbs) else _verb(verb, inner)


def _verb(verb: click.Command, context: click.Context) -> Iterator[str]:
    assert isinstance(verb, Verb)
    usage = " ".join([context.command_path, *verb.collect_usage_pieces(context)])
    yield f"## {context.command_path}\n\n{cleandoc(verb.help or '')}\n\n```\n{usage}\n```\n"
    records = [one.get_help_record(context) for one in verb.get_params(context)]
    yield "| argument or option | meaning |\n|---|---|"
    for names, meaning in filter(None, records):
        if not names.startswith("--help"):
            yield f"| {_cell(f'`{names}`')} | {_cell(meaning)} |"
    yield "\n".join(["", "```", *verb.examples, "```", ""])


def _cell(text: str) -> str:
    """Return text that may stand in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
