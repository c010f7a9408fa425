"""Define click classes for the verbs (subcommands). They format help, and add hints to errors."""

import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from os.path import normpath
from shlex import join
from types import MappingProxyType
from typing import Any, cast

import click

from weighin.cli import _settings, _wrap
from weighin.errors import EXPLAINED, ConfigError, WholePipeline

_WIDEST = 100  # columns
_WORDS = "weighin.words"
"""Key in a click context's ``meta`` for the words that were typed after the verb."""
_TOKEN = re.compile(r"""(?:'[^']*'|"[^"]*"|\S)+""")
"""Matches a word of a shell command; spaces inside quotes are part of the word."""


class _Formatter(click.HelpFormatter):
    """Formats help without breaking words, even in narrow terminals."""

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        first, *rest = _wrap.wrap(f"{prefix or 'Usage: '}{prog} {args}", self.width)
        self.write("\n".join([first, *(f"    {line}" for line in rest)]) + "\n")

    def write_heading(self, heading: str) -> None:
        self.write(click.style(f"{heading}:", bold=True) + "\n")

    def write_text(self, text: str) -> None:
        indent = " " * self.current_indent
        paragraphs = [
            "\n".join(indent + line for line in _wrap.wrap(paragraph, self.width - len(indent)))
            for paragraph in text.split("\n\n")
        ]
        self.write("\n\n".join(paragraphs) + "\n")

    def write_dl(self, rows: Iterable[tuple[str, str]], *_columns: int, **_spacing: int) -> None:
        lines = _wrap.definitions(list(rows), self.width, self.current_indent)
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
        """Return a formatter for the terminal's width, at most ``_WIDEST`` columns."""
        return _Formatter(width=min(shutil.get_terminal_size().columns, _WIDEST))


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
        for one in self.params:
            if isinstance(one, click.Option) and one.default == "":
                one.show_default = False
        self.examples = examples
        self.codes = codes

    def format_epilog(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        assert isinstance(formatter, _Formatter)
        if self.examples:
            with formatter.section("Examples"):
                for meaning, command in self.examples.items():
                    formatter.write_text(f"{meaning}:")
                    with formatter.indentation():
                        formatter.write_command(command)
        if self.codes:
            _write_codes(formatter)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_WORDS] = list(args)
        return super().parse_args(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the verb. If it raises an error, extend the error's repair.

        For a value from pyproject.toml, the repair names this file. If the user gave a pipeline in
        place of a model, the repair shows the typed command with the pipeline's largest model.
        """
        try:
            return super().invoke(ctx)
        except ConfigError as error:
            _settings.name_source(ctx, error)
            raise
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
    """A verb for a model, or for a command after ``--``.

    The parameter ``command`` holds all words after the first ``--``; without ``--``, it is None.
    """

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

    ``load`` imports a verb by name. A verb is imported only at its first use, to save time.
    """

    context_class = _Context

    def __init__(
        self,
        name: str,
        panels: Mapping[str, Sequence[str]],
        load: Callable[[str], click.Command],
        codes: bool = False,
        **attributes: Any,
    ) -> None:
        super().__init__(name, **attributes)
        names = [one for panel in panels.values() for one in panel]
        self.commands = cast("dict[str, click.Command]", _Commands(names, load))
        self.panels = panels
        self.codes = codes

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
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
            _write_codes(formatter)


def _write_codes(formatter: click.HelpFormatter) -> None:
    formatter.write_paragraph()
    formatter.write_text(EXPLAINED)


def summary(command: click.Command) -> str:
    """Return the first paragraph of a command's help, in one line."""
    return " ".join((command.help or "").partition("\n\n")[0].split())
