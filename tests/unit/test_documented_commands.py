"""Every command in README and docs has a verb, arguments and options that weighin knows and uses."""

import re

import click
import pytest
from documented import ROOT, commands, pages, words

from weighin.cli import _options
from weighin.cli.app import app
from weighin.settings.definition import Settings

_RENAMED = ("--class", "--grace", "--label", "--mount")
"""Options of before whose setting has another name."""
_OF_OTHERS = ("benchmarks", "tests")  # folders whose pages name options of other programs


@pytest.mark.parametrize(("page", "command"), commands())
def test_a_documented_command_is_understood(page: str, command: str) -> None:
    verb: click.Command = app
    context = click.Context(app, info_name="weighin", **app.context_settings)
    arguments = words(command)
    while isinstance(verb, click.Group):
        name, found, arguments = verb.resolve_command(context, arguments)
        assert found is not None, f"{page}: {command}"
        verb = found
        context = click.Context(verb, parent=context, info_name=name)
    typed = verb.make_context(context.info_name, arguments, parent=context.parent)
    if typed.params.get("resume"):
        _options.check(typed)  # refuses an option that would have no effect
    is_new = not any(typed.params.get(name) for name in ("resume", "check", "suite"))
    if "assigned" in typed.params and is_new:
        _options.read(typed)


def test_many_commands_are_documented() -> None:
    assert len(commands()) > 30


def test_prose_names_no_option_that_is_only_a_key_now() -> None:
    known = {name for verb in app.commands.values() for one in verb.params for name in one.opts}
    keys = {f"--{key.replace('_', '-')}" for key in Settings.model_fields}
    found = {
        f"{page.relative_to(ROOT)}: {option}"
        for page in pages()
        if page.parent.name not in _OF_OTHERS
        for span in re.findall(r"`((?:weighin |--)[^`\n]*)`", page.read_text())
        for option in re.findall(r"(?<!\S)--[a-z][a-z-]*", span)
        if option in {*keys, *_RENAMED} - known
    }
    assert not found
