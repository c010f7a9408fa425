"""Every command in README and docs has a verb, arguments and options that weighin knows and uses."""

import re
from pathlib import Path

import click
import pytest
from documented import ROOT, commands, words
from factories import read_suite

from weighin.cli import _options
from weighin.cli.app import app
from weighin.settings.definition import COMMANDS


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


def test_the_examples_of_suites_are_suites(tmp_path: Path) -> None:
    examples = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/suites.md").read_text(), re.DOTALL)
    mine, commands = examples
    path = tmp_path / "suite.yaml"
    path.write_text(mine)
    assert len(read_suite(path).models) == 3
    path.write_text(commands)
    train, load = read_suite(path, COMMANDS).commands
    assert train.command == ["python", "train.py", "--epochs", "1"]
    assert train.marks == [r"epoch \d+"]
    assert (load.cold, load.environment) == (["weights.pt"], {"OMP_NUM_THREADS": "1"})
