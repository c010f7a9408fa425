"""Define click classes for the verbs (subcommands). They format help, and add hints to errors."""

import re
import shutil
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from os.path import normpath
from shlex import join
from types import MappingProxyType
from typing import Any, Final, cast

import click

from weighin.cli._pyproject import FORMER
from weighin.errors import EXPLAINED, ConfigError, WholePipeline

WIDEST: Final = 100  # columns: longer lines are hard to read
_WORDS = "weighin.words"
"""Key in a click context's ``meta`` for the words that were typed after the verb."""
_TOKEN = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")
"""Matches a word of a shell command; spaces inside quotes are part of the word."""
_GROUPS = ("What to load", "Limits", "How to measure", "Where to write", "Options")
_BESIDE_WIDTH = 70
"""In a terminal with fewer columns than this, the definition of a long term is below the term."""
_LONGEST_BESIDE = 30
"""In a wide terminal, a term of at most this many columns has its definition beside it."""


def wrap(text: str, width: int) -> list[str]:
    """Return the lines of one paragraph; a word that is longer than ``width`` stays whole."""
    words, width = " ".join(text.split()), max(width, 1)
    return textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False)


def definitions(rows: Sequence[tuple[str, str]], width: int, indent: int = 2) -> Iterator[str]:
    """Yield lines of at most ``width`` columns for (term, definition) pairs.

    A definition begins in the line of its term, or in the next line if the term is too long.
    """
    longest = max((len(term) for term, _ in rows), default=0)
    limit = _LONGEST_BESIDE if width >= _BESIDE_WIDTH else width // 4
    column = indent + min(longest, limit) + 2
    if longest > limit and width < _BESIDE_WIDTH:
        column = indent + 4
    for term, definition in rows:
        head = " " * indent + term
        lines = wrap(definition, width - column)
        if lines and len(head) + 2 <= column:
            yield head.ljust(column) + lines.pop(0)
        else:
            yield head
        yield from (" " * column + line for line in lines)


class _Formatter(click.HelpFormatter):
    """Formats help without breaking words, even in narrow terminals."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        first, *rest = wrap(f"{prefix or 'Usage: '}{prog} {args}", self.width)
        self.write("\n".join([first, *(f"    {line}" for line in rest)]) + "\n")

    def write_heading(self, heading: str) -> None:
        self.write(click.style(f"{heading}:", bold=True) + "\n")

    def write_text(self, text: str) -> None:
        indent = " " * self.current_indent
        paragraphs = [
            "\n".join(indent + line for line in wrap(paragraph, self.width - len(indent)))
            for paragraph in text.split("\n\n")
        ]
        self.write("\n\n".join(paragraphs) + "\n")

    def write_dl(self, rows: Iterable[tuple[str, str]], *_columns: int, **_spacing: int) -> None:
        lines = definitions(list(rows), self.width, self.current_indent)
        self.write("".join(f"{line}\n" for line in lines))

    def write_command(self, command: str) -> None:
        """Write a command in one line, or as several lines that a shell reads as one command."""
        indent = " " * self.current_indent
        if len(indent) + len(command) <= self.width:
            self.write(f"{indent}{command}\n")
            return
        room = self.width - len(indent) - len(" \\")
        lines: list[str] = []
        for token in _TOKEN.findall(command):
            if lines and len(lines[-1]) + 1 + len(token) <= room:
                lines[-1] += f" {token}"
            else:
                lines.append(f"    {token}" if lines else token)
        self.write(" \\\n".join(indent + line for line in lines) + "\n")


class _Context(click.Context):
    def make_formatter(self) -> _Formatter:
        """Return a formatter for the terminal's width, at most ``WIDEST`` columns."""
        return _Formatter(width=min(shutil.get_terminal_size().columns, WIDEST))


