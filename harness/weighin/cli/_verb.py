"""The classes of verbs, with one line of text for each parameter, and a help that breaks no word."""

import shutil
import textwrap
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import click

from weighin.errors import EXPLAINED, ConfigError

WIDEST: Final = 100  # columns: longer lines are hard to read
WHAT: Final = "What to load"
LIMITS: Final = "Limits"
HOW: Final = "How to measure"
WRITE: Final = "Where to write"
OTHER: Final = "Options"
PATH: Final = click.Path(path_type=Path)
_PATHS: Final = ("FILE", "FOLDER", "RUN", "RUNS", "SOURCE", "TARGET")


class Option(click.Option):
    """An option in a group of a verb's help; ``key`` is the setting (or "command.KEY") that it sets."""

    def __init__(
        self, names: Sequence[str], group: str, text: str, key: str = "", **more: Any
    ) -> None:
        super().__init__([*names], help=text, **more)
        self.group, self.key = group, key


def parameters(
    lines: Mapping[str, str], group: str = OTHER, **defaults: Any
) -> list[click.Parameter]:
    """Return arguments and options from what the help shows of each, by their texts.

    "--dtype DTYPE" is an option, "--all" a flag, RUN an argument, [RUN] one that may be missing, "..." repeats.
    """
    found: list[click.Parameter] = []
    for shown, text in lines.items():
        words = shown.removesuffix(" ...").replace(",", "").split()
        names = [word for word in words if word.startswith("-")]
        value = "" if words[-1] in names else words[-1].strip("[]")
        more: dict[str, Any] = {"type": PATH} if value in _PATHS else {}
        name = (max(names, key=len) if names else value).lower().lstrip("-").replace("-", "_")
        if name in defaults:
            more["default"] = defaults[name]
        many = shown.endswith(" ...")
        if names:
            more |= {"metavar": value} if value else {"is_flag": True}
            found.append(Option(names, group, text, multiple=many, **more))
        else:
            more |= {"nargs": -1 if many else 1, "required": "[" not in shown}
            found.append(click.Argument([name], help=text, **more))
    return found


def wrap(text: str, width: int) -> list[str]:
    """Return the lines of one paragraph; a word that is longer than ``width`` stays whole."""
    words, width = " ".join(text.split()), max(width, 1)
    return textwrap.wrap(words, width, break_long_words=False, break_on_hyphens=False)


def definitions(rows: Sequence[tuple[str, str]], width: int, indent: int = 2) -> Iterator[str]:
    """Yield lines of (term, definition) pairs; after a long term, the definition has its own line."""
    longest = max((len(term) for term, _ in rows), default=0)
    column = indent + min(longest, 30, width // 2) + 2
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


class _Context(click.Context):
    def make_formatter(self) -> _Formatter:
        return _Formatter(width=min(shutil.get_terminal_size().columns, WIDEST))


class Verb(click.Command):
    """A verb of ``weighin``; ``examples`` are commands by what they do, ``codes`` shows exit codes."""

    context_class = _Context

    def __init__(
        self,
        name: str,
        examples: Mapping[str, str] = MappingProxyType({}),
        codes: bool = False,
        context_settings: Mapping[str, Any] = MappingProxyType({}),
        **attributes: Any,
    ) -> None:
        settings = {"show_default": True, **context_settings}
        super().__init__(name, context_settings=settings, **attributes)
        self.examples, self.codes = examples, codes

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what the verb does, examples, the options by groups, and the exit codes."""
        self.format_usage(ctx, formatter)
        self.format_help_text(ctx, formatter)
        if self.examples:
            with formatter.section("Examples"):
                for meaning, command in self.examples.items():
                    formatter.write_text(f"{meaning}:")
                    # In one line, however long: what a terminal wraps can be pasted.
                    formatter.write(f"{' ' * (formatter.current_indent + 2)}{command}\n")
        headings = ("Arguments", WHAT, LIMITS, HOW, WRITE, OTHER)
        groups = {one: list[tuple[str, str]]() for one in headings}
        for param in self.get_params(ctx):
            is_option = isinstance(param, click.Option)
            if record := param.get_help_record(ctx):
                groups[getattr(param, "group", OTHER) if is_option else "Arguments"].append(record)
        for group, records in groups.items():
            if records:
                with formatter.section(group):
                    formatter.write_dl(records)
        if self.codes:
            formatter.write_paragraph()
            formatter.write_text(EXPLAINED)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        names = {one.name for one in self.params}
        before, rest = args, list[str]()
        # Where a model may stand, too, a command begins after --, and is None without it.
        if is_of_both := names >= {"model", "command"}:
            here = args.index("--") if "--" in args else len(args)
            before, rest = args[:here], args[here:]
        try:
            left = super().parse_args(ctx, before)
        except click.NoSuchOption as error:
            if "assigned" in names:
                repair = "if it is a key of a suite: --set KEY=VALUE (weighin help suite)"
                raise ConfigError(error.format_message(), repair) from None
            raise
        if is_of_both:
            if ctx.params["command"]:
                ctx.fail(f"Got unexpected extra arguments ({' '.join(ctx.params['command'])})")
            ctx.params["command"] = tuple(rest[1:]) if rest else None
            if rest:
                ctx.set_parameter_source("command", click.core.ParameterSource.COMMANDLINE)
        return left


Body = Callable[[click.Context, dict[str, Any]], None]


def verb(*params: click.Parameter, name: str = "", **attributes: Any) -> Callable[[Body], Verb]:
    """Return a decorator that makes a verb of a function of the context and what was typed."""

    def decorate(function: Body) -> Verb:
        def call(**typed: Any) -> None:
            function(click.get_current_context(), typed)

        return Verb(
            name or function.__name__, params=[*params], callback=call, help=function.__doc__,
            **attributes,
        )  # fmt: skip

    return decorate


class _Commands(UserDict[str, Any]):
    """Verbs by name, each of which is imported when it is looked up."""

    def __getitem__(self, name: str) -> click.Command:
        return self.data[name](name)  # type: ignore[no-any-return]


class Verbs(click.Group):
    """A group of verbs: ``panels`` by headings of the help, imported by ``load``, and ``topics`` of `weighin help`."""

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
        self.commands = _Commands(dict.fromkeys(names, load))
        self.panels, self.codes, self.topics = panels, codes, topics

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
