"""The page of all commands, written from the command line's own definitions at each build."""

from collections.abc import Iterator
from typing import Any, Final

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from rich.text import Text

from weighin.cli.app import app

PAGE: Final = "commands.md"
_HEAD: Final = """# Commands

`weighin VERB --help` shows the same in a terminal.
"""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page."""
    files.append(File.generated(config, PAGE, content=text()))
    return files


def text() -> str:
    """Return the page: for each verb its purpose, usage, options and examples."""
    root = typer.main.get_command(app)
    return "\n".join([_HEAD, *_verbs(root, root.context_class(root, info_name="weighin"))])


def _verbs(group: Any, context: Any) -> Iterator[str]:
    for name in group.list_commands(context):
        verb = group.get_command(context, name)
        inner = verb.context_class(verb, info_name=name, parent=context)
        if hasattr(verb, "list_commands"):
            yield from _verbs(verb, inner)
        else:
            yield from _verb(verb, inner)


def _verb(verb: Any, context: Any) -> Iterator[str]:
    usage = verb.get_usage(context).removeprefix("Usage: ")
    yield f"## {context.command_path}\n\n{_plain(verb.help)}\n\n```\n{usage}\n```\n"
    records = [
        record
        for parameter in verb.get_params(context)
        if (record := _record(parameter, context)) and not record[0].startswith("--help")
    ]
    if records:
        yield "| argument or option | meaning |\n|---|---|"
        yield from (
            f"| {_cell(f'`{names}`')} | {_cell(help_text)} |" for names, help_text in records
        )
        yield ""
    yield from _epilog(verb.epilog or "")


def _record(parameter: Any, context: Any) -> tuple[str, str] | None:
    """Return the names of an option or argument, and its help with its default."""
    record = parameter.get_help_record(context)
    if record is None:  # hidden
        return None
    names, text = record
    default = text.removeprefix(parameter.help or "")  # "[default: 1]" is no markup
    return names, f"{_plain(parameter.help)} {default.strip()}"


def _epilog(epilog: str) -> Iterator[str]:
    """Yield examples as one block of code, and other paragraphs as they are."""
    paragraphs = [one for one in _plain(epilog).split("\n\n") if one.strip()]
    examples = [one.strip() for one in paragraphs if one.startswith("weighin ")]
    yield from (f"{one.strip()}\n" for one in paragraphs if one.startswith("Examples"))
    if examples:
        yield "\n".join(["```", *examples, "```", ""])
    rest = [one for one in paragraphs if not one.startswith(("weighin ", "Examples"))]
    yield from (f"{one.strip()}\n" for one in rest)


def _plain(markup: str | None) -> str:
    """Return help as text: the command line writes it in Rich's markup."""
    return Text.from_markup(markup or "").plain.strip()


def _cell(text: str) -> str:
    """Return text that may stand in a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")
