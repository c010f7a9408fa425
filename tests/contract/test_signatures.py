"""The names that programs, suites and shell scripts of users hold: functions, options, defaults."""

import inspect
import json
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import Any, cast

import click
import pytest
from outside import typed, verbs
from snapshots import Compare

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _signature(function: Any) -> str:
    """Return a signature as people write it, equal for all Pythons."""
    signature = inspect.signature(function)
    plain = signature.replace(
        parameters=[each.replace(annotation=each.empty) for each in signature.parameters.values()],
        return_annotation=signature.empty,
    )
    types = {
        name: _annotation(": ", each.annotation) for name, each in signature.parameters.items()
    }
    typed = [f"    {name}{text}" for name, text in types.items() if text]
    return "\n".join([f"{plain}{_annotation(' -> ', signature.return_annotation)}", *typed])


def _annotation(before: str, annotation: object) -> str:
    if annotation is inspect.Parameter.empty:
        return ""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return before + text.replace("pathlib._local.", "pathlib.")


def _public(name: str, value: Any) -> Iterator[str]:
    """Yield a line for a public name, and one for each public attribute of a class."""
    if not callable(value):
        yield f"{name} = {value!r}"
        return
    if not inspect.isclass(value):
        yield f"{name}{_signature(value)}"
        return
    yield f"class {name}{_signature(value)}"
    for each in sorted(dir(value)):
        if each.startswith("_"):
            continue
        attribute = inspect.getattr_static(value, each)
        if isinstance(attribute, property):
            yield f"    {each}{_annotation(': ', inspect.signature(cast(Any, attribute.fget)).return_annotation)}"
        elif callable(attribute):
            yield indent(f"{each}{_signature(attribute)}", "    ")


@pytest.mark.parametrize("module", ["weighin", "weighin.strategy"])
def test_the_functions_of_a_public_module(module: str, same: Compare) -> None:
    found = import_module(module)
    names = [name for name in found.__all__ if name != "__version__"]
    lines = [line for name in names for line in _public(name, getattr(found, name))]
    same(f"signatures/{module}.txt", "\n".join(lines) + "\n")


def _option(option: click.Parameter) -> str:
    """Return how a parameter is typed, the type of its value, and its default."""
    about = option.to_info_dict()
    names = "/".join([", ".join(option.opts), *option.secondary_opts])
    is_flag = about.get("is_flag", False)
    kind = about["type"]
    words = [
        option.param_type_name if isinstance(option, click.Argument) else names,
        "" if is_flag else option.metavar or option.human_readable_name.upper(),
        "flag" if is_flag else "|".join(map(str, kind.get("choices", [kind["name"]]))),
        "required" if option.required else "",
        "repeatable" if option.multiple else "",
        f"nargs={option.nargs}" if option.nargs != 1 else "",
        f"default={json.dumps(about['default'], default=str)}",
    ]
    return " ".join(filter(None, words))


@pytest.mark.parametrize("name", verbs())
def test_the_options_of_a_verb_and_their_defaults(name: str, same: Compare) -> None:
    params = verbs()[name].params
    lines = sorted(map(_option, params))
    same(f"signatures/verbs/{name}.txt", "\n".join([*lines, ""]))
    shown = typed(*name.split()[1:], "--help").out
    options = [one.opts[-1] for one in params if isinstance(one, click.Option)]
    assert [one for one in options if one not in shown] == []


BENCH, RUN = "bench --suite ./suite.yaml", "run --suite ./suite.yaml"
KEYS = {
    "suite": ("suite.yaml", "models: gpt2-tiny\nx: 1\n", BENCH),
    "suite of commands": ("suite.yaml", "commands: 'true'\nx: 1\n", RUN),
    "command": ("suite.yaml", "commands: [{name: a, command: 'true', x: 1}]\n", RUN),
    "model of a suite": ("suite.yaml", "models: {name: a, folder: b, x: 1}\n", BENCH),
    "strategy of a suite": ("suite.yaml", "models: gpt2-tiny\nstrategies: {name: a, x: 1}\n", BENCH),
    "pyproject": ("pyproject.toml", "[tool.weighin]\nx = 1\n", "list"),
    "pyproject of bench": ("pyproject.toml", "[tool.weighin.bench]\nx = 1\n", "list"),
    "pyproject of run": ("pyproject.toml", "[tool.weighin.run]\nx = 1\n", "list"),
}  # fmt: skip


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.usefixtures("here")
def test_the_keys_of_a_file(name: str, same: Compare) -> None:
    """An unknown key is answered with all that are known."""
    file, text, words = KEYS[name]
    Path(file).write_text(text)
    ended = typed(*words.split())
    assert ended.code == 2
    known = ended.err.partition("known")[2].partition(": ")[2].strip().split(", ")
    same(f"signatures/keys/{name}.txt", "".join(f"{key}\n" for key in sorted(known)))


def test_the_verbs(same: Compare) -> None:
    same("signatures/verbs.txt", "\n".join(verbs()) + "\n")


def test_without_words_the_help_is_an_error() -> None:
    assert (typed().code, typed().err) == (2, typed("--help").out)
    assert typed("--version").out.split()[0] == "weighin"


class _Parser:
    """Stands for pytest's parser of options, and keeps what a plugin adds."""

    def __init__(self) -> None:
        self.added: list[str] = []

    def getgroup(self, name: str, *_: str) -> "_Parser":
        return self

    def addoption(self, *names: str, help: str, **attributes: object) -> None:  # noqa: A002
        self.added.append(f"option {' '.join(names)} {attributes}")

    def addini(self, name: str, help: str, **attributes: object) -> None:  # noqa: A002
        self.added.append(f"setting {name} {attributes}")

    def addinivalue_line(self, name: str, line: str) -> None:
        self.added.append(f"{name} {line.partition(': ')[0]}")


def test_the_plugin_of_pytest(weighin: Any, same: Compare) -> None:
    plugin, parser = import_module(PROJECT["entry-points"]["pytest11"]["weighin"]), _Parser()
    plugin.pytest_addoption(parser)
    plugin.pytest_configure(parser)
    fixture = [line for line in _public("weighin", type(weighin)) if line.startswith("    ")]
    same("signatures/pytest.txt", "\n".join([*parser.added, "fixture weighin", *fixture]) + "\n")


def test_what_the_wheel_offers_to_others(same: Compare) -> None:
    offered = {
        "requires-python": PROJECT["requires-python"],
        "scripts": PROJECT["scripts"],
        "entry-points": PROJECT["entry-points"],
        "extras": sorted({*PROJECT["optional-dependencies"]} - {"dev", "docs", "fuzz"}),
    }
    same("signatures/wheel.json", json.dumps(offered, indent=1) + "\n")
