"""The names that programs, suites and shell scripts of users hold: functions, options, defaults."""

import inspect
import json
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from textwrap import indent
from typing import Any, cast

import click
import pytest
from command_line import verbs, weighin
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
    same(
        f"signatures/verbs/{name}.txt",
        "".join(f"{line}\n" for line in sorted(map(_option, params))),
    )
    shown = weighin(*name.split()[1:], "--help").out
    options = [one.opts[-1] for one in params if isinstance(one, click.Option)]
    assert [one for one in options if one not in shown] == []


KEYS = {
    "suite": ("suite.yaml", "models: gpt2-tiny\nx: 1\n", "bench --suite ./suite.yaml"),
    "suite of commands": ("suite.yaml", "commands: 'true'\nx: 1\n", "run --suite ./suite.yaml"),
    "command": (
        "suite.yaml",
        "commands: [{name: a, command: 'true', x: 1}]\n",
        "run --suite ./suite.yaml",
    ),
    "model of a suite": (
        "suite.yaml",
        "models: {name: a, folder: b, x: 1}\n",
        "bench --suite ./suite.yaml",
    ),
    "strategy of a suite": (
        "suite.yaml",
        "models: gpt2-tiny\nstrategies: {name: a, x: 1}\n",
        "bench --suite ./suite.yaml",
    ),
    "pyproject": ("pyproject.toml", "[tool.weighin]\nx = 1\n", "list"),
    "pyproject of bench": ("pyproject.toml", "[tool.weighin.bench]\nx = 1\n", "list"),
    "pyproject of run": ("pyproject.toml", "[tool.weighin.run]\nx = 1\n", "list"),
}


@pytest.mark.parametrize("name", KEYS)
def test_the_keys_of_a_file(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: Compare
) -> None:
    """An unknown key is answered with all that are known."""
    monkeypatch.chdir(tmp_path)
    file, text, words = KEYS[name]
    Path(file).write_text(text)
    ended = weighin(*words.split())
    assert ended.code == 2
    known = ended.err.partition("known")[2].partition(": ")[2].strip().split(", ")
    same(f"signatures/keys/{name}.txt", "".join(f"{key}\n" for key in sorted(known)))


def test_the_verbs(same: Compare) -> None:
    same("signatures/verbs.txt", "\n".join(verbs()) + "\n")


def test_the_short_ways_to_help() -> None:
    whole = weighin("bench", "--help")
    assert whole.code == 0
    assert weighin("bench", "-h") == weighin("help", "bench") == whole
    assert weighin().code == 2
    assert weighin().err == weighin("--help").out
    assert weighin("--version").out.split()[0] == "weighin"


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


@pytest.mark.parametrize(
    ("group", "function", "kind"),
    [("weighin.strategies", "load", "strategies"), ("weighin.saving", "save", "saving")],
)
def test_another_package_adds_a_strategy_by_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, function: str, kind: str
) -> None:
    about = tmp_path / "theirs-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[{group}]\ntheirs = their_way\n")
    (tmp_path / "their_way.py").write_text(f'"""Theirs."""\n\ndef {function}(job): ...\n')
    monkeypatch.syspath_prepend(tmp_path)
    listed = json.loads(weighin("list", "strategies", "--json", "-").out)
    found = [one for one in listed[kind] if one["name"] == "their_way"]
    assert [(one["summary"], one["path"]) for one in found] == [
        ("Theirs.", str(tmp_path / "their_way.py"))
    ]


def test_phases_do_nothing_outside_of_weighin(monkeypatch: pytest.MonkeyPatch) -> None:
    from weighin import phase

    @phase("add")
    def add(one: int, other: int = 1) -> int:
        """Add."""
        with phase("inside"):
            return one + other

    assert (add(2), add(2, other=3), add.__name__, add.__doc__) == (3, 5, "add", "Add.")
    with pytest.raises(ZeroDivisionError), phase("wrong"):
        1 / 0  # noqa: B018


PROGRAM = """
import weighin

with weighin.phase("read"):
    with weighin.phase("inner"):
        data = bytes(30 << 20)

@weighin.phase("work")
def work():
    return len(data)

work()
work()
"""


def test_the_phases_of_a_program_are_in_its_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("program.py").write_text(PROGRAM)
    words = ("--isolation", "process", "--no-stacks", "--out", "run")
    ended = weighin("run", *words, "--", sys.executable, "program.py")
    assert ended.code == 0, ended.err
    record = json.loads(Path("run/records.jsonl").read_text())
    names = [phase["name"] for phase in record["phases"]]
    assert names == ["read", "inner", "work", "work"]