class Verb(click.Command):
    """A verb of ``weighin``.

    The help shows ``examples``, whose keys say what a command does, and whose values are the
    commands. With ``codes``, the help also lists the exit codes of weighin.
    """

    context_class = _Context

    def __init__(
        self,
        *arguments: Any,
        examples: Mapping[str, str] = MappingProxyType({}),
        codes: bool = False,
        **attributes: Any,
    ) -> None:
        attributes.setdefault("context_settings", {"show_default": True})
        super().__init__(*arguments, **attributes)
        self.examples = examples
        self.codes = codes

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the verb does, examples, the options by groups, and the exit codes."""
        assert isinstance(formatter, _Formatter)
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for meaning, command in self.examples.items():
                    formatter.write_text(f"{meaning}:")
                    with formatter.indentation():
                        formatter.write_command(command)
        self.format_options(ctx, formatter)
        if self.codes:
            formatter.write_paragraph()
            formatter.write_text(EXPLAINED)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups = {one: list[tuple[str, str]]() for one in ("Arguments", *_GROUPS)}
        for param in self.get_params(ctx):
            is_option = isinstance(param, click.Option)
            group = getattr(param, "group", "Options") if is_option else "Arguments"
            if record := param.get_help_record(ctx):
                groups[group].append(record)
        for group, records in groups.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            self._refuse_former(error.option_name)
            raise

    def _refuse_former(self, option: str) -> None:
        """Raise ConfigError for an option that is a key of --set."""
        if not any(one.name == "assigned" for one in self.params):
            return
        from weighin.settings.definition import COMMANDS, MODELS, used_by

        name = option.lstrip("-").replace("-", "_")
        key, verb = FORMER.get(name, name), str(self.name)
        kinds = {"run": (COMMANDS,), "floor": (MODELS, COMMANDS)}.get(verb, (MODELS,))
        if any(key in used_by(verb, kind) for kind in kinds):
            inner = {"environment": ".NAME", "labels": ".KEY"}.get(key, "")
            raise ConfigError(
                f"weighin {verb} has no option {option}",
                f"set the key of a suite: --set {key}{inner}=VALUE",
            )

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb. If the user gave a pipeline in place of a model, the error's repair shows the
        typed command with the pipeline's largest model.
        """
        try:
            return super().invoke(ctx)
        except WholePipeline as error:
            words = [
                error.largest if normpath(word) == normpath(error.folder) else word
                for word in ctx.meta[_WORDS]
            ]
            error.repair = (
                "give the folder of one part of the pipeline; for the largest part:"
                f" {join(['weighin', str(self.name), *words])}"
            )
            raise


class VerbOfModelOrCommand(Verb):
    """A verb for a model, or for a command after ``--``, without which ``command`` is None."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        here = args.index("--") if "--" in args else len(args)
        rest = super().parse_args(ctx, args[:here])
        if ctx.params["command"]:
            ctx.fail(f"Got unexpected extra arguments ({' '.join(ctx.params['command'])})")
        ctx.params["command"] = None
        if here < len(args):
            ctx.params["command"] = tuple(args[here + 1 :])
            ctx.set_parameter_source("command", click.core.ParameterSource.COMMANDLINE)
        return rest


class _Commands(Mapping[str, click.Command]):
    """A mapping from names to verbs that imports a verb's module when the verb is looked up."""

    def __init__(self, names: Iterable[str], load: Callable[[str], click.Command]) -> None:
        self._names = tuple(names)
        self._load = cache(load)

    def __getitem__(self, name: str) -> click.Command:
        if name not in self._names:
            raise KeyError(name)
        return self._load(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class Verbs(click.Group):
    """A group of verbs. ``panels`` has the headings of the help, and the verbs under each heading.

    ``load`` imports a verb by name. A verb is imported only at its first use, to save time. ``topics``
    are terms and their meanings, which `weighin help TOPIC` shows.
    """

    context_class = _Context

    def __init__(
        self,
        name: str,
        panels: Mapping[str, Sequence[str]],
        load: Callable[[str], click.Command],
        codes: bool = False,
        topics: Mapping[str, Callable[[], Sequence[tuple[str, str]]]] = MappingProxyType({}),
        **attributes: Any,
    ) -> None:
        super().__init__(name, **attributes)
        names = [one for panel in panels.values() for one in panel]
        self.commands = cast("dict[str, click.Command]", _Commands(names, load))
        self.panels = panels
        self.codes = codes
        self.topics = topics

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args[:1] == ["help"] and len(args) == 2 and (topic := self.topics.get(args[1])):
            formatter = ctx.make_formatter()
            formatter.write_dl(topic())
            click.echo(formatter.getvalue().rstrip("\n"))
            ctx.exit()
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]  # `weighin help VERB` is `weighin VERB --help`
        return super().parse_args(ctx, args)

    def list_commands(self, _: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs of each panel, each with the first paragraph of its help."""
        longest = max(map(len, self.commands))
        for heading, names in self.panels.items():
            with formatter.section(heading):
                formatter.write_dl(
                    [(name.ljust(longest), summary(self.commands[name])) for name in names]
                )
        if self.codes:
            formatter.write_paragraph()
            formatter.write_text(EXPLAINED)


def summary(command: click.Command) -> str:
    """Return the first paragraph of a command's help, in one line."""
    return " ".join((command.help or "").partition("\n\n")[0].split())
